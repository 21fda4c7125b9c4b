"""Generation after training: tokens a second, whether ranks agree on them, and the peak memory."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, register_fsdp_forward_method

from fsdp_zpp.bench.contenders import TorchFSDP, Training
from fsdp_zpp.bench.results import Task
from fsdp_zpp.bench.run import PeakMemory, synchronize


def generation(task: Task, training: Training, memory: PeakMemory, count: int) -> dict[str, Any]:
    """Measure a greedy generation of ``count`` tokens, the same on all ranks; nothing under peers, which have none."""
    if not isinstance(training, TorchFSDP):
        return {}
    prompt = torch.arange(16, device=task.place)[None] + 100
    _continued(training.model, prompt, count)
    dist.barrier()
    synchronize(task)
    memory.since_last()
    began = time.perf_counter()
    tokens = _continued(training.model, prompt, count)
    synchronize(task)
    seconds = time.perf_counter() - began
    gathered = [torch.empty_like(tokens) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tokens)
    return {
        "generate_tokens_per_s": count / seconds,
        "generate_peak_gib": memory.since_last(),
        "same_on_all_ranks": all(torch.equal(other, tokens) for other in gathered),
    }


def _continued(model: Any, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """Continue ``prompt`` [1, length] greedily by ``count`` tokens."""
    context: AbstractContextManager[Any] = nullcontext()
    # generate() calls the model past FSDP's wrapper, which holds the root's own parameters.
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    else:
        register_fsdp_forward_method(model, "generate")
    options = {"do_sample": False, "use_cache": True, "pad_token_id": 0}
    model.eval()
    with torch.no_grad(), context:
        return model.generate(input_ids=prompt, min_new_tokens=count, max_new_tokens=count, **options)
