"""How a base model is quantized in memory: the record of a save, which the base of a load is compared with.

The folder of a base that transformers or torchao quantizes while it is loaded says nothing of this, and its weights
cannot be compared with the folder's.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast.adapters.module import ModuleView
from holdfast.adapters.peft import base_key
from holdfast.adapters.subclass_tensors import is_subclass
from holdfast.adapters.weight_wrappers import local_tensor

_LIBRARY = "bitsandbytes"


def quantization_of(view: ModuleView) -> list[str]:
    """Return how layers of a base model are quantized, each way once, such as "bitsandbytes nf4"; [] if none is."""
    found = set()
    for part in view.module.modules():
        if type(part).__module__.partition(".")[0] == _LIBRARY and hasattr(part, "weight"):
            found.add(_bitsandbytes(part))
        else:
            found |= {_element_format(parameter) for parameter in part.parameters(recurse=False)}
    return sorted(found - {""})


def unfillable_key(view: ModuleView) -> str:
    """Return a tensor of the base that a load cannot fill, as its state_dict makes it anew each time; "" if none."""
    own = ((raw, base_key(view.module, raw)) for raw in sorted(view.copies))
    return next((key for _, key in own if key is not None), "")


def _bitsandbytes(layer: Any) -> str:
    """Return the format of a layer of bitsandbytes, whether its weight is quantized yet or not; "" for other layers."""
    weight = layer.weight
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    kind = getattr(state or weight, "quant_type", None)
    if kind is not None:
        is_nested = state.nested if state is not None else getattr(weight, "compress_statistics", False)
        return f"{_LIBRARY} {kind}{' with double quantization' if is_nested else ''}"
    return f"{_LIBRARY} int8" if type(layer).__name__ == "Linear8bitLt" else ""


def _element_format(parameter: nn.Parameter) -> str:
    local = local_tensor(parameter)
    if is_subclass(parameter):
        return type(local).__name__
    is_plain = local.dtype.itemsize > 1 and (local.dtype.is_floating_point or local.dtype.is_complex)
    return "" if is_plain else str(local.dtype).removeprefix("torch.")
