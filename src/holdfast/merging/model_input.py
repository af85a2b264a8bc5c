"""A model as an input of a merge: its tensors by key, read in flat chunks from a checkpoint of any format."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.checkpoint.equal_scalars import require_same
from holdfast.convert.assemble import fill
from holdfast.convert.mapping import MappingOptions, config_of, map_source
from holdfast.convert.select import is_model, with_masters
from holdfast.convert.sidefiles import side_files
from holdfast.convert.source_files import SourceFiles
from holdfast.core import names
from holdfast.core.errors import NotFound, Unsupported
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import flat_boxes
from holdfast.merging.merge_options import ModelOptions
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import ArrayDestination, Place, RawArray
from holdfast.plan.quantized_keys import is_float8, quantized_weights
from holdfast.plan.recipe import Recipe, destinations_of
from holdfast.sources import open_source
from holdfast.sources.foreign import Foreign
from holdfast.sources.paddle.optimizer_names import as_torch
from holdfast.sources.raw_bits import reject_unknown_uint16

_TIED_CONFIG = "tie_word_embeddings"


class TensorSource(Protocol):
    """A tensor of a model that can be read in flat chunks."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> DType: ...

    def places(self, model: int) -> Sequence[Place]:
        """Return the stored tensors that are read from a model, given by its number."""

    def read(self, files: Sequence[SourceFiles], start: int, stop: int, buffer: RawArray | None = None) -> torch.Tensor:
        """Return the flat elements [start, stop). `files` are those of every model.

        They must not be written to: they may be a mapped file. Or they are in `buffer`, whose bytes suffice for them,
        until it is used again.
        """


@dataclass(frozen=True, slots=True)
class StoredTensorSource:
    """A tensor of one model as the recipe of a checkpoint: stored whole, or permuted, split, joined or cast."""

    model: int
    recipe: Recipe[Place]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.recipe.shape

    @property
    def dtype(self) -> DType:
        return self.recipe.dtype

    def places(self, model: int) -> Sequence[Place]:
        return self.recipe.sources() if model == self.model else ()

    def read(self, files: Sequence[SourceFiles], start: int, stop: int, buffer: RawArray | None = None) -> torch.Tensor:
        item = self.dtype.bytes
        size = (stop - start) * item
        recipe = self.recipe
        place = recipe.terms[0].source if recipe.terms else None
        if place is not None and recipe.is_whole(place.spec.shape) and recipe.dtype is place.spec.dtype:
            begin = place.begin + start * item
            found = files[self.model].window(place.file, begin, size, whole=True, buffer=buffer)
            array = (found.copy() if begin % item else found).view(f"u{item}")  # torch expects aligned elements
        else:
            array = (np.empty(size, np.uint8) if buffer is None else buffer[:size]).view(f"u{item}")
            self._read_boxes(files[self.model], start, stop, array)
        return torch.from_numpy(array).view(getattr(torch, self.dtype.name))

    def _read_boxes(self, files: SourceFiles, start: int, stop: int, array: RawArray) -> None:
        at = 0
        for box in flat_boxes(self.shape, start, stop):
            part = array[at : at + box.volume].reshape(box.sizes)
            fill(files, destinations_of(self.recipe, box, ArrayDestination(part)))
            at += box.volume


