"""torchtitan: `--override.imports holdfast.integrations.torchtitan.use` puts Holdfast in place of its checkpointer.

Tried with torchtitan 0.3.0. Every option of `[checkpoint]` keeps its meaning, but for those that
docs/integrations/torchtitan.md lists.
"""

from __future__ import annotations

import dataclasses

from torchtitan.components.checkpointer import BaseCheckpointManager
from torchtitan.config.override import override

from holdfast.integrations.torchtitan.manager import HoldfastManager

__all__ = ["HoldfastManager", "use"]


@override(target=BaseCheckpointManager.Config, description="checkpoints by Holdfast")  # type: ignore[untyped-decorator]
def use(config: BaseCheckpointManager.Config, *, hub_names: bool = True) -> HoldfastManager.Config:
    """Return the config of a HoldfastManager with the options of `config`.

    `hub_names` saves the model under the names of its Hugging Face adapter.
    """
    common = {field.name for field in dataclasses.fields(BaseCheckpointManager.Config)}
    return HoldfastManager.Config(**{name: getattr(config, name) for name in common}, hub_names=hub_names)
