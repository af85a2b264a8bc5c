"""The public function `merge_lora`: keyword arguments to options, ranks of torch.distributed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from holdfast.adapters.comm import current_ranks
from holdfast.merging.lora.merge_adapters import LoraOptions, MergedAdapters, run_lora_merge

_DEADLINE_S = 6 * 3600.0  # a finished rank waits for the others

PathLike = str | os.PathLike[str]


def merge_lora(
    adapters: PathLike | Sequence[PathLike],
    destination: PathLike,
    *,
    base: PathLike | None = None,
    weights: Sequence[float] | None = None,
    max_shard_size: int | str = "5GB",
    verify: bool = True,
    force: bool = False,
) -> MergedAdapters:
    """Merge LoRA adapters into their base model, a band of rows at a time, as PEFT's merge_and_unload does it.

    `adapters` are folders of PEFT, or steps of runs that trained adapters. `base` is a folder that `holdfast.open`
    reads; without it, it is the base that the first adapter names, checked if a Holdfast step recorded its digests.
    `weights` multiply the scaling of the adapters, which are merged one after the other. The weights are bit-equal
    to those of PEFT on the CPU. Every tensor of the adapters is used, or an error lists those that are not. `verify`
    checks the digests of the inputs, `force` replaces a checkpoint at the destination.

    Collective when torch.distributed is initialized: the ranks share the work, with the same bytes as one process.
    The destination appears when it is complete, or not at all.
    """
    chosen = [adapters] if isinstance(adapters, str | os.PathLike) else list(adapters)
    options = LoraOptions(
        adapters=tuple(os.fspath(path) for path in chosen),
        weights=(1.0,) * len(chosen) if weights is None else tuple(float(weight) for weight in weights),
        base=None if base is None else os.fspath(base),
        max_shard_size=max_shard_size,
        verify=verify,
        force=force,
    )
    return run_lora_merge(options, destination, current_ranks(_DEADLINE_S))
