"""Model FLOP/s utilization, as in appendix B of the PaLM paper: the share of a GPU's arithmetic that is used."""

from __future__ import annotations

from models import SIZES, Task, base_of, network

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
    embedding, which multiplies nothing (PaLM's is shared with the output's, which counts).
    """
    model, size = network(task), SIZES[task.size]
    embedding = base_of(model).get_input_embeddings().weight
    parameters = [p for p in model.parameters() if p is not embedding]
    reached = size.get("num_experts_per_tok", 1) / size.get("num_experts", 1)
    arithmetic = sum(p.numel() * (6 if p.requires_grad else 4) * (reached if p.ndim == 3 else 1) for p in parameters)
    return arithmetic + 12 * size["num_hidden_layers"] * size["hidden_size"] * task.sequence


def utilization(task: Task, tokens_per_s: float, gpu: str) -> float | None:
    """Return the share of all GPUs' peak that ``tokens_per_s`` over all ranks needs; None for an unknown GPU."""
    peak = PEAK_FLOPS.get(gpu)
    return tokens_per_s * flops_a_token(task) / (peak * task.nodes * task.gpus_per_node) if peak else None
