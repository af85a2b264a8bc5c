"""Lightning: `HoldfastCheckpoint`, a ModelCheckpoint.

Programs that import pytorch_lightning take the one of `holdfast.integrations.pytorch_lightning`.
"""

from lightning.pytorch.callbacks import ModelCheckpoint

from holdfast.integrations.lightning.checkpoint_callback import CheckpointCallback

__all__ = ["HoldfastCheckpoint"]


class HoldfastCheckpoint(CheckpointCallback, ModelCheckpoint):
    __doc__ = CheckpointCallback.__doc__
