"""Builders of torch types that pickles may name: tensors, storages, parameters, sizes; DTensors are rejected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import is_dtype
from holdfast.sources.pickles import COMMON, NUMPY, Name, Names
from holdfast.sources.torch_save.megatron_enums import MEGATRON

_STORAGES = {
    "FloatStorage": "float32", "DoubleStorage": "float64", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128", "UntypedStorage": "",
}  # fmt: skip
_DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
    "uint64", "bool", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
_DTENSOR_MODULES = (
    "torch.distributed.tensor", "torch.distributed.tensor._api", "torch.distributed.tensor.api",
    "torch.distributed._tensor", "torch.distributed._tensor.api",
)  # fmt: skip
_SHARDED_MODULES = (
    "torch.distributed._shard.sharded_tensor", "torch.distributed._shard.sharded_tensor.api",
    "torch.distributed._shard.sharded_tensor.shard",
)  # fmt: skip
_PLAIN_TYPES = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("torch.nn.parameter", "Buffer")}

_ELEMENTS = 2**58


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """A storage that a pickle refers to: its key, element dtype ("" for bytes) and number of elements."""

    key: str
    dtype: str
    elements: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor in a pickle: a view of a storage. `offset` and `strides` count elements."""

    storage: PickledStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def storage_of(token: Any) -> PickledStorage:
    """Return the storage of a torch persistent id. Raises ValueError for any other id."""
    if type(token) is not tuple or len(token) < 5 or token[0] != "storage":
        raise ValueError("not the id of a storage")
    _, kind, key, _, elements = token[:5]
    if len(token) > 5 and token[5] is not None:
        raise ValueError("a view of a storage, as in torch 0.3")
    if type(kind) is not Name or kind.name not in _STORAGES or type(key) is not str or type(elements) is not int:
        raise ValueError("not the id of a storage")
    return PickledStorage(key, _STORAGES[kind.name], elements)


def _tensor(arguments: tuple[Any, ...]) -> PickledTensor:
    storage, offset, shape, strides = arguments[:4]
    if type(storage) is not PickledStorage:
        raise TypeError("not a storage")
    metadata = arguments[6] if len(arguments) > 6 else None
    return _checked(storage, storage.dtype, offset, shape, strides, metadata)


def _tensor_v3(arguments: tuple[Any, ...]) -> PickledTensor:
    storage, offset, shape, strides, _, _, dtype = arguments[:7]
    if type(storage) is not PickledStorage or type(dtype) is not Name:
        raise TypeError("not a storage and a dtype")
    metadata = arguments[7] if len(arguments) > 7 else None
    return _checked(storage, dtype.name, offset, shape, strides, metadata)


def _checked(
    storage: PickledStorage, dtype: str, offset: Any, shape: Any, strides: Any, metadata: Any
) -> PickledTensor:
    if not is_dtype(dtype):
        raise Unsupported(f"a tensor of dtype {dtype or 'bytes'} is not supported")
    if isinstance(metadata, dict) and any(metadata.values()):
        raise Unsupported("a lazily conjugated or negated tensor; save tensor.resolve_conj().resolve_neg()")
    numbers = (offset, *shape, *strides)
    if type(shape) is not tuple or type(strides) is not tuple or len(shape) != len(strides) or len(shape) > 64:
        raise TypeError("not a shape and its strides")
    if not all(type(number) is int and 0 <= number < 2**60 for number in numbers):
        raise ValueError("not a shape and its strides")
    if math.prod(max(1, size) for size in shape) >= _ELEMENTS:
        raise ValueError("too large a shape")
    return PickledTensor(storage, dtype, offset, shape, strides)


def _parameter(arguments: tuple[Any, ...]) -> Any:
    return arguments[0]


def _from_type(arguments: tuple[Any, ...]) -> Any:
    """Build a tensor that has attributes or a subclass."""
    function, kind, inner = arguments[:3]
    if type(function) is not Name or type(kind) is not Name or type(inner) is not tuple:
        raise TypeError("not a function, a class and arguments")
    if (kind.module, kind.name) not in _PLAIN_TYPES:
        _reject_dtensor(arguments)
    builder = TORCH.get((function.module, function.name))
    if builder is None or builder is _from_type or function.module != "torch._utils":
        raise TypeError("not a function that builds tensors")
    return builder(inner)


def _reject_dtensor(arguments: tuple[Any, ...]) -> Any:
    raise Unsupported(
        "a DTensor, of which a torch.save file holds only one rank's shard; save full tensors, or use "
        "torch.distributed.checkpoint or holdfast.save"
    )


def _reject_shard(arguments: tuple[Any, ...]) -> Any:
    return _reject_subclass(("torch.ShardedTensor",))


def _reject_subclass(arguments: tuple[Any, ...]) -> Any:
    kind = str(arguments[0]) if arguments else "an unknown class"
    sharded = kind.endswith(".ShardedTensor")
    what = (
        "a ShardedTensor of FSDP, of which a torch.save file holds only one rank's shard"
        if sharded
        else f"a tensor of {kind}"
    )
    raise Unsupported(
        f"{what[:200]}; save a full state dict of plain tensors, or use torch.distributed.checkpoint or holdfast.save"
    )


def _size(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    (sizes,) = arguments or ((),)
    return tuple(sizes)


def _device(arguments: tuple[Any, ...]) -> str:
    return ":".join(str(part) for part in arguments if isinstance(part, str | int))[:40]


def _layout(arguments: tuple[Any, ...]) -> str:
    (text,) = arguments
    if text != "torch.strided":
        raise Unsupported(f"a tensor of layout {str(text)[:40]!r}; only dense tensors are supported")
    return str(text)


def _version(arguments: tuple[Any, ...]) -> str:
    (text,) = arguments
    return str(text)[:100]


TORCH: Names = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("torch.torch_version", "TorchVersion"): _version,
    **dict.fromkeys(_PLAIN_TYPES),
    **{("torch", name): None for name in _STORAGES},
    ("torch.storage", "UntypedStorage"): None,
    **{("torch", name): None for name in _DTYPES},
    **{(module, "DTensor"): _reject_dtensor for module in _DTENSOR_MODULES},
    **{(module, "ShardedTensor"): None for module in _SHARDED_MODULES},
    **{(module, "Shard"): _reject_shard for module in _SHARDED_MODULES},
    ("torch._utils", "_rebuild_wrapper_subclass"): _reject_subclass,
}
TORCH_NAMES: Names = {**COMMON, **NUMPY, **TORCH, **MEGATRON}
