"""`attach`: give a Trainer, or a trainer of any class derived from it, saves and resumes by Holdfast."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypeVar

from transformers import Trainer

from holdfast.core.errors import InvalidArgument
from holdfast.integrations.transformers.mixin import HoldfastMixin, add_plugin
from holdfast.integrations.transformers.refusals import require_idle, require_supported
from holdfast.keep import Policy
from holdfast.storage.base import Storage
from holdfast.when import Occasion

T = TypeVar("T", bound=Trainer)


def attach(
    trainer: T,
    root: str | os.PathLike[str] | Storage | None = None,
    *,
    carry: Sequence[str] = (),
    overwrite: bool = False,
    keep: Policy | None = None,
    when: Occasion | None = None,
    **checkpointer: Any,
) -> T:
    """Save and resume a trainer with Holdfast, then call `trainer.train(resume_from_checkpoint=True)`.

    `root` is where the steps go, a folder or an address such as `s3://bucket/run`: by default output_dir. When to
    save and what to keep follow TrainingArguments; `keep` replaces save_total_limit, and `when` adds occasions,
    such as `holdfast.when.preempted()`. `carry` names attributes of the trainer to save with each step: plain values,
    tensors, or objects with a state_dict. `overwrite` deletes the steps of an earlier run when training begins
    without a resume. Other keywords are those of `holdfast.Checkpointer`.

    Returns the same trainer. Raises Unsupported for DeepSpeed, FSDP1, SageMaker and XLA, InvalidArgument if training
    has begun or Holdfast is attached already.
    """
    if not isinstance(trainer, Trainer):
        raise InvalidArgument(f"attach: a {type(trainer).__name__} is not a transformers.Trainer")
    if isinstance(trainer, HoldfastMixin):
        raise InvalidArgument("attach: Holdfast is attached to this trainer already")
    require_supported(trainer)
    require_idle(trainer)
    kind = type(trainer)
    missing = [name for name in ([carry] if isinstance(carry, str) else carry) if not hasattr(trainer, name)]
    if missing:
        raise InvalidArgument(f"carry: the trainer has no {', '.join(missing)}; set it before attach")
    bases = (HoldfastMixin,) if kind is Trainer else (kind, HoldfastMixin)
    trainer.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})
    add_plugin(trainer, root, carry=carry, overwrite=overwrite, keep=keep, when=when, **checkpointer)
    return trainer
