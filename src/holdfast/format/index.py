"""The index of a group: the file of each key, in the format of transformers."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from typing import Any

from holdfast.core.errors import Damaged
from holdfast.core.filenames import check_case_collisions, check_file
from holdfast.format import strictjson
from holdfast.format.names import key_problem


def encode_index(weight_map: Mapping[str, str], total_bytes: int, folder: str = "") -> bytes:
    """Encode an index: two spaces of indent, sorted keys, a newline at the end.

    An index in a subfolder (`folder` ends in a slash) names files relative to the subfolder.
    """
    names = {key: file.removeprefix(folder) for key, file in weight_map.items()}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": names}
    return (json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()


def decode_index(data: bytes, where: str, folder: str = "") -> dict[str, str]:
    """Return the weight map of an index in `folder`; raises Damaged for invalid keys or file names."""
    index: Any = strictjson.loads(data, where)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise Damaged(f"{where}: has no weight_map")
    for key, name in weight_map.items():
        problem = key_problem(key)
        if problem:
            raise Damaged(f"{where}: the key {key[:80]!r} {problem}")
        if not isinstance(name, str):
            raise Damaged(f"{where}: {key!r} is not mapped to a file name")
        check_file(name, where)
    check_case_collisions(set(weight_map.values()), where)
    return {key: folder + name for key, name in weight_map.items()}


def require_indexed(weight_map: Mapping[str, str], held: Mapping[str, Container[str]], where: str) -> None:
    """Raise Damaged if an index names a key that its file lacks; `held` has the keys of each file."""
    for key, name in weight_map.items():
        if key not in held[name]:
            raise Damaged(f"{where}: the index lists {key!r} in {name}, which has no such key")
