"""`PluginOptions`, and what TrainingArguments say about saving: whether, what to keep, which step is the best."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.trainer_utils import SaveStrategy

from holdfast import keep
from holdfast.core.names import TRAINER_BEST
from holdfast.keep import Policy
from holdfast.storage.base import Storage
from holdfast.when import Occasion


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The arguments of `attach`."""

    root: Any = None
    carry: tuple[str, ...] = ()
    overwrite: bool = False
    keep: Policy | None = None
    when: Occasion | None = None
    checkpointer: Mapping[str, Any] = field(default_factory=dict)

    def root_of(self, args: Any) -> Any:
        """Return the root: the given one, or output_dir."""
        return self.root if isinstance(self.root, Storage) or self.root else args.output_dir

    def saves(self, args: Any) -> bool:
        """Return True if a run with these arguments saves steps."""
        return args.save_strategy != SaveStrategy.NO or self.when is not None

    def keep_of(self, args: Any) -> Policy | None:
        """Return the steps to keep: as given, or by save_total_limit and the best metric."""
        if self.keep is not None or args.save_total_limit is None or args.save_total_limit <= 0:
            return self.keep
        policy = keep.last(args.save_total_limit)
        return policy | keep.best(1, TRAINER_BEST, "max") if args.metric_for_best_model is not None else policy


def save_metrics(args: Any, state: Any) -> dict[str, float]:
    """Return the numbers that were logged at this step, and whether it is the best so far.

    Trainer takes the first of several equally good steps for the best one. `keep.best` of the metric itself would
    take the last of them, and remove the one that load_best_model_at_end needs.
    """
    logged: dict[str, float] = {}
    for entry in reversed(state.log_history):
        if entry.get("step") != state.global_step:
            break
        logged = {name: value for name, value in entry.items() if name != "step" and _is_number(value)} | logged
    if args.metric_for_best_model is not None:
        logged[TRAINER_BEST] = state.global_step if state.best_global_step == state.global_step else -1
    return logged


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
