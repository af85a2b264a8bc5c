"""Lightning: `HoldfastCheckpoint`, a ModelCheckpoint. For the package pytorch_lightning: `holdfast.integrations.pytorch_lightning`."""

from lightning.pytorch.callbacks import ModelCheckpoint

from holdfast.integrations.lightning.checkpoint_callback import CheckpointCallback

__all__ = ["HoldfastCheckpoint"]


class HoldfastCheckpoint(CheckpointCallback, ModelCheckpoint):
    __doc__ = CheckpointCallback.__doc__
