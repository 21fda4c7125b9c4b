"""Lightning's FSDPStrategy and ModelParallelStrategy for models that a :class:`fsdp_zpp.Strategy` shards.

To replace Lightning's own, import them from:

- :mod:`fsdp_zpp.integrations.lightning.pytorch` for the Trainer of ``lightning.pytorch``,
- :mod:`fsdp_zpp.integrations.lightning.fabric` for ``lightning.fabric``.

The older packages ``pytorch_lightning`` and ``lightning_fabric`` have classes of their own, and their Trainer and
Fabric refuse strategies of another package: import ``lightning.pytorch`` and ``lightning.fabric`` instead.
"""

from fsdp_zpp.integrations._common import require

require("lightning", "2.6")
