"""Strategies for torch's two FSDPs, and the reduction by itself as a communication hook."""
