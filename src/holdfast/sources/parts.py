"""Files and folders that are one shard of a model, from a TP or pipeline rank: detected, noted or rejected.

Such a file can be opened, because a rank may load its own shard. It is marked as partial and is not converted.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.trees.leaf import TensorLeaf

_RANK = re.compile(
    r"(?i)(?P<head>(?:.*[._-])?(?:rank|mp_rank|tp|mp|pp|ep|dp|fsdp|shard|part|consolidated|device|gpu)[._-]?)"
    r"(?P<number>[0-9]{1,5})(?P<tail>(?![0-9]).*)"
)
_OF = re.compile(r".*?-?(?P<number>[0-9]{1,6})-?of-?(?P<count>[0-9]{1,6})(?![0-9]).*")
_MEGATRON_FOLDER = re.compile(r"(?:.*/)?mp_rank_[0-9]+(?:_[0-9]+)*")
_MEGATRON_FILE = re.compile(r"(?P<folder>mp_rank_[0-9]+(?:_[0-9]+)*)/(?:model_optim_rng|model_rng|distrib_optim)\.pt")
_DEGREES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "model_parallel_size",
    "expert_model_parallel_size",
)
_FLAT = re.compile(r"(?:.*\.)?_?flat_param(?:_[0-9]+)?")
_JOIN_MEGATRON = (
    "let Megatron join them: run its command with --ckpt-convert-format torch_dist --ckpt-convert-save FOLDER, or its "
    "tools/checkpoint/convert.py"
)


def part_by_name(folder: Folder) -> str | None:
    """Return why a single file is a shard of a model, by its name and neighbors; None if nothing suggests it."""
    if folder.only is None:
        return None
    numbered = _OF.fullmatch(folder.only)
    if numbered is not None and int(numbered["count"]) > 1:
        return (
            f"by its name, file {int(numbered['number'])} of {int(numbered['count'])} of a model: open the folder to "
            "read all of it; if it is a whole model, copy it under another name"
        )
    match = _RANK.fullmatch(folder.only)
    if match is None:
        return None
    others = _rank_siblings(match, folder.pin.files())
    if len(others) < 2:
        return None
    return (
        f"one of {len(others)} files that differ in a rank number, {', '.join(others[:4])}: shards of a model; only "
        "the code that wrote them can merge them; if it is a whole model, copy it under another name"
    )


def _rank_siblings(match: re.Match[str], names: Collection[str]) -> list[str]:
    """Return the names that differ from a match only in the rank number."""
    found = ((name, _RANK.fullmatch(name)) for name in names)
    return sorted(n for n, other in found if other and (other["head"], other["tail"]) == (match["head"], match["tail"]))


def part_by_content(tree: Any) -> str | None:
    """Return why the tree of a torch.save file is a shard of a model; None if nothing suggests it."""
    if not isinstance(tree, dict):
        return None
    options = tree.get("args")
    degrees = options if isinstance(options, dict) else {}
    for name in _DEGREES:
        if type(degrees.get(name)) is int and degrees[name] > 1:
            return f"the shard of one Megatron rank, whose {name} is {degrees[name]}; {_JOIN_MEGATRON}"
    flat = _flat_parameter(tree)
    if flat is not None:
        return (
            f"a shard of one FSDP rank, with the flat parameter {flat[:80]!r}; save a full state dict, or use "
            "torch.distributed.checkpoint"
        )
    return None


def _flat_parameter(tree: Mapping[Any, Any]) -> str | None:
    for value in (
        tree,
        *(tree[name] for name in ("model", "state_dict", "module", "model_state_dict") if name in tree),
    ):
        if isinstance(value, dict):
            for key, item in value.items():
                if (
                    isinstance(key, str)
                    and _FLAT.fullmatch(key)
                    and isinstance(item, TensorLeaf)
                    and len(item.shape) == 1
                ):
                    return key
    return None


def reject_megatron_folder(folder: Folder) -> None:
    """Raise Unsupported for a folder of Megatron rank files in which nothing else could be read."""
    ranks = sorted({match["folder"] for name in folder.files if (match := _MEGATRON_FILE.fullmatch(name))})
    if ranks:
        one = f"; for a run without model parallelism, open {ranks[0]}/model_optim_rng.pt" if len(ranks) == 1 else ""
        raise Unsupported(
            f"{folder.path}: a Megatron checkpoint with the shards of ranks in {', '.join(ranks[:4])}; "
            f"{_JOIN_MEGATRON}{one}"
        )


def note_partial(folder: Folder, result: ReaderResult) -> ReaderResult:
    """Return a reader's result, with a note if it is only a shard of a model."""
    partial = result.partial or part_by_name(folder) or _megatron_rank(folder)
    if partial is None:
        return result
    where = f"{folder.path}/{folder.only}" if folder.only else folder.path
    return replace(result, partial=partial, notes=(*result.notes, f"{where}: {partial}"))


def _megatron_rank(folder: Folder) -> str | None:
    """Return why a folder `mp_rank_XX` is a shard of a model, by its sibling folders; None if it has none."""
    if not _MEGATRON_FOLDER.fullmatch(folder.path) or "://" in folder.path:
        return None
    ranks = sorted(path.name for path in Path(folder.path).parent.iterdir() if _MEGATRON_FOLDER.fullmatch(path.name))
    if len(ranks) < 2:
        return None
    return f"the shard of one of {len(ranks)} Megatron ranks, {', '.join(ranks[:4])}; {_JOIN_MEGATRON}"
