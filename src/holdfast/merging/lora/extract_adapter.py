"""A LoRA adapter from a tuned model and its base: truncated SVD of every changed linear weight, the rest as a whole."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from holdfast.checkpoint.attempt import Attempt
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.computed import ComputedTensors
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.publish_output import Hold, Watch, no_watch, publish_output
from holdfast.convert.run import stream_output
from holdfast.convert.sinks import sink_named
from holdfast.convert.sinks.base import SinkRequest
from holdfast.core import limits, names
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.core.ranks import Ranks, SingleProcess
from holdfast.core.terminal import Progress
from holdfast.merging.lora.adapter_config import MOST_RANK
from holdfast.merging.lora.borrowed_files import borrow
from holdfast.merging.lora.comparable_heads import ComparablePair, comparable_heads
from holdfast.merging.lora.live_modules import live_modules, task_type
from holdfast.merging.lora.merge_adapters import BLOCK_BYTES, base_group
from holdfast.merging.lora.stored_values import is_equal, not_finite
from holdfast.merging.lora.tied_head import EMBEDDINGS, HEADS
from holdfast.merging.lora.truncated_svd import FactorMatrix, LayerDifference, ThinFactors
from holdfast.merging.lora.whole_tensors import whole_tensors
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources import open_source
from holdfast.sources.foreign import Foreign, with_contents

_FLOATS = ("bfloat16", "float16", "float32")
_PREFIX = "base_model.model."
_NO_MODULES = "dummy-target-modules"  # the value with which PEFT adds no matrices
_BORROWED = "tuned:"  # what the names of the tuned model's files begin with
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class ExtractOptions:
    """The base, the tuned model, and the rank of the adapter."""

    base: str
    tuned: str
    rank: int
    force: bool = False
    verify: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise InvalidArgument(f"--rank {self.rank}: choose a rank from 1 to {MOST_RANK}")


@dataclass(frozen=True, slots=True)
class Extracted:
    """The result. `errors` are relative, by key of the base; `saved` are the keys of tensors that are stored whole."""

    path: str
    rank: int
    errors: Mapping[str, float]
    saved: tuple[str, ...]
    bytes: int
    seconds: float


class PreparedExtraction:
    """Two opened models, compared, and the planned adapter."""

    step = None

    def __init__(self, options: ExtractOptions) -> None:
        self.options = options
        self.base, self.tuned = open_source(options.base), open_source(options.tuned)
        (_, group), (_, other) = base_group(self.base), base_group(self.tuned)
        borrowed = borrow(self.tuned, other, _BORROWED.rstrip(":"), threading.Lock())
        computed = ComputedTensors(self.base, borrowed.virtual)
        config = self.base.config() or {}
        pair = comparable_heads(
            config, group, self.tuned.config() or {}, replace(other, tensors=borrowed.tensors), computed
        )
        self._pair = pair
        _check_equal_keys(self.base, pair.base, self.tuned, pair.tuned)
        self.modules = live_modules(config, pair.base, self.base.path)
        self.layers: dict[str, LayerDifference] = {}
        self.saved: list[str] = []
        tensors = self._adapter_tensors(pair, computed)
        if not tensors:
            raise NotFound(f"{self.tuned.path} has the weights of {self.base.path}: there is nothing to extract")
        stored = (*self.base.contents.files, *borrowed.stored, *computed.stored_files())
        contents = Contents({"model": Group(names.ADAPTER, tensors)}, stored)
        self.source: Foreign = with_contents(self.base, contents, {}, {**borrowed.virtual, **computed.files})
        side = {names.ADAPTER_CONFIG: self._config(task_type(config))}
        request = SinkRequest(limits.MAX_SHARD_BYTES, BLOCK_BYTES, side_files=side)
        self.output = sink_named("hf")(Contents(contents.groups, ()), request)

    def _adapter_tensors(self, pair: ComparablePair, computed: ComputedTensors) -> dict[str, Recipe[Place]]:
        tensors: dict[str, Recipe[Place]] = {}
        last: list[tuple[LayerDifference, ThinFactors]] = []
        for key, before in pair.base.items():
            if is_equal(before, pair.tuned[key], computed):
                continue
            for model, recipe in ((self.base, before), (self.tuned, pair.tuned[key])):
                _check_finite(key, model, recipe, computed)
            name = self.modules.name_of(key, self.base.path)
            if name not in self.modules.linear or key in pair.tied:
                self.saved.append(key)
                continue
            if before.dtype.name not in _FLOATS:
                raise Unsupported(
                    f"{key!r} is {before.dtype.name}: an adapter is extracted from floating-point weights"
                )
            rank = min(self.options.rank, *before.shape)
            layer = LayerDifference(before, pair.tuned[key], rank, name in self.modules.transposed, last)
            self.layers[key] = layer
            for part, is_first in (("lora_A", True), ("lora_B", False)):
                made = f"{_PREFIX}{name.removesuffix('.weight')}.{part}.weight"
                tensors[made] = computed.add(made, FactorMatrix(layer, is_first))
        names = self.modules.names
        keys = {name: key for key, name in names.items()}
        by_name = names.keys() - pair.tied
        self._whole = whole_tensors(
            [names[key] for key in self.saved],
            [names[key] for key in self.layers],
            keys,
            {names[key] for key in by_name if names[key] not in self.modules.savable - self.modules.shared},
        )
        return tensors | {f"{_PREFIX}{made}": pair.tuned[keys[name]] for made, name in self._whole.names.items()}

    def _config(self, task: str | None) -> bytes:
        rank = self.options.rank
        layers = {self.modules.names[key]: layer for key, layer in self.layers.items()}
        ranks = {
            re.escape(name.removesuffix(".weight")): layer.rank for name, layer in layers.items() if layer.rank != rank
        }
        fields = {
            "alpha_pattern": ranks,
            "base_model_name_or_path": self.options.base,
            "bias": "all" if self._whole.biases else "none",
            "ensure_weight_tying": self._pair.stays_tied and bool(self._pair.tied & set(self.saved)),
            "fan_in_fan_out": not self.modules.transposed.isdisjoint(layers),
            "inference_mode": True,
            "lora_alpha": rank,
            "lora_dropout": 0.0,
            "modules_to_save": list(self._whole.modules) or None,
            "peft_type": "LORA",
            "r": rank,
            "rank_pattern": ranks,
            "target_modules": [name.removesuffix(".weight") for name in layers] or _NO_MODULES,
            "task_type": task,
        }
        return (json.dumps(fields, indent=2) + "\n").encode()

    def write(self, ranks: Ranks, attempt: Attempt, progress: Progress) -> list[BlockReport]:
        """Write the tensor file of the adapter. Returns the reports of its blocks."""
        return stream_output(
            self.source, self.output, BLOCK_BYTES, ranks, attempt, progress, verify=self.options.verify
        )


def _check_finite(key: str, model: Checkpoint, recipe: Recipe[Place], computed: ComputedTensors) -> None:
    found = not_finite(recipe, computed)
    if found:
        files = ", ".join(sorted({place.file.removeprefix(_BORROWED) for place in recipe.sources()}))
        raise Unsupported(
            f"{key!r} has NaN or infinite elements ({found:,}) in {model.path}, {files}: no adapter makes that change"
        )


def _check_equal_keys(
    base: Checkpoint, stored: Mapping[str, Recipe[Place]], tuned: Checkpoint, tensors: Mapping[str, Recipe[Place]]
) -> None:
    problems = [f"{tuned.path} has no {key!r}" for key in stored if key not in tensors]
    problems += [
        f"{tuned.path} has {key!r}, which no module of {base.path} has: an adapter only changes its base; leave the "
        f"tensor out first: `holdfast convert TUNED DST --to hf --remove {key}`"
        for key in tensors
        if key not in stored
    ]
    for key, recipe in stored.items():
        if key in tensors and (recipe.shape, recipe.dtype) != (tensors[key].shape, tensors[key].dtype):
            before, after = (f"{r.dtype.name}{list(r.shape)}" for r in (recipe, tensors[key]))
            way_out = _way_out(key, recipe, tensors[key])
            problems.append(f"{key!r} is {before} in {base.path}, and {after} in {tuned.path}{way_out}")
    if problems:
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise Mismatch("the models do not fit together:\n  " + "\n  ".join(problems[:_SHOWN]) + more)


def _way_out(key: str, before: Recipe[Place], after: Recipe[Place]) -> str:
    if before.shape == after.shape and before.dtype.name in _FLOATS:
        return f"; cast one of them first: `holdfast convert TUNED DST --to hf --dtype {before.dtype.name}`"
    if key.endswith((*EMBEDDINGS, *HEADS)) and before.shape[1:] == after.shape[1:]:
        return f"; resize the base first: `holdfast resize-vocab BASE DST --size {after.shape[0]}`"
    return ""


def extract_adapter(options: ExtractOptions, destination: str | os.PathLike[str], watch: Watch = no_watch) -> Extracted:
    """Write a folder that `PeftModel.from_pretrained` opens. The destination appears atomically."""
    start = time.monotonic()

    def plan(target: DestinationFolder, hold: Hold) -> PreparedExtraction:
        target.check_free(force=options.force)  # first, because it takes a while to compare large models
        prepared = PreparedExtraction(options)
        for source in (prepared.base, prepared.tuned):
            hold(source)
        return prepared

    prepared, target = publish_output(plan, destination, SingleProcess(), watch, force=options.force)
    errors = {key: layer.errors[0] for key, layer in prepared.layers.items()}
    size = sum(target.storage.files(target.folder).values())
    return Extracted(target.path, options.rank, errors, tuple(prepared.saved), size, time.monotonic() - start)
