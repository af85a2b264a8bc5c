"""Hugging Face models: the config files that save_pretrained would write beside the weights."""

from __future__ import annotations

import copy
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

from torch import nn

_FILES = ("config.json", "generation_config.json")
# By module and dtype: what its configs said, and the files that gave. Writing them takes milliseconds.
_KNOWN: weakref.WeakKeyDictionary[nn.Module, dict[str | None, tuple[str, dict[str, bytes]]]] = (
    weakref.WeakKeyDictionary()
)


def config_files(module: nn.Module, dtype: str | None) -> dict[str, bytes]:
    """config.json and generation_config.json of a model that has them; `dtype` names the stored one.

    A model with PEFT adapters gets none: its keys are not those of the plain model that they describe.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "save_pretrained") or adapter_kind(module):
        return {}
    known = _KNOWN.setdefault(module, {})
    found = dtype or _floating_dtype(module)
    text = f"{found} " + _text(config) + _text(getattr(module, "generation_config", None))
    if known.get(dtype, ("", {}))[0] != text:
        known[dtype] = (text, _written_files(module, config, dtype))
    return dict(known[dtype][1])


def adapter_kind(module: nn.Module) -> str:
    """The class by which a module is known to have PEFT adapters; "" for a module without.

    Known by names, so that peft need not be installed: a peft_config, as peft and transformers' add_adapter
    set it, or a layer that derives from peft's BaseTunerLayer.
    """
    if getattr(module, "peft_config", None):
        return type(module).__name__
    for kind in dict.fromkeys(type(part) for part in module.modules()):  # a model has few kinds of layers
        for cls in kind.__mro__:
            if cls.__name__ in ("BaseTunerLayer", "PeftModel", "BaseTuner") and cls.__module__.startswith("peft."):
                return kind.__name__
    return ""


def _text(config: Any) -> str:
    """All that a config says, so that a change is seen."""
    return repr(sorted(config.to_dict().items(), key=repr)) if config is not None else ""


def _written_files(module: nn.Module, config: Any, dtype: str | None) -> dict[str, bytes]:
    config = copy.deepcopy(config)
    config.architectures = [plain_class_name(module)]
    found = dtype or _floating_dtype(module)
    if found is not None:
        config.dtype = found
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as folder:
        config.save_pretrained(folder)
        generation = getattr(module, "generation_config", None)
        if generation is not None and _can_generate(module):
            _write_generation_config(generation, Path(folder) / _FILES[1])
        return {name: (Path(folder) / name).read_bytes() for name in _FILES if (Path(folder) / name).exists()}


def _write_generation_config(generation: Any, path: Path) -> None:
    """As save_pretrained writes it; one that transformers finds invalid is written all the same.

    A checkpoint must not fail for a temperature that is set without sampling.
    """
    try:
        generation.save_pretrained(path.parent)
    except ValueError:
        path.write_text(generation.to_json_string(), encoding="utf-8")


def _can_generate(module: Any) -> bool:
    return bool(module.can_generate()) if hasattr(module, "can_generate") else True


def _floating_dtype(module: nn.Module) -> str | None:
    for parameter in module.parameters():
        if parameter.dtype.is_floating_point:
            return str(parameter.dtype).removeprefix("torch.")
    return None


def plain_class_name(module: nn.Module) -> str:
    """The class a user would import, even when a mixin such as FSDP2's made a class of its own."""
    for cls in type(module).__mro__:
        named = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls or "<locals>" in cls.__qualname__
        if named and issubclass(cls, nn.Module) and not _leads_with_mixin(cls):
            return cls.__name__
    return type(module).__name__


def _leads_with_mixin(cls: type) -> bool:
    """Whether the first base adds behaviour to modules without being one, as FSDPModule does."""
    return not issubclass(cls.__bases__[0], nn.Module) and cls is not nn.Module
