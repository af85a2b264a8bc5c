"""Small files and plans of a module in the state: config.json, the configs of adapters, the plan of its sharding."""

from __future__ import annotations

from typing import Any

from holdfast.adapters.huggingface import config_files
from holdfast.adapters.peft import AdapterParts, adapter_configs, base_of
from holdfast.core.names import BASE, file_stem, group_folder


def plan_of(name: str, module: Any) -> dict[str, Any]:
    """Return the plan of `holdfast.spmd.distribute` for a module as JSON values, under the module's name."""
    plan = getattr(module, "holdfast_plan", None)
    return {name: plan} if isinstance(plan, dict) else {}


def entry_files(
    name: str,
    module: Any,
    parts: AdapterParts | None,
    dtype: str | None,
    head: str = "",
    *,
    same_modules: bool = False,
) -> dict[str, bytes]:
    """Return the config files of a module that is stored as `dtype`, or in its own dtype, by path.

    `same_modules` says that the files of the same submodules were written before: they are not searched for adapters
    again.
    """
    if parts is None:
        files = config_files(module, dtype, known_plain=same_modules) if name == "model" else {}
        return {head + file: data for file, data in files.items()}
    out = adapter_configs(name, module, head)
    if parts.base:
        folder = group_folder(file_stem(f"{head}{name}.{BASE}", BASE))
        out |= {folder + file: data for file, data in config_files(base_of(module), dtype, is_base=True).items()}
    return out
