"""The quantization that a model's config states: checked, removed, or written; the other fields stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.format import strictjson
from holdfast.plan.weight_scales import BLOCK, stated_block

FIELD = "quantization_config"
_OLD_FIELD = "compression_config"  # of compressed-tensors' first versions
_MODELOPT_FILE = "hf_quant_config.json"
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_COMPRESSED = ("float-quantized", "int-quantized", "naive-quantized")
_KNOWN = f"fp8 (weight_scale_inv), fbgemm_fp8, modelopt with FP8, and compressed-tensors with {', '.join(_COMPRESSED)}"

_Config = dict[str, Any]


def quantization_of(config: Mapping[str, Any] | None) -> _Config:
    """Return the fields of a model's quantization; empty without one."""
    for scope in _scopes(config or {}):
        for name in (FIELD, _OLD_FIELD):
            if isinstance(scope.get(name), dict):
                return dict(scope[name])
    return {}


def config_block(config: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return the block size that a model's config states, None without one."""
    return stated_block(quantization_of(config))


def check_method(quantization: Mapping[str, Any], where: str) -> None:
    """Raise Unsupported, with its name, for a way of quantization whose values Holdfast cannot compute."""
    if not quantization:
        return
    method = quantization.get("quant_method")
    detail = ""
    if method == "compressed-tensors":
        stated = quantization.get("format")
        known = stated in _COMPRESSED
        detail = f" with the format {str(stated)[:80]!r}"
    elif method == "modelopt":
        stated = quantization.get("quant_algo", "FP8")
        known = stated == "FP8"
        detail = f" with {str(stated)[:80]!r}"
    else:
        known = method in ("fp8", "fbgemm_fp8")
    if not known:
        raise Unsupported(
            f"{where}: config.json states the quant_method {str(method)[:80]!r}{detail}; Holdfast dequantizes "
            f"{_KNOWN}; use the tool that quantized it"
        )


def dequantized_files(files: Mapping[str, bytes], folder: str, dtype: str) -> dict[str, bytes]:
    """Return side files without the quantization, and with the dtype of the dequantized weights."""

    def change(config: _Config) -> None:
        for scope in _scopes(config):
            scope.pop(FIELD, None)
            scope.pop(_OLD_FIELD, None)
            for name in _DTYPE_FIELDS:
                if name in scope:
                    scope[name] = dtype

    kept = {name: data for name, data in files.items() if name != f"{folder}{_MODELOPT_FILE}"}
    return _changed(kept, f"{folder}config.json", change)


def quantized_files(files: Mapping[str, bytes], folder: str, fields: Mapping[str, Any]) -> dict[str, bytes]:
    """Return side files with a quantization in the config."""
    return _changed(files, f"{folder}config.json", lambda config: config.update({FIELD: dict(fields)}))


def fp8_blocks(skipped: list[str]) -> _Config:
    """Return the quantization config of block-wise fp8 weights, as transformers and vLLM read it."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": skipped,
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }


def read_config(files: Mapping[str, bytes], folder: str) -> _Config | None:
    """Return the model's config among side files, None without one."""
    data = files.get(f"{folder}config.json")
    fields = None if data is None else strictjson.loads(data, "config.json")
    return fields if isinstance(fields, dict) else None


def _changed(files: Mapping[str, bytes], name: str, change: Callable[[_Config], None]) -> dict[str, bytes]:
    config = strictjson.loads(files[name], name) if name in files else None
    if not isinstance(config, dict):
        return dict(files)
    change(config)
    return {**files, name: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def _scopes(config: Mapping[str, Any]) -> list[Any]:
    """Return a config and the nested configs of composite models."""
    nested = [value for name, value in config.items() if name.endswith("_config") and isinstance(value, dict)]
    return [config, *(scope for scope in nested if "quant_method" not in scope)]
