"""The workers' side of vLLM's weight transfer: updates of fsdp_zpp, and LoRA adapters in memory. For vLLM 0.33.

    PYTHONPATH=examples/rl VLLM_SERVER_DEV_MODE=1 vllm serve path/or/name \\
        --worker-extension-cls vllm_worker.AdapterExtension --weight-transfer-config '{"backend": "fsdp_zpp"}'

Workers import this file for the extension, and find the engine that it registers. What the trainer calls is in
vllm_trainer.py and, for adapters, in :meth:`AdapterExtension.set_adapter`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from fsdp_zpp import DeltaReceiver, WeightUpdate


class UpdateTransferEngine(NCCLWeightTransferEngine):
    """Receives updates over NCCL, applies them to a copy of the weights in host memory, and loads that at the end.

    vLLM reloads layers whole, and fuses, shards or quantizes what it loads. So it is given every weight again, also
    those that have not changed, from the copy. Until then, the model stays as it is.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._updates = _Updates()

    def start_weight_update(self) -> None:
        """Wait for the updates: some of them may be refused."""

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        """Receive tensors as the base class does, but apply them to the copy."""
        model, self.model = self.model, self._updates  # type: ignore[assignment]
        try:
            super().receive_weights(update_info)
        finally:
            self.model = model

    def finish_weight_update(self) -> None:
        """Load all weights."""
        super().start_weight_update()
        self.model.load_weights(self._updates.receiver.tensors.items())
        super().finish_weight_update()


class _Updates:
    """Stands for the model while updates arrive: what vLLM takes for names of tensors are headers of updates."""

    def __init__(self) -> None:
        self.receiver = DeltaReceiver(device="cpu")

    def load_weights(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for header, data in named:
            self.receiver.apply(WeightUpdate.from_header(header, data))


class AdapterExtension:
    """Methods of a vLLM worker, which ``collective_rpc`` calls."""

    def set_adapter(self, number: str, config: str, packed: str) -> None:
        """Replace a LoRA adapter by one that a trainer has sent. vLLM's own requests name a folder.

        Requests then name it by a ``LoRARequest`` with this number, of whose path nothing is read.

        Args:
            number: The adapter's ``lora_int_id``.
            config: PEFT's ``adapter_config.json``.
            packed: Base64 of ``WeightUpdate.pack`` of whole tensors: a pass of ``gathered_weights(model,
                adapters_only=True, since=SyncToken())``.
        """
        manager = self.model_runner.lora_manager  # type: ignore[attr-defined]
        helper = PEFTHelper.from_dict(json.loads(config))
        helper.validate_legal(manager.lora_config)
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=int(number),
            tensors={update.name: update.data for update in WeightUpdate.unpack(base64.b64decode(packed))},
            peft_helper=helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
        )
        # What WorkerLoRAManager.add_adapter does with an adapter that it has read from a folder.
        adapters = manager._adapter_manager
        adapters.remove_adapter(adapter.id)
        adapters.add_adapter(adapter)
        adapters.activate_adapter(adapter.id)


WeightTransferEngineFactory.register_engine("fsdp_zpp", UpdateTransferEngine)
