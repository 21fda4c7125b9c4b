"""Strategies in training frameworks, one module for each framework.

:mod:`fsdp_zpp` imports none of these modules, so no framework need be installed.
"""
