"""The tensors of a model that exists only as a config.json, or as a module on any device, under the hub's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core import limits
from holdfast.core.errors import HoldfastError, InvalidArgument, NotFound, Unsupported
from holdfast.format import strictjson
from holdfast.format.dtypes import dtype_named
from holdfast.sizes.model_tensors import ModelTensor, ModelTensors

if TYPE_CHECKING:
    from torch import nn

CONFIG = "config.json"


def model_of_config(path: Path) -> ModelTensors:
    """Return the tensors of the model that a Hugging Face config.json describes, built without memory.

    transformers builds it on the meta device. Code from the hub is never run.
    """
    fields = _read_fields(path)
    module = _build(path, fields)
    notes = []
    if fields.get("quantization_config"):
        method = fields["quantization_config"].get("quant_method", "a method without a name")
        notes.append(f"config.json asks for quantization by {method}: sizes are those of the model before it")
    made = model_of_module(module, str(path))
    return replace(made, notes=(*made.notes, *notes), config=fields)


def _read_fields(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(limits.JSON_BYTES)
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}") from None
    fields = strictjson.loads(data, str(path))
    if not isinstance(fields, dict) or not isinstance(fields.get("quantization_config") or {}, dict):
        raise InvalidArgument(f"{path}: expected a JSON object, as in a config.json of transformers")
    return fields


def _build(path: Path, fields: dict[str, Any]) -> Any:
    import torch

    try:
        import transformers
    except ImportError:
        raise Unsupported(
            f"{path}: sizes from a config.json need transformers, which is not installed; give a checkpoint folder"
        ) from None
    names = fields.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names and isinstance(names[0], str) else None
    if fields.get("auto_map") and kind is None:
        raise Unsupported(f"{path}: {fields['auto_map']} is code of its own, which is never run here")
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            if kind is None:
                auto: Any = transformers.AutoModelForCausalLM
                return auto.from_config(config, trust_remote_code=False)
            return kind._from_config(config)
    except HoldfastError:
        raise
    except Exception as error:  # noqa: BLE001  (code of other models)
        raise Unsupported(f"{path}: transformers cannot build this model: {type(error).__name__}: {error}") from None


def model_of_module(module: nn.Module, origin: str = "a module") -> ModelTensors:
    """Return the tensors of a module under the names that a save gives them. Its memory is not read."""
    from holdfast.adapters.hub.rules import has_rules, names_on_hub
    from holdfast.adapters.hub.traced_tensor import UntracedOperation
    from holdfast.adapters.module import view_module

    view = view_module("model", module, {})
    stored = {key: tensor for key, tensor in view.tensors.items() if view.stored_key(key) == key}
    shapes = {key: tuple(tensor.shape) for key, tensor in stored.items()}
    dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in stored.items()}
    trained = {key for key in stored if key in view.parameters and stored[key].requires_grad}
    sources: dict[str, tuple[str, ...]] = {key: (key,) for key in stored}
    notes: tuple[str, ...] = ()
    if has_rules(view.module):
        try:
            found = names_on_hub(view.module, shapes)
            sources = {key: tuple(_sources(value.operation)) for key, value in found.items()}
            shapes = {key: tuple(value.shape) for key, value in found.items()}
        except UntracedOperation as error:
            notes = (f"the names are those in memory, not those on the hub: {error}",)
    tensors = []
    for key, (first, *_) in sources.items():
        dtype = dtype_named(dtypes[first])
        shape = (*shapes[key], 2) if dtype.pair else shapes[key]
        of_file = dtype_named(dtype.stored)
        tensors.append(ModelTensor(key, of_file, dtype, shape, first in view.parameters, first in trained))
    aliases = {alias: key for alias, key in view.ties.items() if key in sources}
    return ModelTensors(tuple(tensors), aliases, origin, notes, _config_of(view.module))


def _config_of(module: Any) -> dict[str, Any]:
    """Return the fields of the config of a model of transformers, empty for another module."""
    to_dict = getattr(getattr(module, "config", None), "to_dict", None)
    fields = to_dict() if callable(to_dict) else {}
    return fields if isinstance(fields, dict) else {}


def _sources(operation: Any) -> list[str]:
    """Return the keys of the tensors in memory that a traced operation begins with."""
    if operation.kind == "source":
        return [operation.key]
    return [key for value in operation.inputs for key in _sources(value.operation)]
