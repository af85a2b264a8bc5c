"""Methods of DTensor that never reach its dispatcher."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from holdfast.spmd.setitem import set_item


def _tolist(self: DTensor) -> Any:
    return self.full_tensor().tolist()


METHODS: dict[str, Any] = {"tolist": _tolist, "__setitem__": set_item}


def install_methods() -> None:
    for name, method in METHODS.items():
        setattr(DTensor, name, method)


def remove_methods() -> None:
    for name, method in METHODS.items():
        if vars(DTensor).get(name) is method:
            delattr(DTensor, name)
