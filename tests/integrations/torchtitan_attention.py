"""Attention that has a backward on CPUs, for ``--override.imports torchtitan_attention.without_masks``."""

from __future__ import annotations

from torchtitan.config.override import override
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention


@override(target=FlexAttention.Config, description="causal attention, across documents")
def without_masks(config: FlexAttention.Config) -> ScaledDotProductAttention.Config:
    """Replace torchtitan's default, which has no backward on CPUs."""
    return ScaledDotProductAttention.Config(sharding_config=config.sharding_config)
