"""Parameters that FSDP has sharded of a unit, as the core sees them, and what lies beside them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Sharded:
    """Parameters of a unit as FSDP has sharded them: none in this base class, which adapters derive from.

    Everything is looked up anew at each call: ``load_state_dict(assign=True)``, a move of the model, or FSDP itself may
    replace parameters and shards, and a reference to the old ones would keep their memory.
    """

    @property
    def name(self) -> str:
        """Return the unit's name in profiles, errors and log lines."""
        return "unit"

    def numel(self) -> int:
        """Return the number of values of the parameters, on all ranks together."""
        return 0

    def trained_numel(self) -> int:
        """Return the number of values, on all ranks together, whose gradients FSDP itself would reduce."""
        return 0

    def compute_device(self) -> torch.device | None:
        """Return the device that gathers and computes, also where shards are offloaded; None without parameters."""
        return None

    def wire_dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Return the dtypes in which FSDP itself gathers the weights and reduces the gradients.

        They are known after the first forward.
        """
        return torch.float32, torch.float32

    def own_nbytes(self) -> int | None:
        """Return the bytes that FSDP itself gathers, of all ranks together, if they aren't values in one dtype.

        They are known after the first forward.
        """
        return None

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters, as an optimizer holds them."""
        return ()

    def parameter_owners(self) -> Sequence[Sequence[nn.Module]]:
        """Return, for each parameter, the modules on which it is registered.

        It is empty for adapters whose modules show the parameters at any time.
        """
        return ()

    def other_axes(self) -> Sequence[dist.ProcessGroup]:
        """Return the ranks along the axes over which another parallelism shards parameters.

        Units of these ranks hold copies of the parameters that it leaves whole.
        """
        return ()

    def is_trained(self) -> bool:
        """Return whether a parameter requires a gradient, sharded or as modules show it; on all ranks alike."""
        return False

    def trained_names(self) -> Collection[str]:
        """Return the FQNs of the parameters that require a gradient or have one."""
        return ()

    def shards(self) -> Sequence[Tensor]:
        """Return what this rank holds of the parameters, padding included."""
        return ()

    def named_shards(self) -> Mapping[str, Tensor]:
        """Return what this rank holds of each parameter, by FQN, ready to be read and written to."""
        return {}

    def named_parts(self, parameter: nn.Parameter, of: Tensor) -> Mapping[str, Tensor]:
        """Return the parts of a tensor that lies as this rank's shard of one of :meth:`parameters`, by FQN.

        Args:
            parameter: A parameter as an optimizer holds it, which may consist of several original ones.
            of: A contiguous tensor of as many values as this rank holds of it, such as an optimizer's state.
        """
        return {}

    def placements(self) -> Mapping[str, Hashable]:
        """Return how FSDP and other parallelisms have placed each parameter, by FQN, in the order of the shards."""
        return {}

    def weights_changed(self, by_step: bool) -> None:
        """Drop what is kept of the old weights; ``by_step`` says that nothing but their values has changed."""

    def drop_gradients(self) -> None:
        """Drop the gradients accumulated from earlier micro-batches of the step."""
