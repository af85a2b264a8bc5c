"""Hugging Face modules: config.json and generation_config.json to save; PEFT adapters; classes of sharded modules."""

from __future__ import annotations

import copy
import sys
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from holdfast.adapters.module import unwrap

CONFIG_FILES = ("config.json", "generation_config.json")
# Config texts and the files written from them, by module and dtype. Writing the files takes milliseconds.
_CACHE: weakref.WeakKeyDictionary[nn.Module, dict[str | None, tuple[str, dict[str, bytes]]]] = (
    weakref.WeakKeyDictionary()
)


def config_of(module: Any) -> dict[str, Any] | None:
    """Return the config of a Hugging Face model, as in its config.json; None for other modules."""
    config = getattr(unwrap(module), "config", None) if isinstance(module, nn.Module) else None
    return dict(config.to_dict()) if config is not None and hasattr(config, "to_dict") else None


def config_files(
    module: nn.Module, dtype: str | None, *, is_base: bool = False, known_plain: bool = False
) -> dict[str, bytes]:
    """Return config.json and generation_config.json of a model that has them; `dtype` is the stored dtype.

    Returns nothing for a model with PEFT adapters: its keys are not those of the plain model that the files describe,
    unless it is stored under these as a base model. `known_plain` says that its submodules have none.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return {}
    if not is_base and (getattr(module, "peft_config", None) if known_plain else adapter_kind(module)):
        return {}
    cached = _CACHE.setdefault(module, {})
    stored_dtype = dtype or _floating_dtype(module)
    text = f"{stored_dtype} " + _config_text(config) + _config_text(getattr(module, "generation_config", None))
    if cached.get(dtype, ("", {}))[0] != text:
        cached[dtype] = (text, _write_config_files(module, config, dtype))
    return dict(cached[dtype][1])


def adapter_kind(module: nn.Module) -> str:
    """Return the class name that shows a module has PEFT adapters; "" for a module without adapters.

    Detection is by name, so that peft need not be installed: a peft_config, as set by peft and transformers'
    add_adapter, or a layer derived from peft's BaseTunerLayer.
    """
    if getattr(module, "peft_config", None):
        return type(module).__name__
    for kind in dict.fromkeys(type(part) for part in module.modules()):  # a model has few layer types
        for cls in kind.__mro__:
            if cls.__name__ in ("BaseTunerLayer", "PeftModel", "BaseTuner") and cls.__module__.startswith("peft."):
                return kind.__name__
    return ""


def _config_text(config: Any) -> str:
    """Return the whole config as a string, to detect changes."""
    return repr(sorted(config.to_dict().items(), key=repr)) if config is not None else ""


def _write_config_files(module: nn.Module, config: Any, dtype: str | None) -> dict[str, bytes]:
    config = copy.deepcopy(config)
    config.architectures = [plain_class(module).__name__]
    stored_dtype = dtype or _floating_dtype(module)
    if stored_dtype is not None:
        config.dtype = stored_dtype
    with tempfile.TemporaryDirectory(prefix="holdfast-config-") as folder:
        config.save_pretrained(folder)
        generation = getattr(module, "generation_config", None)
        if generation is not None and _can_generate(module):
            _write_generation_config(generation, Path(folder) / CONFIG_FILES[1])
        return {name: (Path(folder) / name).read_bytes() for name in CONFIG_FILES if (Path(folder) / name).exists()}


def _write_generation_config(generation: Any, path: Path) -> None:
    """Write the file as save_pretrained does, even if transformers considers the config invalid.

    A save must not fail because a temperature is set without sampling.
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


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class a user would import, even if code such as fully_shard created a new one at run time."""
    for cls in type(module).__mro__:
        named = getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls or "<locals>" in cls.__qualname__
        if named and issubclass(cls, nn.Module):
            return cls
    return type(module)


class PlainClasses:
    """A model whose submodules have the classes that a user would import: rules are found by the names of classes,
    and fully_shard gives each module that it shards a class of its own."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        return ((name, _in_plain_class(submodule)) for name, submodule in self._module.named_modules())


def _in_plain_class(module: nn.Module) -> nn.Module:
    """Return the module, or one of its plain class that shares its attributes."""
    cls = plain_class(module)
    if type(module) is cls:
        return module
    twin = cls.__new__(cls)
    object.__setattr__(twin, "__dict__", module.__dict__)
    return twin
