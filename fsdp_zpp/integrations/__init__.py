"""Strategies in the frameworks that people train with; one module for each, which imports its framework when it is used.

None is imported by :mod:`fsdp_zpp` itself: ``from fsdp_zpp.integrations.accelerate import use_strategy``.
"""
