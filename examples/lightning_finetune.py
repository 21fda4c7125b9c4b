"""Lightning's Trainer with a sharding strategy of fsdp_zpp, on a small Llama and the Python standard library.

    torchrun --nproc-per-node 4 examples/lightning_finetune.py --gpus-per-node 2

takes four processes, on GPUs or on the CPU, as two nodes of two. With --fsdp2, the model shards itself by fully_shard.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp import Strategy, fully_shard, traffic
from fsdp_zpp.integrations.lightning import FSDPStrategy, ModelParallelStrategy


class Llama(LightningModule):
    """A Llama that predicts bytes, and shards itself if it is given a strategy."""

    def __init__(self, text: Tensor, hidden: int, layers: int, strategy: Strategy | None) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, use_cache=False, **sizes))
        self.text, self.strategy = text, strategy

    def configure_model(self) -> None:
        # Lightning calls this before each fit and each evaluation.
        if self.strategy is not None and not isinstance(self.model, FSDPModule):
            for module in (*self.model.model.layers, self.model):
                fully_shard(module, strategy=self.strategy, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, batch: object, index: int) -> Tensor:
        # Windows that depend on the index and the rank alone: a resumed run goes on with what it would have seen.
        generator = torch.Generator().manual_seed(index * self.trainer.world_size + self.global_rank)
        starts = torch.randint(len(self.text) - 256, (4, 1), generator=generator)
        tokens = self.text[starts + torch.arange(256)].to(self.device, torch.long)
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        self.print(f"micro-batch {index}: loss {loss.item()}")
        return loss


def main() -> None:
    """Train, and leave a checkpoint to go on from."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", default="zeropp", help="a preset of Strategy, such as loco")
    add("--gpus-per-node", type=int, help="default: as many as torchrun started on each")
    add("--fsdp2", action="store_true")
    add("--hidden", type=int, default=128)
    add("--layers", type=int, default=4)
    add("--steps", type=int, default=60)
    add("--output", type=Path, default=Path("runs/lightning"))
    add("--resume", type=Path, help="checkpoint to go on from")
    options = parser.parse_args()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    strategy = Strategy.from_dict({"preset": options.preset, "gpus_per_node": options.gpus_per_node})
    ranks, local_ranks = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    fsdp1 = FSDPStrategy(sharding_strategy=strategy, auto_wrap_policy={LlamaDecoderLayer}, state_dict_type="sharded")
    fsdp2 = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = Trainer(
        strategy=fsdp2 if options.fsdp2 else fsdp1,
        devices=local_ranks,
        num_nodes=ranks // local_ranks,
        max_steps=options.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    module = Llama(text, options.hidden, options.layers, strategy if options.fsdp2 else None)
    trainer.fit(module, range(10**9), ckpt_path=options.resume)
    trainer.save_checkpoint(options.output / f"step-{trainer.global_step}.ckpt")
    module.print("bytes that this rank has sent:", traffic(trainer.model))


if __name__ == "__main__":
    main()
