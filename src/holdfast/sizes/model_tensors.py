"""The tensors of a model by key, shape and dtype: from a checkpoint, a config.json or a module. No values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import DType, dtype_named
from holdfast.plan.quantized_keys import is_float8, quantized_weights

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpoint import Checkpoint
    from holdfast.plan.contents import StoredTensor

# Buffers of floats: a file does not tell them from parameters.
_BUFFERS = re.compile(r"(?:.*\.)?(?:running_mean|running_var|inv_freq|e_score_correction_bias|position_ids)")
_HEADS = re.compile(r"(?:.*\.)?(?:lm_head|embed_out|output|proj_out|cls\.predictions\.decoder)\.weight")
_EMBEDDINGS = re.compile(
    r"(?:.*\.)?(?:embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|shared|backbone\.embeddings)\.weight"
)
_WITH_HEAD = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """A tensor of a model: its key, dtype and shape as a file stores them, its logical dtype, and its role."""

    key: str
    dtype: DType
    logical: DType
    shape: tuple[int, ...]
    is_parameter: bool = True  # else a buffer
    is_trained: bool = True  # it has a gradient and an optimizer state

    @property
    def is_float(self) -> bool:
        """True if a cast of the model changes its dtype: a trained float, neither quantized nor a scale."""
        return self.is_trained and self.dtype.name in _FLOATS


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The tensors of a model in the model's order, the aliases of tied ones, and where they are from."""

    tensors: tuple[ModelTensor, ...]
    aliases: Mapping[str, str]
    origin: str
    notes: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)  # the fields of config.json, where there is one

    @property
    def parameters(self) -> int:
        """The number of elements of all parameters; packed ones count as they are stored."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors if tensor.is_parameter)


def model_of_checkpoint(checkpoint: Checkpoint) -> ModelTensors:
    """Return the tensors of a checkpoint's model. Quantized weights and their scales are not trained."""
    group = _model_group(checkpoint)
    found = [checkpoint.find(key, group) for key in checkpoint.keys(group)]
    quantized = quantized_weights({tensor.key: tensor.logical for tensor in found})
    fixed = {key for weight in quantized.values() for key in (weight.weight, *weight.companions)}
    tensors = tuple(_tensor_of(tensor, is_fixed=tensor.key in fixed) for tensor in found)
    notes: tuple[str, ...] = ()
    if quantized:
        notes = (f"{len(quantized)} quantized weights stay as they are stored, and are not trained",)
    config = checkpoint.config() or {}
    aliases = {**_tied_head(tensors, config), **checkpoint.contents.groups[group].aliases}
    return ModelTensors(tensors, aliases, checkpoint.path, notes, config)


def _tied_head(tensors: Sequence[ModelTensor], config: Mapping[str, Any]) -> dict[str, str]:
    """Return the alias of an output head that a file leaves out because the config ties it to the embeddings."""
    text = config.get("text_config")
    stated = [scope.get("tie_word_embeddings") for scope in (config, text if isinstance(text, dict) else {})]
    is_tied = next((value for value in stated if isinstance(value, bool)), True)  # the default of transformers
    architectures = config.get("architectures")
    kind = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    embeddings = [tensor.key for tensor in tensors if _EMBEDDINGS.fullmatch(tensor.key) and len(tensor.shape) == 2]
    has_head = any(_HEADS.fullmatch(tensor.key) for tensor in tensors)
    if has_head or not is_tied or not kind.endswith(_WITH_HEAD) or len(embeddings) != 1:
        return {}
    return {"lm_head.weight": embeddings[0]}


def _tensor_of(tensor: StoredTensor, *, is_fixed: bool) -> ModelTensor:
    """Return a tensor of a file, of which only the name tells a buffer of floats; the fixed ones are quantized."""
    is_float = (tensor.dtype.name in _FLOATS or is_float8(tensor.logical)) and not _BUFFERS.fullmatch(tensor.key)
    return ModelTensor(
        key=tensor.key,
        dtype=tensor.dtype,
        logical=_logical(tensor.logical, tensor.dtype),
        shape=tensor.shape,
        is_parameter=is_fixed or is_float,
        is_trained=is_float and not is_fixed and tensor.dtype.name in _FLOATS,
    )


def _logical(name: str, stored: DType) -> DType:
    return stored if name == stored.name else dtype_named(name)


def _model_group(checkpoint: Checkpoint) -> str:
    groups = checkpoint.contents.groups
    modules = [name for name, group in groups.items() if group.kind == "module"]
    if "model" in modules or len(modules) == 1:
        return "model" if "model" in modules else modules[0]
    known = ", ".join(sorted(groups)) or "no groups"
    raise Unsupported(f"{checkpoint.path} has no single model to size, but {known}: convert the model out of it first")
