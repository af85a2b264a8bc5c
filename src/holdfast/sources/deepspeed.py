"""DeepSpeed ZeRO files: shards of single ranks, rejected by file name, content or empty weights.

ZeRO-3 leaves every weight of a model file empty, with shape (0,), and stores the elements in flat shards per rank.
Only DeepSpeed's own tools know how to merge them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.core.errors import Unsupported
from holdfast.plan.contents import Contents
from holdfast.sources.trees.leaf import TensorLeaf, dotted, leaves_of

_RANK_FILE = re.compile(
    r"(?:.*/)?(?:(?:bf16_|fp16_)?zero_pp_rank_[0-9]+_mp_rank_[0-9]+_(?:optim|model)_states"
    r"|layer_[0-9]+-model_[0-9]+-model_states|layer_[0-9]+_expert_[0-9]+_mp_rank_[0-9]+_(?:optim|model)_states"
    r"|expp_rank_[0-9]+_mp_rank_[0-9]+_optim_states)\.pt"
)
_MODEL_FILE = re.compile(r"(?:.*/)?mp_rank_[0-9]+_model_states\.pt")
_STEP_FOLDER = re.compile(r"(?P<folder>global_step[0-9]+(?:_universal)?)/.+")
_SIGNS = frozenset({"ds_version", "ds_config", "param_shapes", "zero_stage", "mp_world_size", "dp_world_size"})
_WEIGHT = re.compile(r"(?:.*[._])?(?:weight|bias)")
_WHAT_TO_DO = (
    "merge them with DeepSpeed: `python zero_to_fp32.py CHECKPOINT OUT` (the script is in the checkpoint's folder) "
    "writes a whole fp32 model, which Holdfast reads; ds_to_universal.py writes a universal checkpoint, from which "
    "DeepSpeed resumes with its optimizer on another layout"
)


def reject_rank_file(name: str, where: str) -> None:
    """Raise Unsupported for a single file whose name marks it as the shard of one DeepSpeed rank."""
    if _RANK_FILE.fullmatch(name):
        raise Unsupported(f"{where}: a DeepSpeed ZeRO file with one rank's shard of a state; {_WHAT_TO_DO}")


def reject_deepspeed_folder(names: Iterable[str], where: str) -> None:
    """Raise Unsupported for a DeepSpeed folder in which nothing else could be read."""
    found = sorted(names)
    inner = next((match["folder"] for name in found if (match := _STEP_FOLDER.fullmatch(name))), None)
    parts = [name for name in found if _RANK_FILE.fullmatch(name)]
    models = [name for name in found if _MODEL_FILE.fullmatch(name)]
    if not parts and not models and (inner is None or "latest" not in found):
        return
    what = f"in {inner}/" if inner else f"such as {(parts or models or found)[0]}"
    hint = ""
    if len(models) == 1 and not any("_model_states" in name for name in parts):
        hint = f"; the 16-bit weights alone can be read from {models[0]}: open that file"
    raise Unsupported(f"{where}: a DeepSpeed checkpoint with shards of ranks {what}; {_WHAT_TO_DO}{hint}")


def reject_sharded_content(tree: Any, where: str) -> None:
    """Raise Unsupported for a torch.save file of DeepSpeed that is a shard of a model or has empty weights."""
    if not isinstance(tree, dict) or not _SIGNS & tree.keys():
        return
    optimizer = tree.get("optimizer_state_dict")
    if (
        isinstance(optimizer, dict)
        and {"partition_count", "zero_stage", "single_partition_of_fp32_groups"} & optimizer.keys()
    ):
        raise Unsupported(f"{where}: a DeepSpeed ZeRO file with one rank's shard of an optimizer; {_WHAT_TO_DO}")
    world = tree.get("mp_world_size")
    if type(world) is int and world > 1:
        raise Unsupported(
            f"{where}: a DeepSpeed file with one of {world} tensor-parallel shards of a model; {_WHAT_TO_DO}"
        )
    module = tree.get("module")
    leaves = {dotted(path): leaf for path, leaf in leaves_of(module)} if isinstance(module, dict) else {}
    empty = _emptied(leaves, _shapes(tree.get("param_shapes")))
    if empty:
        raise Unsupported(
            f"{where}: a DeepSpeed ZeRO-3 model file: {len(empty)} of its {len(leaves)} tensors are empty, such as "
            f"{empty[0]!r}, and their elements are in the ranks' shards; {_WHAT_TO_DO}"
        )


def reject_empty_weights(contents: Contents, where: str) -> None:
    """Raise Unsupported for a model most of whose weights have shape (0,), as a save under ZeRO-3 leaves them."""
    for name, group in contents.groups.items():
        if group.kind != "module":
            continue
        weights = {key: recipe.shape for key, recipe in group.tensors.items() if _WEIGHT.fullmatch(key)}
        empty = [key for key, shape in weights.items() if shape == (0,)]
        if empty and 2 * len(empty) >= len(weights):
            raise Unsupported(
                f"{where}: {len(empty)} of {len(weights)} weights of {name} are empty, such as {empty[0]!r} of shape "
                f"(0,), as in a model saved under DeepSpeed ZeRO-3 without gathering; {_WHAT_TO_DO}"
            )


def _emptied(leaves: Mapping[str, TensorLeaf], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the keys of empty tensors that were not empty before ZeRO-3 sharded them."""
    empty = [key for key, leaf in leaves.items() if not math.prod(leaf.shape)]
    if shapes:
        return [key for key in empty if math.prod(shapes.get(key, (0,)))]
    return empty if 2 * len(empty) >= len(leaves) else []


def _shapes(value: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole parameters of all groups, as recorded by DeepSpeed."""
    groups = value if isinstance(value, list | tuple) else [value]
    return {
        key: shape
        for group in groups
        if isinstance(group, dict)
        for key, shape in group.items()
        if isinstance(key, str) and isinstance(shape, tuple) and all(type(size) is int for size in shape)
    }
