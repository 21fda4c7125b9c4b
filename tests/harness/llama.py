"""A small Llama with PEFT's adapters, and the same with weights as a codec leaves them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, models as token_models, pre_tokenizers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fsdp_zpp.codecs import Codec

from . import lora, models
from .adapter import Adapter

VOCABULARY = 131
CONFIG: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112}
CONFIG |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
CONFIG |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
ADAPTED = torch.bfloat16
"""The dtype of bases to which documentation, examples and integrations add adapters; PEFT's are in fp32 in any case."""
TARGETS = ["q_proj", "v_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head trained": {"modules_to_save": ["lm_head"]},
    "tokens": {"trainable_token_indices": [1, 5, 6, 90]},
    "embedding trained": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tied embedding": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
}


def make_base(dtype: torch.dtype = torch.float32, tied: bool = False) -> LlamaForCausalLM:
    """The base, the same on every rank."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=tied))
    for parameter in model.parameters():
        parameter.data.mul_(3)  # logits that are far apart, so that greedy tokens are clear
    return model.to(models.device(), dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer whose words are numbers between blanks."""
    words = ["<pad>", "<eos>", *map(str, range(2, VOCABULARY))]
    vocabulary = {word: number for number, word in enumerate(words)}
    by_words = Tokenizer(token_models.WordLevel(vocabulary, unk_token="<pad>"))
    by_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=by_words, pad_token="<pad>", eos_token="<eos>")


def rounded_base(codec: Codec, dtype: torch.dtype = torch.float32, tied: bool = False) -> LlamaForCausalLM:
    """The oracle: every matrix as ``codec`` gives it back."""
    model = make_base(dtype, tied)
    lora.round_weights(model.parameters(), codec)
    return model


def adapt(base: nn.Module, adapters: dict[str, str]) -> PeftModel:
    """Add adapters by name and kind, the first of them active, whose B is not zero."""
    torch.manual_seed(1)
    configs = {
        name: LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | KINDS[kind])
        for name, kind in adapters.items()
    }
    (first, config), *others = configs.items()
    model = get_peft_model(base, config, adapter_name=first)
    for name, other in others:
        model.add_adapter(name, other)
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def layers_of(model: nn.Module) -> list[LlamaDecoderLayer]:
    """Its decoder layers."""
    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


def shard(adapter: Adapter, model: nn.Module, strategy: Any, by_layer: bool = True, **arguments: Any) -> Any:
    """Shard it, one unit a layer, or all of it one."""
    if adapter.torch_name != "fully_shard":
        policy = ModuleWrapPolicy({LlamaDecoderLayer}) if by_layer else None
        return adapter.wrap(model, strategy, **{"auto_wrap_policy": policy} | arguments)
    for layer in layers_of(model) if by_layer else []:
        adapter.apply(layer, strategy, **arguments)
    return adapter.apply(model, strategy, **arguments)


def peft_of(model: Any) -> PeftModel:
    """The PEFT model in a sharded one."""
    return model.module if isinstance(model, FullyShardedDataParallel) else model


def tokens(step: int, rank: int | None = None) -> Tensor:
    """A batch."""
    return models.batch(step, 0, rank) % VOCABULARY


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Next-token loss."""
    return model(input_ids=batch, labels=batch).loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> list[float]:
    """Losses of three steps from the ``first`` on, each on this rank's batch."""
    losses = []
    for step in range(first, first + 3):
        loss = loss_of(model, tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def logits_of(model: nn.Module, on: torch.device | None = None) -> Tensor:
    """Logits of a batch that is the same on every rank."""
    with torch.no_grad():
        return model(input_ids=tokens(99, 0).to(on)).logits.cpu()


def greedy_tokens(model: Any, count: int) -> list[int]:
    """A fixed prompt and ``count`` tokens after it; of a sharded model as torch has it called."""
    context: Any = nullcontext()
    if isinstance(model, FullyShardedDataParallel):
        context = FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    elif isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "generate")
    prompt = torch.arange(5, 11, device=models.device())[None]
    with context:
        return model.generate(input_ids=prompt, max_new_tokens=count, do_sample=False, use_cache=True)[0].tolist()
