"""How much of a GPU's arithmetic a training uses: model FLOP/s utilization, as in appendix B of the PaLM paper."""

from __future__ import annotations

from models import SIZES, Task, llama_of, network

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
    """FLOPs that one token needs in forward and backward, whatever the program spends on it.

    6 for a parameter that is trained and 4 for a frozen one, which has no weight gradient, and
    12 * layers * hidden * sequence for attention over the whole square: PaLM (arXiv 2204.02311, appendix B) does not
    halve it for causal attention. Recomputation is not counted. Nor is the input embedding, which multiplies nothing
    (PaLM's is shared with the output's, which is counted).
    """
    model, size = network(task), SIZES[task.size]
    embedding = llama_of(model).get_input_embeddings().weight
    parameters = [p for p in model.parameters() if p is not embedding]
    arithmetic = sum(p.numel() * (6 if p.requires_grad else 4) for p in parameters)
    return arithmetic + 12 * size["num_hidden_layers"] * size["hidden_size"] * task.sequence


def utilization(task: Task, tokens_per_s: float, gpu: str) -> float | None:
    """The share of all GPUs' peak that ``tokens_per_s`` over all ranks is; None for an unknown GPU."""
    peak = PEAK_FLOPS.get(gpu)
    return tokens_per_s * flops_a_token(task) / (peak * task.nodes * task.gpus_per_node) if peak else None
