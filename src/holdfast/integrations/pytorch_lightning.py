"""`HoldfastCheckpoint` for programs that import pytorch_lightning, whose classes are not those of lightning.pytorch."""

from pytorch_lightning.callbacks import ModelCheckpoint

from holdfast.integrations.lightning.checkpoint_callback import CheckpointCallback

__all__ = ["HoldfastCheckpoint"]


class HoldfastCheckpoint(CheckpointCallback, ModelCheckpoint):  # type: ignore[misc]  # two packages, one callback
    __doc__ = CheckpointCallback.__doc__
