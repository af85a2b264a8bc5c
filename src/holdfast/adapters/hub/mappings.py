"""Mappings between a transformers model's names in memory and those on the hub, as text."""

from __future__ import annotations

from typing import Any

from holdfast.adapters.hub.compression import mapping_text
from holdfast.adapters.hub.hub_statements import components
from holdfast.adapters.hub.rules import Shapes, names_in_memory, names_on_hub


def saving_mapping(module: Any, shapes: Shapes) -> str:
    """Return the mapping from tensors in memory to those that save_pretrained writes; "" if all keys stay.

    Raises UntracedOperation if no mapping expresses what transformers does.
    """
    outputs = names_on_hub(module, shapes)
    return mapping_text(components(outputs), shapes, outputs)


def loading_mapping(module: Any, stored: Shapes, live: Shapes) -> str:
    """Return the mapping from stored tensors to those in memory, as from_pretrained reads them; "" if all keys stay."""
    outputs = names_in_memory(module, stored, live)
    return mapping_text(components(outputs), stored, outputs)
