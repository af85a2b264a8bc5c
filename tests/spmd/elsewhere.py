"""A device that is none: tensors in the CPU's memory which refuse those that are not on their device, as a GPU's do.

A handler that makes a tensor on the CPU, or looks at the memory of one, is right on every machine without a GPU. Here
it raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "elsewhere"
MOVES = ("copy_", "_to_copy")
INDEXES = ("index", "index_put", "index_put_", "_index_put_impl_")  # whose indices may lie on the CPU
NUMBERS = ("_local_scalar_dense", "equal")

_libraries: list[torch.library.Library] = []  # a library's operators are gone when it is


class Elsewhere(torch.Tensor):
    """A tensor on that device: it has a CPU tensor, and every operator runs on that."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Elsewhere:
        """Around `near`, which it does not copy."""
        return torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=torch.device(NAME, 0),
        )

    def __init__(self, near: torch.Tensor) -> None:
        self.near = near

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Elsewhere({self.near})"

    def tolist(self) -> Any:
        return self.near.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(cls, kind) for kind in types):
            return NotImplemented  # a DTensor knows what to do with both
        return _run(func, *args, **(kwargs or {}))


def install() -> None:
    """Give this process the device; nothing takes it away again."""
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    library = torch.library.Library("_", "IMPL")
    library.fallback(_run, "PrivateUse1")
    _libraries.append(library)


def _run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator on the CPU; its results are elsewhere, unless it moves them."""
    name = func._schema.name.partition("::")[2]
    given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if name not in MOVES:
        _check(func, name, args, given)
    target = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else NAME
    if target == NAME and "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args_near, kwargs_near = tree_map(_near, (args, kwargs))
    result = func(*args_near, **kwargs_near)
    if target != NAME or name in NUMBERS:
        return result
    if name == "copy_":
        return args[0]
    owners = {id(tensor.near): tensor for tensor in given if isinstance(tensor, Elsewhere)}
    return tree_map(lambda value: _far(value, owners), result)


def _check(func: Any, name: str, args: Any, given: list[torch.Tensor]) -> None:
    """Refuse what a GPU refuses: tensors of the CPU, but numbers and indices."""
    indices = {id(index) for index in args[1]} if name in INDEXES else set()
    numbers = torch.Tag.pointwise in func.tags
    strays = [tensor for tensor in given if not isinstance(tensor, Elsewhere) and id(tensor) not in indices]
    if any(tensor.ndim or not numbers for tensor in strays):
        places = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in given)
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found {places}")


def _near(value: Any) -> Any:
    return value.near if isinstance(value, Elsewhere) else value


def _far(value: Any, owners: dict[int, Elsewhere]) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, Elsewhere):
        return value
    return owners[id(value)] if id(value) in owners else Elsewhere(value)
