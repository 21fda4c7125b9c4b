"""Notes on a plan: what was assumed, and which arguments have no effect."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_zpp.config.error_feedback import error_buffer_specs
from fsdp_zpp.config.local_steps import LocalSteps
from fsdp_zpp.config.strategy import Strategy
from fsdp_zpp.config.topology import Topology

from .axes import Axes
from .config import Cluster, MemoryBudget, StepConfig
from .levels import with_levels, with_local_steps
from .model_config import Routing
from .model_size import ModelSize


def notes_on(
    size: ModelSize,
    cluster: Cluster,
    work: StepConfig,
    budget: MemoryBudget,
    codecs: Strategy,
    topologies: Sequence[Topology],
) -> list[str]:
    """Return notes on a plan, one sentence each.

    Args:
        size: The size of the model.
        cluster: The cluster.
        work: The work of a step.
        budget: The memory of a GPU.
        codecs: The codecs of all strategies.
        topologies: The layouts of the ranks that these are on.
    """
    notes = [
        f"Activations are assumed to take {budget.activations:g} GiB a GPU, and {budget.reserve:g} GiB are in reserve."
    ]
    if budget.gpu_memory is None:
        notes.append("No memory limit was given, so everything fits.")
    if work.tokens is None:
        notes.append("Computation is left out (tokens and tflops were not given): the step is communication alone.")
    elif work.launch_ms:
        notes.append(
            f"A GPU is taken to achieve {work.tflops:,.4g} TFLOP/s, and the CPU to launch a unit in {work.launch_ms:g} "
            "ms."
        )
    if cluster.nodes == 1:
        notes.append("A single node sends nothing to other nodes.")
    elif all(topology.nodes == 1 for topology in topologies):
        notes.append("Each strategy's ranks share a node, so it sends nothing to other nodes.")
    if cluster.gpus_per_node == 1:
        notes.append("Nodes of one GPU send nothing inside.")
    return notes + _idle_codecs(size, topologies, codecs)


def notes_on_local_steps(cluster: Cluster, codecs: Strategy, local_steps: LocalSteps | None) -> list[str]:
    """Return notes on local steps, if there are any."""
    if local_steps is None:
        return []
    if cluster.nodes == 1:
        return ["Local steps have no effect: there is only one node."]
    notes = []
    if len(local_steps.segments) > 1:
        notes.append(f"Figures of local steps are those of the last segment, every {local_steps.last_every} steps.")
    if local_steps.has_synchronous_steps:
        phases = [f"the first {local_steps.start}"] * (local_steps.start > 0)
        phases += [f"those from {local_steps.stop} on"] * (local_steps.stop is not None)
        notes.append(
            f"Synchronous steps ({' and '.join(phases)}) send what the same letters send without local steps. Memory "
            "is enough for all steps."
        )
    return notes + _left_out(codecs, local_steps)


def _left_out(codecs: Strategy, local_steps: LocalSteps) -> list[str]:
    kept = with_local_steps(with_levels(codecs, "III"), local_steps)
    idle = [
        f"{name}={requested}"
        for name, requested in (("gradients", codecs.gradients), ("error_feedback", codecs.error_feedback))
        if requested is not None and getattr(kept, name) is None
    ]
    if not idle:
        return []
    unencoded = ", unencoded unless intra_gradients names a codec" * (kept.gradient_codecs[0] is None)
    return [f"Local steps ignore {' and '.join(idle)}: gradients stay inside nodes{unencoded}."]


def notes_on_experts(routing: Routing | None, axes: Axes, topology: Topology) -> list[str]:
    """Return a note if ``fully_shard`` would pad experts that are sharded over the ranks of ``topology``."""
    if routing is None or topology.world <= (held := routing.experts // axes.ep):
        return []
    padded = (
        f"Experts are sharded over {topology.world} ranks, and a layer has {held} for them: fully_shard pads a stack "
        "of fewer experts than ranks, which is left out here. Have shard_placement_fn cut another dimension."
    )
    return [padded]


def _idle_codecs(size: ModelSize, topologies: Sequence[Topology], codecs: Strategy) -> list[str]:
    one_node = all(topology.nodes == 1 for topology in topologies)
    idle = []
    if codecs.frozen is not None and size.frozen == 0:
        idle.append(f"frozen={codecs.frozen} has no effect: all parameters are trainable.")
    for name, codec in (("weights", codecs.weights), ("gradients", codecs.gradients)):
        if codec is not None and one_node:
            idle.append(f"{name}={codec} has no effect: it encodes what is sent between nodes.")
    resolved = [codecs.resolve(topology) for topology in topologies]
    if all((each.weights, each.gradient_codecs) != (codecs.weights, codecs.gradient_codecs) for each in resolved):
        idle.append(
            "If the links inside the node are slow, name them: link='pcie4' plans each GPU as a node, as training does."
        )
    intra = codecs.gradient_codecs[0]
    if intra is not None and all(topology.gpus_per_node == 1 for topology in topologies):
        idle.append(f"intra_gradients={intra} has no effect: it encodes what is sent inside a node.")
    feedback = codecs.error_feedback
    hops = {"inter": "between nodes", "intra": "inside a node"} if feedback is not None else {}
    if feedback is not None and feedback.hops == "inter":
        del hops["intra"]
    # Which of the two hops have errors does not depend on the optimizer scope or the size.
    fed_back = {
        hop for each in resolved for hop in error_buffer_specs(feedback, each.gradient_codecs, "G", each.topology, 0)
    }
    idle += [
        f"error_feedback has no effect {where}: nothing encoded is sent there."
        for hop, where in hops.items()
        if hop not in fed_back
    ]
    return idle
