"""Side files of a merged model: byte for byte from the donor; in its config only the fields that the merge changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.core import names
from holdfast.format import strictjson
from holdfast.format.dtypes import DType
from holdfast.merging.layers import COUNT_FIELDS, layer_count
from holdfast.merging.merge_plan import MergePlan

RECORD = "merge_record.json"
_DTYPE_FIELDS = ("dtype", "torch_dtype")
_CONFIG = "config.json"

Appended = Mapping[str, Mapping[str, Any]]  # definitions of tokens that the donor's tokenizer does not have


def donor_files(plan: MergePlan) -> dict[str, bytes]:
    """Return the side files of the donor as they are stored with the merged model."""
    donor = plan.models[plan.donor]
    folder = names.group_folder(donor.group_name)
    files = {name: data for name, data in donor.small.items() if name.rpartition("/")[2] != RECORD}
    config = f"{folder}{_CONFIG}"
    dtype = _changed_dtype(plan)
    if config in files:
        files[config] = with_fields(files[config], config, _layer_fields(plan) | _token_fields(plan), dtype)
    if plan.tokens is not None and plan.tokens.appended:
        for name, append in _TOKEN_FILES.items():
            if f"{folder}{name}" in files:
                files[f"{folder}{name}"] = append(files[f"{folder}{name}"], name, plan.tokens.appended)
    return files


def _token_fields(plan: MergePlan) -> dict[str, Any]:
    """Return the fields of the config that count the rows of a joined vocabulary."""
    config = plan.models[plan.donor].config
    if plan.tokens is None or plan.tokens.rows == plan.tokens.table["rows_before"]:
        return {}
    nested = config.get("text_config")
    if "vocab_size" not in config and isinstance(nested, dict):
        return {"text_config": {**nested, "vocab_size": plan.tokens.rows}}
    return {"vocab_size": plan.tokens.rows}


def _append_definitions(data: bytes, where: str, appended: Appended) -> bytes:
    """Return a tokenizer.json with more added tokens."""
    listed = strictjson.loads(data, where).get("added_tokens", [])
    return with_fields(data, where, {"added_tokens": [*listed, *(dict(fields) for fields in appended.values())]})


def _append_decoder(data: bytes, where: str, appended: Appended) -> bytes:
    """Return a tokenizer_config.json with more tokens in its decoder, if it has one."""
    config = strictjson.loads(data, where)
    decoder = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not isinstance(decoder, dict):
        return data
    more = {str(f["id"]): {name: value for name, value in f.items() if name != "id"} for f in appended.values()}
    return with_fields(data, where, {"added_tokens_decoder": {**decoder, **more}})


def _append_ids(data: bytes, where: str, appended: Appended) -> bytes:
    """Return an added_tokens.json with more tokens."""
    return with_fields(data, where, {token: fields["id"] for token, fields in appended.items()})


_TOKEN_FILES = {
    "tokenizer.json": _append_definitions,
    "tokenizer_config.json": _append_decoder,
    "added_tokens.json": _append_ids,
}


def _layer_fields(plan: MergePlan) -> dict[str, Any]:
    """Return the fields of the config that count or list layers, for an output with layers of several models."""
    if not plan.layers:
        return {}
    config = plan.models[plan.donor].config
    count = layer_count(config)
    fields: dict[str, Any] = {name: len(plan.layers) for name in COUNT_FIELDS if config.get(name) == count}
    for name, value in config.items():
        if isinstance(value, list) and len(value) == count and "layer" in name:
            fields[name] = [_listed(plan, name, model, layer, value) for model, layer in plan.layers]
    return fields


def _listed(plan: MergePlan, name: str, model: int, layer: int, value: list[Any]) -> Any:
    """Return the entry of a layer in a list of its own model's config, or of the donor's."""
    own = plan.models[model].config.get(name, value)
    return own[layer] if isinstance(own, list) and layer < len(own) else value[-1]


def _changed_dtype(plan: MergePlan) -> str | None:
    """Return the dtype of the output if it is not that of the donor's weights, else None."""
    donor = plan.models[plan.donor]
    usual = next(iter(donor.tensors.values())).dtype

    def donor_dtype(key: str) -> DType:
        return donor.tensors[key].dtype if key in donor.tensors else usual

    changed = [
        tensor.dtype.name
        for tensor in plan.tensors.values()
        if tensor.task is not None and tensor.dtype is not donor_dtype(tensor.key)
    ]
    return max(set(changed), key=changed.count) if changed else None


def with_fields(data: bytes, where: str, fields: Mapping[str, Any], dtype: str | None = None) -> bytes:
    """Return a config with changed fields; its other fields, their order and its indentation stay as they are."""
    config = strictjson.loads(data, where)
    if not isinstance(config, dict):
        return data
    before = json.dumps(config)
    config.update(fields)
    if dtype is not None:
        _set_dtype(config, dtype)
        if not any(field in config for field in _DTYPE_FIELDS):
            config["torch_dtype"] = dtype
    if json.dumps(config) == before:
        return data
    ending = b"\n" if data.endswith(b"\n") else b""
    return json.dumps(config, indent=_indent(data), ensure_ascii=data.isascii()).encode() + ending


def _indent(data: bytes) -> int | None:
    """Return the indentation of a JSON text, None for a text of one line."""
    line = next((line for line in data.splitlines()[1:] if line.strip()), None)
    return None if line is None else len(line) - len(line.lstrip(b" "))


def _set_dtype(config: dict[str, Any], dtype: str) -> None:
    """Set the dtype in a config and in the nested configs of composite models."""
    for field, value in config.items():
        if field in _DTYPE_FIELDS:
            config[field] = dtype
        elif isinstance(value, dict) and field.endswith("_config") and field != "quantization_config":
            _set_dtype(value, dtype)
