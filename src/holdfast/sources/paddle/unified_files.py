"""Files of a Paddle unified checkpoint: the files of each group by index or name, checked; bfloat16 as uint16."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import check_file, natural_key
from holdfast.format import strictjson
from holdfast.format.dtypes import DType, dtype_named
from holdfast.format.safetensors import LENGTH_BYTES, header_bytes
from holdfast.plan.files import Place
from holdfast.sources.foreign import Folder
from holdfast.sources.huggingface import safetensors_places

MODEL, ADAPTER, MASTERS, OPTIMIZER = "model", "peft_model", "master_weights", "optimizer"
_RANK = r"(?:tp|pp|shard|moe)[0-9]{2,}"
_FILE = re.compile(
    rf"(?P<stem>{MODEL}|{ADAPTER}|{MASTERS}|{OPTIMIZER})"
    rf"(?:\.(?P<ranks>{_RANK}(?:_{_RANK})*)|-[0-9]{{5,}}-of-[0-9]{{5,}})?"
    r"\.safetensors(?:_shard_(?P<part>[0-9]{4,}))?"
)

_SCALES = re.compile(r"@(?:min_|max_)?scales$")
_QUANTIZED = (
    "the lost precision cannot be restored: resume in Paddle and save with ckpt_quant_stage O0, or remove the "
    "optimizer's files from the folder"
)


@dataclass(frozen=True, slots=True)
class GroupFiles:
    """The files of one group, and the other entries of its index."""

    names: tuple[str, ...]
    index: Mapping[str, Any]


def stem_of(name: str) -> str | None:
    """Return the group of a unified checkpoint's file by its name, or None."""
    match = _FILE.fullmatch(name)
    return match["stem"] if match else None


def group_files(folder: Folder, stem: str) -> GroupFiles | None:
    """Return the files of a group by its index, or by name if the index does not list them; None if it has none."""
    index_name = f"{stem}.safetensors.index.json"
    where = f"{folder.path}/{index_name}"
    index = _index(folder, index_name, where) if index_name in folder.files else {}
    if "weight_map" in index:
        names = _listed(folder, index["weight_map"], where)
    else:
        names = sorted((name for name in folder.files if stem_of(name) == stem), key=natural_key)
        _check_parts(names, index.get("optim_shard_num", 1), where)
    return GroupFiles(tuple(names), index) if names else None


def _index(folder: Folder, name: str, where: str) -> dict[str, Any]:
    index = strictjson.loads(folder.read(name, limits.JSON_BYTES), where)
    if not isinstance(index, dict):
        raise Damaged(f"{where}: the index is not a JSON object")
    stage = index.get("ckpt_quant_stage", "O0")
    if stage != "O0":
        raise Unsupported(f"{where}: the moments are quantized (ckpt_quant_stage {str(stage)[:40]!r}); {_QUANTIZED}")
    return index


def _listed(folder: Folder, weight_map: Any, where: str) -> list[str]:
    if not isinstance(weight_map, dict):
        raise Damaged(f"{where}: the weight_map is not a JSON object")
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str):
            raise Damaged(f"{where}: a key is not mapped to a file name")
        names.add(name)
    for name in names:
        check_file(name, where)
        if name not in folder.files:
            raise Damaged(f"{where} names {name}, which is missing")
    return sorted(names, key=natural_key)


def _check_parts(names: list[str], count: Any, where: str) -> None:
    """Check that every rank's optimizer written in several parts is complete."""
    if type(count) is not int or count < 1:
        raise Damaged(f"{where}: optim_shard_num is {str(count)[:40]!r}, not a count")
    parts: dict[str, set[int]] = {}
    for name in names:
        match = _FILE.fullmatch(name)
        if match and match["part"]:
            parts.setdefault(name.rpartition("_shard_")[0], set()).add(int(match["part"]))
    for name, found in parts.items():
        if len(found) != count or max(found) != count:
            raise Damaged(f"{where}: expected {count} parts of {name}, found {len(found)}: {sorted(found)[:20]}")


def true_dtype(dtype: DType) -> DType:
    """Return the actual dtype: Paddle has no uint16 and uses it for the bits of bfloat16."""
    return dtype_named("bfloat16") if dtype.name == "uint16" else dtype


def true_places(folder: Folder, name: str) -> list[Place]:
    """Return the tensors of a safetensors file; raw bits of bfloat16 get that dtype."""
    return [
        replace(place, spec=replace(place.spec, dtype=true_dtype(place.spec.dtype)))
        for place in safetensors_places(folder, name)
    ]


def saved_for_torch(folder: Folder, name: str) -> bool:
    """Return True if a file is marked as written in torch's layout, as by PaddleFormers' save_to_hf."""
    where = f"{folder.path}/{name}"
    size = header_bytes(folder.read_begin(name, LENGTH_BYTES), folder.files[name], where)
    fields = strictjson.loads(folder.read_begin(name, size)[LENGTH_BYTES:].rstrip(b" "), f"{where}: header")
    metadata = fields.get("__metadata__") if isinstance(fields, dict) else None
    return isinstance(metadata, dict) and metadata.get("format") == "pt"


def places_by_key(places: Iterable[Place], index: Mapping[str, Any], what: str) -> dict[str, Place]:
    """Return the tensors of a group's files. Raises Damaged for a duplicate or a tensor not where the index says."""
    out: dict[str, Place] = {}
    for place in places:
        other = out.setdefault(place.spec.key, place)
        if other is not place:
            raise Damaged(f"{what}: {place.spec.key!r} is in {other.file} and in {place.file}")
        if _SCALES.search(place.spec.key):
            raise Unsupported(f"{what}: {place.spec.key!r} shows that the moments are quantized; {_QUANTIZED}")
    for key, file in index.get("weight_map", {}).items():
        if key not in out or out[key].file != file:
            raise Damaged(f"{what}: the index lists {key[:80]!r} in {file}, but it is not there")
    return out
