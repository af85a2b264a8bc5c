"""Layouts of a tensor under a mesh: the holders of its parts, the writers of its blocks, the reads of a restore.

The mesh is a thought: any one can be asked for. Parts follow from the key, as `holdfast size` places them; blocks
and reads are those of the plans that a save and a restore on that mesh make.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint.reading import PORTION_BYTES
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.core.limits import GB
from holdfast.format.dtypes import dtype_named
from holdfast.layout.placement import OnMesh, Replicate, Shard, StridedShard
from holdfast.plan.coverage import Holdings
from holdfast.plan.files import FilePlan, Place, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile, Want, plan_load
from holdfast.plan.save_plan import plan_save
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.placement_rules import PlacementRules
from holdfast.sizes.run_shape import RunShape
from holdfast.sizes.run_spreads import RunSpreads, TensorSpreads
from holdfast.web.open_steps import OpenStep
from holdfast.web.tensor_index import StepTensor

_MOST_RANKS = 1024
_MOST_BLOCKS = 512
_MOST_BYTES = 64 * GB  # of one tensor
_MESH = re.compile(r"[a-z_]{1,16}:[0-9]{1,6}(?:,[a-z_]{1,16}:[0-9]{1,6})*")
_AXES = {
    **dict.fromkeys(("dp", "ddp", "data", "dp_replicate", "replicate", "rank"), "dp"),
    **dict.fromkeys(("fsdp", "dp_shard", "shard", "dp_shard_cp"), "fsdp"),
    **dict.fromkeys(("tp", "tensor", "mp"), "tp"),
    **dict.fromkeys(("pp", "pipe", "stage"), "pp"),
    **dict.fromkeys(("ep", "expert"), "ep"),
}


def parse_mesh(text: str) -> RunShape:
    """Return the shape of a run from "dp:2,tp:2"; raises InvalidArgument.

    `fsdp` (or `dp_shard`) shards every parameter over its ranks, as FSDP2 does; `dp` replicates.
    """
    if not _MESH.fullmatch(text):
        raise InvalidArgument(f"mesh={text[:80]!r}: write it as dp:2,tp:2; the axes are dp, fsdp, tp, pp and ep")
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition(":")
        if name not in _AXES:
            raise InvalidArgument(f"mesh={text[:80]!r}: the axes are dp, fsdp, tp, pp and ep, not {name!r}")
        sizes[_AXES[name]] = sizes.get(_AXES[name], 1) * int(size)
    if sizes.get("dp", 1) > 1 and sizes.get("fsdp", 1) > 1:
        raise InvalidArgument("dp and fsdp together are not drawn: give one of them")
    shape = RunShape(
        dp=sizes.get("fsdp", sizes.get("dp", 1)),
        tp=sizes.get("tp", 1),
        pp=sizes.get("pp", 1),
        ep=sizes.get("ep", 1),
        zero=3 if "fsdp" in sizes else 0,
    )
    if shape.world > _MOST_RANKS:
        raise InvalidArgument(f"mesh={text[:80]!r} has {shape.world} ranks; at most {_MOST_RANKS} are drawn")
    return shape


def mesh_text(axes: Mapping[str, int] | None) -> str:
    """Return a mesh that wrote a step in the form that `parse_mesh` reads, or that of one rank."""
    known = {name: size for name, size in (axes or {}).items() if name in _AXES and size > 0}
    return ",".join(f"{name}:{size}" for name, size in known.items()) or "dp:1"


def layout_fields(opened: OpenStep, group: str, key: str, mesh: str) -> dict[str, Any]:
    """Return the boxes of a tensor under a mesh, the writers of its blocks and the reads of a restore."""
    shape = parse_mesh(mesh)
    tensor = opened.tensor(group, key)
    if tensor.bytes > _MOST_BYTES:
        raise Unsupported(f"{key} has {tensor.bytes} bytes, too many to draw")
    spread = _spreads(opened, group, tensor, shape)
    held = [(rank, box) for rank, box in spread.parameter.boxes(tensor.shape) if box.volume or not tensor.bytes]
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for rank, box in held:
        by_box.setdefault((box.offsets, box.sizes), []).append(rank)
    place, stored = _place(opened, tensor)
    return {
        "mesh": mesh,
        "axes": {"pp": shape.pp, "fsdp" if shape.zero else "dp": shape.dp, "tp": shape.tp, "ep": shape.ep},
        "ranks": shape.world,
        "shape": list(tensor.shape),
        "dtype": tensor.dtype,
        "bytes": tensor.bytes,
        "boxes": [
            {"ranks": ranks, "offsets": list(offsets), "sizes": list(sizes)}
            for (offsets, sizes), ranks in sorted(by_box.items())
        ],
        "placements": _placements(spread),
        "files": _writers(place, stored, spread, shape) if place is not None else [],
        "restore": _restore(place, stored, spread) if place is not None else [],
        "restore_note": "A rank reads whole blocks, to check their digests: block_bytes, with tensors beside this one.",
    }


def _spreads(opened: OpenStep, group: str, tensor: StepTensor, shape: RunShape) -> TensorSpreads:
    """Place a tensor by its key. A state of an optimizer is placed as its parameter is."""
    index = opened.index(group)
    kind = opened.checkpoint.manifest.groups[group].kind
    keys = index.keys if kind != "optimizer" else [key.rpartition("/")[0] or key for key in index.keys]
    all_tensors = [_model_tensor(key, index.at(number)) for number, key in enumerate(keys)]
    key = tensor.key if kind != "optimizer" else tensor.key.rpartition("/")[0] or tensor.key
    rules = PlacementRules(all_tensors, opened.checkpoint.manifest.groups[group].aliases, shape)
    one = _model_tensor(key, tensor)
    return RunSpreads([one], rules, shape).of(one)


def _model_tensor(key: str, tensor: StepTensor) -> ModelTensor:
    logical = dtype_named(tensor.dtype)
    return ModelTensor(key, dtype_named(logical.stored), logical, tensor.shape)


def _place(opened: OpenStep, tensor: StepTensor) -> tuple[Place | None, list[StoredBlock]]:
    """Return where a tensor is stored, and the blocks that hold it; None if it is not stored as it is."""
    logical = dtype_named(tensor.dtype)
    if tensor.file is None or tensor.begin is None or logical.pair or not tensor.bytes:
        return None, []
    first, after = opened.blocks(tensor)
    if after - first > _MOST_BLOCKS:
        raise Unsupported(f"{tensor.key} is in {after - first} blocks, too many to draw")
    blocks = opened.checkpoint.manifest.files[tensor.file].blocks[first:after]
    stored = [StoredBlock(block.offset, block.size, block.digest) for block in blocks]
    place = Place(TensorSpec(tensor.key, dtype_named(logical.stored), tensor.shape), tensor.file, tensor.begin)
    return place, stored or [StoredBlock(tensor.begin, tensor.bytes, None)]


def _placements(spread: TensorSpreads) -> str:
    """Describe how the axes of the mesh hold the tensor."""
    texts = []
    for layout, ranks in spread.parameter.members:
        if isinstance(layout, OnMesh):
            parts = [
                f"{axis}: {_placement_text(placement)}"
                for axis, size, placement in zip(layout.mesh.axes, layout.mesh.sizes, layout.placements, strict=True)
                if size > 1
            ]
            texts.append(", ".join(parts) or "whole")
        else:
            texts.append(f"whole on {len(ranks)} rank{'s' if len(ranks) != 1 else ''}")
    return "; ".join(dict.fromkeys(texts))


def _placement_text(placement: object) -> str:
    match placement:
        case Replicate():
            return "replicated"
        case Shard(dim):
            return f"sharded along dim {dim}"
        case StridedShard(dim, factor):
            return f"sharded along dim {dim}, inside each of {factor} shards"
    raise AssertionError(placement)


def _writers(place: Place, stored: list[StoredBlock], spread: TensorSpreads, shape: RunShape) -> list[dict[str, Any]]:
    """Return the rank that writes each block, if a save on this mesh had this tensor alone in its blocks."""
    holding = Holdings().of(place.spec.shape, spread.parameter, place.spec.key)
    size = max(block.size for block in stored)
    file = FilePlan(place.file, 0, b"", stored[-1].offset + stored[-1].size, (place,))
    plan = plan_save([file], lambda _: holding, shape.hosts, max(1, size))
    return [
        {
            "file": block.file,
            "block": number,
            "begin": block.offset,
            "end": block.offset + block.size,
            "rank": block.owner,
        }
        for number, block in enumerate(block for block in plan.blocks if block.pieces)
    ][:_MOST_BLOCKS]


def _restore(place: Place, stored: list[StoredBlock], spread: TensorSpreads) -> list[dict[str, Any]]:
    """Return the bytes that each rank reads: a block is read once, verified, and shared with those that need it."""
    wants = [Want(place, box, rank) for rank, box in spread.parameter.boxes(place.spec.shape)]
    file = StoredFile(place.file, tuple(stored), (place,))
    by_rank: dict[int, list[dict[str, Any]]] = {want.rank: [] for want in wants}
    for read in plan_load([file], wants, verify=True, portion_bytes=PORTION_BYTES):
        begin, end = max(read.offset, place.begin), min(read.offset + read.size, place.end)
        block = {"block_begin": read.offset, "block_end": read.offset + read.size}
        by_rank[read.reader].append({"file": read.file, "begin": begin, "end": end, **block})
    held = {rank: sum(want.box.volume for want in wants if want.rank == rank) for rank in by_rank}
    return [
        {
            "rank": rank,
            "reads": reads[:_MOST_BLOCKS],
            "bytes": sum(one["end"] - one["begin"] for one in reads),
            "block_bytes": sum(one["block_end"] - one["block_begin"] for one in reads),
            "wants": held[rank] * place.spec.dtype.bytes,
        }
        for rank, reads in sorted(by_rank.items())
    ]


def default_key(opened: OpenStep, group: str) -> str:
    """Return a key to begin with: the first matrix of a group."""
    index = opened.index(group)
    for number in range(len(index)):
        tensor = index.at(number)
        if len(tensor.shape) > 1:
            return tensor.key
    if not len(index):
        raise NotFound(f"the group {group} has no tensors")
    return index.at(0).key
