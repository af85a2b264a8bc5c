"""`--quantize fp8-block128`: weights of linear layers become fp8 with a float32 scale for each block of 128x128.

The scale of a block is its largest magnitude divided by 448, the largest number of float8_e4m3fn. Weights that were
quantized so, and dequantized to bfloat16, therefore come back bit for bit: the largest magnitude is unchanged.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.computed import ComputedTensors, ReadBox, TensorInputs, rows_per_band
from holdfast.convert.dequantize import Recoded
from holdfast.convert.quantization_config import fp8_blocks, quantization_of, quantized_files, read_config
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.core.names import group_folder, natural_key
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.box import Box
from holdfast.plan.contents import Group
from holdfast.plan.files import Place, RawArray
from holdfast.plan.quantized_keys import is_float8, quantized_weights
from holdfast.plan.recipe import Recipe
from holdfast.plan.weight_scales import BLOCK
from holdfast.sources.foreign import with_contents

if TYPE_CHECKING:
    import torch

FORMATS = ("fp8-block128",)
LARGEST = 448.0  # of float8_e4m3fn
_LEAST = 2.0**-100  # blocks of smaller values are stored as zeros
_FLOATS = ("bfloat16", "float16", "float32")
_FULL = re.compile(
    r"(?:.*\.)?(?:(?:\w*embed\w*|shared|relative_attention_bias|wte|wpe|output|score|classifier|\w*norm\w*|ln_\w+|gate"
    r"|router|shared_expert_gate)(?:\.[0-9]+)?|(?:lm_head|cls)(?:\..+)?)\.weight"
)  # embeddings, output heads and what is inside of them, norms and routers
# Heads that are tied to the embeddings, so that no file has them, by model_type. Those of others are lm_head or cls.
_TIED_HEADS = {
    "albert": "predictions.decoder",
    "cohere_asr": "proj_out",
    "distilbert": "vocab_projector",
    "electra": "generator_lm_head",
    "gpt_neox": "embed_out",
    "gpt_neox_japanese": "embed_out",
    "moonshine": "proj_out",
    "whisper": "proj_out",
}
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # of transformers' Conv1D
_SCALE = "_scale_inv"


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """The format of quantized weights, and patterns of the keys that stay as they are."""

    form: str = FORMATS[0]
    unquantized: tuple[str, ...] = ()


def quantized(source: Checkpoint, files: Mapping[str, bytes], options: QuantizeOptions) -> Recoded:
    """Return a source whose linear weights are fp8 with scales, and side files that say so.

    Raises InvalidArgument for an unknown format or a pattern without a match, Unsupported for a model that is
    quantized already, and NotFound if no weight is left to quantize.
    """
    if options.form not in FORMATS:
        raise InvalidArgument(f"--quantize {options.form}: choose {', '.join(FORMATS)}")
    others = [name for name, group in source.contents.groups.items() if group.kind != "module"]
    if others:
        raise Unsupported(
            f"{source.path}: --quantize writes weights only, but {others[0]} is there too, and a load prefers masters "
            "to weights; choose the model with `convert --only` first"
        )
    computed, groups, out = ComputedTensors(source), dict(source.contents.groups), dict(files)
    used: set[str] = set()
    notes = []
    for name, group in source.contents.groups.items():
        folder = group_folder(name)
        config = read_config(files, folder) or {}
        _check_not_quantized(source, name, group, quantization_of(config))
        chosen = [key for key in group.tensors if _is_linear(key, group) and not _matches(key, options, used)]
        groups[name] = _quantized_group(group, chosen, computed)
        skipped = _modules_to_skip(group, chosen, config.get("model_type"))
        out = quantized_files(out, folder, fp8_blocks(skipped))
        notes.append(f"{name}: {len(chosen)} of {len(group.tensors)} tensors quantized to fp8")
        if config.get("model_type") in _TRANSPOSED:
            notes.append(
                f"{name}: linear weights of {config['model_type']} are transposed (Conv1D): --dequantize reads the "
                "result, but transformers and vLLM compute with fp8 in linear layers of torch only"
            )
    unmatched = [pattern for pattern in options.unquantized if pattern not in used]
    if unmatched:
        raise InvalidArgument(f"--unquantized {unmatched[0]!r} matches no weight that would be quantized")
    if not computed.files:
        raise NotFound(f"{source.path}: --quantize: no weight of a linear layer to quantize")
    stored = (*source.contents.files, *computed.stored_files())
    contents = replace(source.contents, groups=groups, files=stored)
    return Recoded(with_contents(source, contents, {}, computed.files), out, tuple(notes))


def _check_not_quantized(source: Checkpoint, name: str, group: Group, stated: Mapping[str, object]) -> None:
    dtypes = {key: recipe.dtype.name for key, recipe in group.tensors.items()}
    found = next(iter(quantized_weights(dtypes)), None) or next((k for k, d in dtypes.items() if is_float8(d)), None)
    if found is not None or stated:
        what = f"{found!r} is {dtypes[found]}" if found is not None else "config.json states a quantization"
        raise Unsupported(f"{source.path}: {name} is quantized already: {what}; --dequantize it first")


def _is_linear(key: str, group: Group) -> bool:
    """Return True for the weight of a linear layer, except of output heads and routers."""
    recipe = group.tensors[key]
    fits = len(recipe.shape) == 2 and recipe.dtype.name in _FLOATS and min(recipe.shape) > 0
    tied = key in group.aliases.values() or key in group.logical
    return fits and key.endswith(".weight") and _FULL.fullmatch(key) is None and not tied


def _matches(key: str, options: QuantizeOptions, used: set[str]) -> bool:
    matching = {pattern for pattern in options.unquantized if fnmatch.fnmatchcase(key, pattern)}
    used |= matching
    return bool(matching)


def _modules_to_skip(group: Group, chosen: Sequence[str], model_type: object) -> list[str]:
    """Return the modules that may be linear layers or stacked experts, and are not quantized.

    transformers leaves out what is inside of them, too, so a module around a quantized one is not named.
    """
    skipped = {"lm_head"} | {"cls" for key in group.tensors if key.startswith("cls.")}
    if isinstance(model_type, str) and model_type in _TIED_HEADS:
        skipped.add(_TIED_HEADS[model_type])
    for key in set(group.tensors) - set(chosen):
        module, _, leaf = key.rpartition(".")
        shape = group.tensors[key].shape
        is_embedding = "embed" in module.rpartition(".")[2]  # a layer inside an embedding may be linear
        if (leaf == "weight" and len(shape) == 2 and not is_embedding) or len(shape) == 3:
            skipped.add(module)
            skipped |= {alias.rpartition(".")[0] for alias, target in group.aliases.items() if target == key}
    around = {key[: dot.start()] for key in chosen for dot in re.finditer(r"\.", key.removesuffix(".weight"))}
    return sorted(skipped - {""} - around, key=natural_key)


def _quantized_group(group: Group, chosen: Sequence[str], computed: ComputedTensors) -> Group:
    tensors: dict[str, Recipe[Place]] = dict(group.tensors)
    for key in chosen:
        recipe = group.tensors[key]
        if f"{key}{_SCALE}" in group.tensors:
            raise Unsupported(f"{key + _SCALE!r} is there already, so the scales of {key!r} have no name")
        tensors[key] = computed.add(key, BlockQuantization(key, recipe))
        tensors[f"{key}{_SCALE}"] = computed.add(f"{key}{_SCALE}", BlockScales(key, recipe))
    return replace(group, tensors=tensors)


@dataclass(frozen=True, slots=True)
class BlockQuantization:
    """The numbers of a weight in blocks."""

    key: str
    weight: Recipe[Place]

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def dtype(self) -> DType:
        return dtype_named("float8_e4m3fn")

    @property
    def band_rows(self) -> int:
        return rows_per_band(self.shape[1], BLOCK)

    def inputs(self, begin: int, end: int) -> TensorInputs:
        yield self.weight, Box((begin, 0), (end - begin, self.shape[1]))

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        values = _float_rows(self.key, self.weight, begin, end, read)
        scales = block_scales(values)
        spread = scales.repeat_interleave(BLOCK, 0)[: len(values)].repeat_interleave(BLOCK, 1)[:, : values.shape[1]]
        return fp8_numbers(values, spread)


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of a weight in blocks."""

    key: str
    weight: Recipe[Place]

    @property
    def shape(self) -> tuple[int, int]:
        return math.ceil(self.weight.shape[0] / BLOCK), math.ceil(self.weight.shape[1] / BLOCK)

    @property
    def dtype(self) -> DType:
        return dtype_named("float32")

    @property
    def band_rows(self) -> int:
        return rows_per_band(self.weight.shape[1], BLOCK) // BLOCK

    def inputs(self, begin: int, end: int) -> TensorInputs:
        first, last = begin * BLOCK, min(end * BLOCK, self.weight.shape[0])
        yield self.weight, Box((first, 0), (last - first, self.weight.shape[1]))

    def compute(self, begin: int, end: int, read: ReadBox) -> RawArray:
        last = min(end * BLOCK, self.weight.shape[0])
        return block_scales(_float_rows(self.key, self.weight, begin * BLOCK, last, read)).numpy().view("u4")


def _float_rows(key: str, weight: Recipe[Place], begin: int, end: int, read: ReadBox) -> torch.Tensor:
    """Return rows of a weight as float32. Raises Mismatch for values that are not finite."""
    import torch

    raw = torch.from_numpy(read(weight, Box((begin, 0), (end - begin, weight.shape[1]))))
    values = raw.view(getattr(torch, weight.dtype.name)).float()
    if not bool(torch.isfinite(values).all()):
        raise Mismatch(f"{key!r} has NaN or infinite values in the rows {begin} to {end}: it cannot be quantized")
    return values


def block_scales(values: torch.Tensor) -> torch.Tensor:
    """Return the scale of every block of a matrix."""
    import torch

    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % BLOCK, 0, -rows % BLOCK))
    largest = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK).abs().amax(dim=(1, 3))
    return torch.where(largest < _LEAST, 1.0, largest / LARGEST)


def fp8_numbers(values: torch.Tensor, scales: torch.Tensor) -> RawArray:
    """Return values divided by their scales as raw float8_e4m3fn, rounded to the nearest."""
    import torch

    return (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
