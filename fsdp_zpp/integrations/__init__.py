"""Strategies in the frameworks that people train with, a module for each.

:mod:`fsdp_zpp` imports none of them, so that their frameworks need not be installed.
"""
