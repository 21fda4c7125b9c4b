"""What to know when reading a plan: what was assumed, and what was asked for but has nothing to do."""

from __future__ import annotations

from ..at_work import at_work
from ..error_feedback import senders
from ..strategy import Strategy
from .conditions import Budget, Cluster, Work
from .model_size import ModelSize


def notes_on(size: ModelSize, cluster: Cluster, work: Work, budget: Budget, codecs: Strategy) -> tuple[str, ...]:
    """Notes on a plan, a sentence each."""
    notes = [
        f"Activations are taken as {budget.activations:g} GiB a GPU, and {budget.reserve:g} GiB are kept in reserve."
    ]
    if budget.gpu_memory is None:
        notes.append("No memory limit was given, so everything fits.")
    if work.tokens is None:
        notes.append("Computation is left out (tokens and tflops were not given): a step is its communication.")
    if cluster.nodes == 1:
        notes.append("One node sends nothing to others.")
    if cluster.gpus_per_node == 1:
        notes.append("Nodes of one GPU send nothing inside.")
    return (*notes, *_idle_codecs(size, cluster, codecs))


def _idle_codecs(size: ModelSize, cluster: Cluster, codecs: Strategy) -> list[str]:
    idle = []
    if codecs.frozen is not None and size.frozen == 0:
        idle.append(f"frozen={codecs.frozen} has nothing to do: all parameters are trainable.")
    for name, codec in (("weights", codecs.weights), ("gradients", codecs.gradients)):
        if codec is not None and cluster.nodes == 1:
            idle.append(f"{name}={codec} has nothing to do: it encodes what goes between nodes.")
    if at_work(codecs, cluster.topology) != codecs:
        idle.append("If the links inside the node are slow (PCIe), plan nodes of one GPU: gpus_per_node=1 encodes.")
    intra = codecs.gradient_codecs[0]
    if intra is not None and cluster.gpus_per_node == 1:
        idle.append(f"intra_gradients={intra} has nothing to do: it encodes what goes inside a node.")
    feedback = codecs.error_feedback
    hops = {"inter": "between nodes", "intra": "inside a node"} if feedback is not None else {}
    if feedback is not None and feedback.hops == "inter":
        del hops["intra"]
    fed_back = senders(feedback, at_work(codecs, cluster.topology).gradient_codecs, "G", cluster.topology, 0)
    idle += [
        f"error_feedback has nothing to do {where}: nothing encoded is sent there."
        for hop, where in hops.items()
        if hop not in fed_back
    ]
    return idle
