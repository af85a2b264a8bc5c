"""The tensors of a graph that no checkpoint holds: constants and buffers that are not persistent, as numpy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from holdfast.adapters.loading.computed_buffers import compute_buffers, meta_modules
from holdfast.adapters.loading.meta_tensors import MetaTensors
from holdfast.adapters.program.torch_operators import dtype_name
from holdfast.adapters.tensors import RAW_DTYPES
from holdfast.core.errors import Unsupported
from holdfast.format.dtypes import dtype_named, numpy_dtype


def constant_values(model: nn.Module, constants: Mapping[str, Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the values of constants by key; those on the meta device are computed as the model computes them."""
    computed = _computed(model, [key for key, value in constants.items() if _is_meta(value)])
    found = {}
    for key, value in constants.items():
        if not isinstance(value, torch.Tensor):
            raise Unsupported(f"the constant {key} is a {type(value).__name__}, not a tensor")
        if value.is_meta and key not in computed:
            raise Unsupported(
                f"the buffer {key} is on the meta device, no checkpoint holds it, and its module does not compute it "
                "in reset_parameters(); export a model in memory, or make the buffer persistent"
            )
        found[key] = to_array(computed.get(key, value), key)
    return found


def _is_meta(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _computed(model: nn.Module, keys: list[str]) -> dict[str, torch.Tensor]:
    if not keys:
        return {}
    found: dict[str, torch.Tensor] = {}
    made = MetaTensors(torch.device("cpu"))
    for owner in meta_modules(model):
        names = [name for name, _ in owner.tensors() if owner.key(name) in keys]
        if names:
            found |= {owner.key(name): tensor for name, tensor in compute_buffers(owner, names, made).items()}
    return found


def to_array(tensor: torch.Tensor, where: str) -> npt.NDArray[Any]:
    """Return a tensor as a numpy array of the same dtype; complex numbers that numpy lacks are refused."""
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    name = dtype_name(tensor.dtype)
    dtype = dtype_named(name)
    if dtype.pair or dtype.name != dtype.stored:
        raise Unsupported(f"the constant {where} is of the dtype {name}, which a program cannot hold as a constant")
    if tensor.dtype == torch.bool or name == "complex64":
        return tensor.numpy()
    raw = tensor.view(RAW_DTYPES[tensor.element_size()]).numpy() if tensor.ndim else _scalar(tensor)
    return np.ascontiguousarray(raw).view(numpy_dtype(name)).reshape(tuple(tensor.shape))


def _scalar(tensor: torch.Tensor) -> npt.NDArray[Any]:
    return tensor.reshape(1).view(RAW_DTYPES[tensor.element_size()]).numpy()


def to_tensor(array: npt.NDArray[Any], name: str) -> torch.Tensor:
    """Return a constant as a tensor of its own."""
    dtype = dtype_named(name)
    if name in ("bool", "complex64"):
        return torch.from_numpy(np.array(array))
    raw = np.array(array).reshape(-1).view(f"i{dtype.bytes}" if dtype.bytes > 1 else "u1")
    torch_dtype: torch.dtype = getattr(torch, name)
    return torch.from_numpy(raw).view(torch_dtype).reshape(array.shape)
