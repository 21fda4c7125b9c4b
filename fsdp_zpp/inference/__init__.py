"""Weights of a sharded model for an inference engine that runs beside the training."""
