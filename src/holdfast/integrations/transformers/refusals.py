"""Refuse trainers whose state Holdfast cannot see: DeepSpeed, FSDP1, SageMaker, XLA, trainers with their own loop."""

from __future__ import annotations

from typing import Any

from transformers.utils.import_utils import is_sagemaker_mp_enabled, is_torch_xla_available

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.warnings import warn

# Trainers that replace Trainer's loop, so that none of its hooks is called.
_OWN_LOOPS = ("PPOTrainer", "A2POTrainer", "AsyncGRPOTrainer", "AsyncDistillationTrainer")


def require_supported(trainer: Any) -> None:
    """Raise Unsupported, by name, for a trainer whose state Holdfast cannot save whole."""
    reason = _unsupported(trainer)
    if reason:
        raise Unsupported(f"Holdfast cannot be attached to this {type(trainer).__name__}: {reason}")


def require_idle(trainer: Any) -> None:
    """Raise InvalidArgument if training has begun: its counters and streams would not be those of the run."""
    if trainer.is_in_train:
        raise InvalidArgument("attach: training has begun; attach Holdfast before trainer.train()")


def refuse_trials() -> None:
    """Raise Unsupported for a hyperparameter search."""
    raise Unsupported(
        "hyperparameter search: its trials are runs of their own in one output_dir; search without Holdfast, "
        "and attach it to the trainer of the final run"
    )


def warn_of_pending_gradients(trainer: Any) -> None:
    """Warn of a save amid a gradient accumulation: a resumed run does not have the gradients so far."""
    if not trainer.accelerator.gradient_state.sync_gradients and trainer.is_world_process_zero():
        warn(
            f"step {trainer.state.global_step} is saved amid a gradient accumulation, because the data ended within "
            "it: a resumed run does not have the gradients so far. Save by steps, or give an epoch a number of batches "
            "that gradient_accumulation_steps divides"
        )


def _unsupported(trainer: Any) -> str:
    if getattr(trainer, "is_deepspeed_enabled", False):
        return "DeepSpeed keeps parameters and optimizer states in its engine; use FSDP2 (fsdp_config version 2) or DDP"
    if is_sagemaker_mp_enabled():
        return "SageMaker model parallelism keeps the state in its own partitions; use FSDP2 or DDP"
    if getattr(trainer, "is_fsdp_xla_enabled", False) or is_torch_xla_available():
        return "XLA (TPU) tensors cannot be captured"
    if getattr(trainer, "is_fsdp_enabled", False):
        version = getattr(trainer.accelerator.state.fsdp_plugin, "fsdp_version", 1)
        if version != 2:
            return (
                f'FSDP{version} flattens parameters; set "version": 2 in fsdp_config (fsdp_version: 2 for accelerate)'
            )
    for kind in type(trainer).__mro__:
        if kind.__name__ in _OWN_LOOPS:
            return f"{kind.__name__} has a training loop of its own, which neither saves nor resumes through Trainer"
    return ""