class InputModel:
    """An opened model. Reads no tensor until `TensorSource.read`."""

    def __init__(self, options: ModelOptions, name: str, number: int, dtype: str | None = None) -> None:
        self.options = options
        self.name = name
        self.number = number
        source = open_source(options.path)
        if isinstance(source, Foreign) and source.partial is not None:
            raise Unsupported(f"{source.path} cannot be merged: it is {source.partial}")
        reject_unknown_uint16(source)
        self.source: Checkpoint = as_torch(source)
        self.lock = threading.Lock()  # a checkpoint is not thread-safe
        self.small: Mapping[str, bytes] = side_files(source)
        mapping = MappingOptions(written=options.mapping)
        mapped = map_source(self.source.contents, mapping, self.small)
        contents, self._same = mapped.contents, mapped.equal_scalars
        self.group_name, group = _model_group(contents, source.path)
        if dtype is not None:
            group = with_masters(self.group_name, group, dtype_named(dtype), contents.groups)
        _refuse_quantized(group, source.path)
        self.group = group
        self.stored = self.source.contents.files
        self.tensors: dict[str, TensorSource] = {
            key: StoredTensorSource(number, recipe) for key, recipe in group.tensors.items()
        }

    @property
    def path(self) -> str:
        return self.source.path

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json, empty if there is none."""
        folder = names.group_folder(self.group_name)
        files = {name.removeprefix(folder): data for name, data in self.small.items() if name.startswith(folder)}
        return config_of(files) or {}

    @property
    def is_tied(self) -> bool | None:
        """True if the config ties the output embedding to the input embedding, None if it says nothing."""
        tied = self.config.get(_TIED_CONFIG)
        return tied if isinstance(tied, bool) else None

    def side_file(self, name: str) -> bytes | None:
        """Return a small file beside the model, None if there is none."""
        return self.small.get(f"{names.group_folder(self.group_name)}{name}")

    def find(self, key: str) -> TensorSource | None:
        """Return the tensor of a key, or of the key that it is an alias of; None if the model has neither."""
        return self.tensors.get(self.group.aliases.get(key, key))

    def check(self) -> None:
        """Raise unless the scalars that a mapping joins are equal. Reads them."""
        require_same(self.source, self._same)

    def open_files(self) -> SourceFiles:
        """Return the model's files for one thread."""
        return SourceFiles(self.source, self.lock)


def _model_group(contents: Contents, path: str) -> tuple[str, Group]:
    """Return the group with the model's weights: "model", or the only one."""
    found = {name: group for name, group in contents.groups.items() if is_model(name, group)}
    adapters = [name for name, group in found.items() if group.kind == names.ADAPTER]
    if adapters:
        raise Unsupported(
            f"{path}: {adapters[0]} is an adapter, not a model: the average of adapters' matrices is not that of the "
            f"models they make. `holdfast merge DST --lora {path}` merges it into its base; name several with --lora "
            "and a --weight of 1/n each for the average of the models"
        )
    if "model" in found:
        return "model", found["model"]
    if len(found) != 1:
        actual = f"several models: {', '.join(sorted(found))}" if found else "no model"
        raise NotFound(f"{path} has {actual}; a merge needs one; `holdfast convert --only GROUP` extracts one")
    return next(iter(found.items()))


def _refuse_quantized(group: Group, path: str) -> None:
    dtypes = {key: recipe.dtype.name for key, recipe in group.tensors.items()}
    quantized = next(iter(quantized_weights(dtypes).values()), None)
    narrow = next((key for key, known in dtypes.items() if is_float8(known)), None)
    logical = next(iter(group.logical.items()), None)
    if quantized is None and narrow is None and logical is None:
        return
    if quantized is not None:
        problem = quantized.what
    elif narrow is not None:
        problem = f"{narrow!r} is {dtypes[narrow]}"
    else:
        assert logical is not None
        problem = f"{logical[0]!r} is {logical[1]}"
    raise Unsupported(f"{path}: {problem}; a merge needs plain weights: dequantize the model first")


def find_tied(model: InputModel, key: str) -> TensorSource | None:
    """Return the tensor of a key; for an output embedding that a model's config ties, its input embedding."""
    found = model.find(key)
    if found is not None or not model.is_tied:
        return found
    layer = key.rpartition(".")[0].rpartition(".")[2]
    if layer not in ("lm_head", "output", "embed_out"):
        return None
    inputs = [name for name in model.tensors if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))]
    return model.tensors[inputs[0]] if len(inputs) == 1 else None
