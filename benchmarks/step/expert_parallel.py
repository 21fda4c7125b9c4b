"""Mixtures of experts whose experts are spread over two ranks, between which tokens travel, under ``fully_shard``.

Consecutive ranks hold different experts; those that hold the same ones shard them over a mesh of their own. The rest of
a layer is sharded over all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_zpp.bench.contenders import Contender, TorchFSDP, base_of, layer_places, materialize, network, prepare
from fsdp_zpp.bench.results import Task

EXPERT_PARALLEL = 2
"""Ranks that hold one layer's experts together."""


class DispatchedExperts(nn.Module):
    """This rank's share of a layer's experts, to which the other ranks send the tokens that are meant for them.

    Args:
        experts: All experts of a layer, without values: transformers' fused ones.
        group: The ranks that share them.
    """

    def __init__(self, experts: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self._group, ranks = group, dist.get_world_size(group)
        self._own = experts.num_experts // ranks
        for name, weight in list(experts.named_parameters()):
            setattr(experts, name, nn.Parameter(weight[: self._own].contiguous()))
        experts.num_experts = self._own
        self.experts = experts

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of experts for tokens ``hidden`` [tokens, width]; the others are [tokens, k]."""
        expert = index.flatten()
        order = expert.argsort(stable=True)
        token = order // index.size(1)
        ranks = dist.get_world_size(self._group)
        sent = torch.bincount(expert // self._own, minlength=ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self._group)
        out, into = sent.tolist(), received.tolist()
        theirs = expert.new_empty(sum(into))
        dist.all_to_all_single(theirs, expert[order] % self._own, into, out, group=self._group)
        tokens = all_to_all_single_autograd(hidden[token], into, out, self._group)
        one = torch.ones_like(theirs, dtype=weights.dtype)
        computed = self.experts(tokens, theirs[:, None], one[:, None])
        returned = all_to_all_single_autograd(computed, out, into, self._group)
        weighted = returned * weights.flatten()[order, None].to(returned.dtype)
        return torch.zeros_like(hidden).index_add(0, token, weighted)


class ExpertParallel(TorchFSDP):
    """``fully_shard`` with the experts of each layer spread over :data:`EXPERT_PARALLEL` ranks: ``fsdp2:ep2-...``.

    Args:
        task: Task that is trained: a mixture of experts.
        contender: Strategy of the rest, and of the experts on their own mesh.
    """

    def __init__(self, task: Task, contender: Contender):
        shape = (dist.get_world_size() // EXPERT_PARALLEL, EXPERT_PARALLEL)
        self._axes = init_device_mesh(task.device, shape, mesh_dim_names=("efsdp", "ep"))
        super().__init__(task, contender)

    def _build(self) -> nn.Module:
        model = network(self._task)
        base = base_of(model)
        for layers, index in list(layer_places(model)):
            layer = layers[index]
            layer.mlp.experts = DispatchedExperts(layer.mlp.experts, self._axes["ep"].get_group())
            self._materialize(layer, base)
            prepare(self._task, layers, index)
            self._shard_over(self._axes["efsdp"], layer.mlp.experts)
            # Its gradients are sums over the tokens of all ranks.
            layer.mlp.experts.set_gradient_divide_factor(dist.get_world_size())
            layers[index] = self._shard(layer)
        materialize(model, base, self._task.place)
        return self._shard(model)

    def _shard_over(self, mesh: DeviceMesh, module: nn.Module) -> None:
        """Shard a module over another mesh than the model's."""
        self._mesh, models = mesh, self._mesh
        self._shard(module)
        self._mesh = models
