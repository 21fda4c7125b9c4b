"""Model FLOP/s utilization, as in appendix B of the PaLM paper: the share of a GPU's arithmetic that is used."""

from __future__ import annotations

import torch.distributed as dist

from fsdp_zpp.planner.model_size import module_size

from .models import base_of, network
from .task import Task

PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
}
"""Dense bf16 FLOP/s by the name that torch gives a GPU, from the vendor's data sheets."""


def flops_a_token(task: Task) -> float:
    """Return the FLOPs that one token needs in forward and backward, whatever the program spends on it.

    A parameter takes 6 if it is trained and 4 if it is frozen, as it has no weight gradient then; attention takes
    12 * layers * hidden * sequence over the whole square, which PaLM (arXiv 2204.02311, appendix B) does not halve for
    causal attention. Of experts, those that a token reaches count. Recomputation does not, nor does the input
    embedding, which multiplies nothing, unless it is the output's, too, as PaLM's is.
    """
    model, config = network(task), task.config.get_text_config()
    base, size = base_of(model), module_size(model)
    flops: float = 6 * size.active_trainable + 4 * size.active_frozen
    embedding, head = base.get_input_embeddings().weight, base.get_output_embeddings()
    if head is None or head.weight is not embedding:
        flops -= embedding.numel() * (6 if embedding.requires_grad else 4)
    flops += 12 * config.num_hidden_layers * config.hidden_size * task.sequence
    return flops


def utilization(task: Task, tokens_per_s: float, gpu: str) -> float | None:
    """Return the share of all GPUs' peak that ``tokens_per_s`` over all ranks needs; None for an unknown GPU."""
    peak = PEAK_FLOPS.get(gpu)
    return tokens_per_s * flops_a_token(task) / (peak * dist.get_world_size()) if peak else None
