"""Show the two hops of ZeRO++ in plain torch: what fsdp_zpp does to weights and gradients, to be read in one sitting.

    torchrun --nproc-per-node 4 examples/zeropp_by_hand.py --gpus-per-node 2

takes four processes, on GPUs or on the CPU, as two nodes of two, and prints what each hop has sent and how far the
results are from exact ones. The library computes the same values bit for bit; it adds what training needs (overlap,
fused kernels, error feedback, checkpoints) and nothing to the idea, which is this. Links inside a node are fast, the
network between nodes is slow. So each collective of FSDP becomes two, one for each kind of link, and sends integers.

Rank ``node * gpus + local`` keeps a shard of that number: the weights of it, and the mean gradient of it.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True)
class Blockwise:
    """Encodes values as integers of ``bits`` bits, of which each ``block`` share one fp32 scale.

    One scale for a whole tensor would have to fit its largest value, and round all small ones to zero.
    """

    bits: int
    block: int

    def encode(self, values: Tensor) -> Tensor:
        """Return the bytes of ``values`` [..., numel], codes and then scales, as uint8 [..., nbytes]."""
        blocks = F.pad(values.float(), (0, -values.shape[-1] % self.block)).unflatten(-1, (-1, self.block))
        largest_code = 2 ** (self.bits - 1) - 1  # 7 or 127
        # The largest value of a block becomes the largest code: nothing is clipped. The tiny raise undoes roundings
        # of this product, so that what was decoded is encoded as the same bytes again.
        raised = torch.tensor((1 + 2**-22) / largest_code, dtype=torch.float32)
        scales = (blocks.abs().amax(-1) * raised).clamp_min(2**-126)  # 1 / scale is finite in a block of zeros, too
        # With the last 8 bits of the scale cut, code * scale is exact in fp32. A sum of such products has the same bits
        # on every device, whether or not it fuses the multiplication into the addition.
        scales = (scales.view(torch.int32) & -0x100).view(torch.float32)
        # NaN or Inf makes its block's scale NaN or Inf and its codes 0, so that the whole block is decoded to NaN.
        codes = (blocks * (1 / scales).unsqueeze(-1)).round().nan_to_num(0).to(torch.int8).flatten(-2)
        if self.bits == 4:
            codes = (codes[..., 0::2] & 15) | (codes[..., 1::2] << 4)  # two codes a byte
        # In one tensor, codes and scales take one collective a hop, not two.
        return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], -1)

    def decode(self, payload: Tensor, numel: int) -> Tensor:
        """Return the fp32 values [..., numel] of what ``encode`` has made."""
        blocks = -(-numel // self.block)
        codes_nbytes = blocks * self.block * self.bits // 8
        codes, scales = payload[..., :codes_nbytes].view(torch.int8), payload[..., codes_nbytes:].view(torch.float32)
        if self.bits == 4:
            # Shifting an int8 to the right repeats its sign bit.
            codes = torch.stack([(codes << 4) >> 4, codes >> 4], -1).flatten(-2)
        values = codes.unflatten(-1, (blocks, self.block)) * scales.unsqueeze(-1)
        return values.flatten(-2)[..., :numel]


class Network:
    """Makes the collectives of this rank over ranks in ``nodes`` of ``gpus`` each, and counts what it sends.

    The inter-node hop is among the ranks of one local index, one from each node, so that all GPUs of a node use its
    network at once. The intra-node hop is among the ranks of one node.
    """

    def __init__(self, nodes: int, gpus: int, device_type: str) -> None:
        self.nodes, self.gpus = nodes, gpus
        mesh = init_device_mesh(device_type, (nodes, gpus), mesh_dim_names=("inter", "intra"))
        self.groups = {hop: mesh.get_group(hop) for hop in ("inter", "intra")}
        self.sent: Counter[str] = Counter()

    def all_gather(self, payload: Tensor, hop: str) -> Tensor:
        """Return what all ranks of the hop pass as ``payload`` [...], by rank: [ranks, ...]."""
        ranks = self.groups[hop].size()
        self.sent[f"weights {hop}"] += payload.nbytes * (ranks - 1)
        gathered = payload.new_empty((ranks, *payload.shape))
        dist.all_gather(list(gathered), payload, group=self.groups[hop])
        return gathered

    def all_to_all(self, payload: Tensor, hop: str) -> Tensor:
        """Send ``payload[i]`` to rank i of the hop; return what all have sent to this one, by rank."""
        self.sent[f"gradients {hop}"] += payload[1:].nbytes  # its own part stays
        received = torch.empty_like(payload)
        dist.all_to_all_single(received, payload, group=self.groups[hop])
        return received


def gather_between_nodes(shard: Tensor, codec: Blockwise, network: Network) -> Tensor:
    """Return the secondary shard: the encoded shards of this local index on all nodes, uint8 [nodes, nbytes].

    The slow hop comes first, while each rank has only its own shard to send: no byte enters a node twice. What it
    leaves is kept until the optimizer changes the weights, so that the backward, which needs them again, sends nothing
    between nodes. Each node then holds an encoded copy of all weights, each of its GPUs a part: that is the price.
    """
    return network.all_gather(codec.encode(shard), "inter")


def gather_inside_node(secondary: Tensor, numel: int, codec: Blockwise, network: Network) -> Tensor:
    """Return the weights of all ranks' shards of ``numel`` values, fp32, from the secondary shards of one node.

    All ranks decode the same bytes, the owner of a shard, too, so that all compute with the same weights.
    """
    by_local_index = network.all_gather(secondary, "intra")  # [gpus, nodes, nbytes]
    by_rank = by_local_index.transpose(0, 1)
    return codec.decode(by_rank, numel).flatten()


def reduce_gradient(gradient: Tensor, codec: Blockwise, network: Network) -> Tensor:
    """Return the mean over all ranks of this rank's part of ``gradient``, which is flat and has a part for each rank.

    Each hop is an all-to-all of codes, which are decoded and summed in fp32 where they arrive. A ring, which sums on
    the way, would round at every rank; here a value is rounded once a hop, however many ranks there are. The fast hop
    comes first: after it, one sum for each node is left to go between nodes, not a gradient for each GPU.
    """
    nodes, gpus = network.nodes, network.gpus
    numel = gradient.numel() // (nodes * gpus)
    by_rank = gradient.view(nodes, gpus, numel)
    # A rank sums up what all ranks of its local index will keep, one on each node.
    by_local_index = by_rank.transpose(0, 1)
    received = network.all_to_all(codec.encode(by_local_index), "intra")  # [gpus, nodes, nbytes], by sender
    # The division comes before the sums are encoded again. In fp16 a sum can overflow where the mean does not.
    sums = sum_in_order(codec.decode(received, numel)) * (1 / (nodes * gpus))  # [nodes, numel]
    received = network.all_to_all(codec.encode(sums), "inter")  # [nodes, nbytes], by sender
    return sum_in_order(codec.decode(received, numel))


def sum_in_order(values: Tensor) -> Tensor:
    """Return the sum over the first dimension, one after another.

    An fp32 sum depends on the order, which ``Tensor.sum`` chooses for itself, differently on each device.
    """
    total = values[0].clone()
    for each in values[1:]:
        total += each
    return total


def main() -> None:
    """Gather random weights and reduce random gradients, and print what that has sent and the error."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--gpus-per-node", type=int, required=True, help="consecutive ranks that form a node")
    gpus = parser.parse_args().gpus_per_node
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    if gpus < 2 or world % gpus or world == gpus:
        # A hop over one rank would send nothing and yet round; the library leaves it out.
        raise SystemExit(
            f"--gpus-per-node is {gpus}, but {world} ranks must form two nodes or more of two or more each"
        )
    network = Network(world // gpus, gpus, device.type)
    int8, int4 = Blockwise(bits=8, block=256), Blockwise(bits=4, block=128)

    numel = 2**18
    torch.manual_seed(0)
    weights = 0.02 * torch.randn(world * numel, device=device)  # the same on all ranks, to compare with
    torch.manual_seed(rank)
    gradient = torch.randn(world * numel, device=device)

    secondary = gather_between_nodes(weights.view(world, numel)[rank], int8, network)
    forward = gather_inside_node(secondary, numel, int8, network)
    backward = gather_inside_node(secondary, numel, int8, network)
    reduced = reduce_gradient(gradient, int4, network)

    exact = gradient.clone()
    dist.all_reduce(exact)
    exact = exact.view(world, numel)[rank] / world
    if rank == 0:
        between, inside = numel * (network.nodes - 1), numel * network.nodes * (gpus - 1)  # values
        print("each rank sends                               bytes   in bf16")
        for what, hop, values in (
            ("weights between nodes, once a step", "weights inter", between),
            ("weights inside, forward and backward", "weights intra", 2 * inside),
            ("gradients inside", "gradients intra", inside),
            ("gradients between nodes", "gradients inter", between),
        ):
            print(f"{what:40}{network.sent[hop]:11,}{2 * values:10,}")
        assert torch.equal(forward, backward)
        for what, result, reference in (("weights", forward, weights), ("gradients", reduced, exact)):
            print(f"error of the {what}: {(result - reference).norm() / reference.norm():.2%} of their norm")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
