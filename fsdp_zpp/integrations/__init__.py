"""Strategies in training frameworks, a module for each.

:mod:`fsdp_zpp` imports none of them, so that their frameworks need not be installed.
"""
