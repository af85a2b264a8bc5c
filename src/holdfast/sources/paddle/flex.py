"""Read Paddle's flex checkpoint: whole tensors from parts in `*.distcp` files, grouped by folder or path.

PaddleFormers writes separate folders for the model, the optimizer and the master weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from holdfast.core.errors import Damaged, LayoutError
from holdfast.core.names import is_plain
from holdfast.layout.box import Box, flat_boxes
from holdfast.plan.contents import Contents
from holdfast.plan.coverage import cells_of
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe, Term
from holdfast.sources.dcp.chunks import fills
from holdfast.sources.foreign import Folder, ReaderResult
from holdfast.sources.paddle.flex_metadata import FlexMetadata, FlexPiece, read_metadata
from holdfast.sources.paddle.pdparams_pickle import Arrays, table_of
from holdfast.sources.paddle.static_names import MASTERS, MODEL, OPTIMIZER, PaddleGroups, split_state
from holdfast.sources.paddle.unified_files import true_places
from holdfast.sources.trees.stored_blocks import stored_files

FORMAT = "paddle flex checkpoint"
_METADATA = re.compile(r"(?P<folder>(?:[^/]+/)?)(?P<id>[0-9]{1,18})\.metadata")
_FOLDERS = {
    "": "",
    "model_state/": MODEL,
    "optimizer_state/": OPTIMIZER,
    "master_weight/": MASTERS,
    "ema_state/": "ema",
}
_PICKLE = b"\x80"
_MASTER_SUFFIX = ".w_0"
_OVERLAPPING = 256  # splitting overlapping parts takes quadratic time

Part = tuple[Box, Recipe[Place]]


@dataclass(frozen=True, slots=True)
class FlexFiles:
    """The tensors of the data files, by file and key, and Paddle's names of their parameters."""

    arrays: Arrays
    tensors: dict[str, dict[str, Recipe[Place]]]
    names: dict[str, str]  # Paddle's numbered parameter names, by key


def read_flex(folder: Folder) -> ReaderResult | None:
    """Return the contents of a flex checkpoint; None for a folder without flex metadata."""
    newest: dict[str, int] = {}
    for name in folder.files if folder.only is None else ():
        match = _METADATA.fullmatch(name)
        if match and match["folder"] in _FOLDERS:
            newest[match["folder"]] = max(int(match["id"]), newest.get(match["folder"], 0))
    if not newest:
        return None
    stored, collected = FlexFiles(Arrays(folder), {}, {}), PaddleGroups()
    every = {sub: _read_part(folder, f"{sub}{number}.metadata", stored) for sub, number in newest.items()}
    for sub in sorted(every, key=lambda sub: _FOLDERS[sub] != MODEL):
        tensors, metadata = every[sub]
        for group, members in _grouped(tensors, metadata.paths, _FOLDERS[sub], f"{folder.path}/{sub}").items():
            _sort(collected, group, members, stored.names, f"{folder.path}/{sub}")
    groups = collected.groups()
    contents = Contents(groups, stored_files(groups.values(), folder.path), collected.state)
    read = frozenset({*stored.tensors, *(f"{sub}{number}.metadata" for sub, number in newest.items())})
    return ReaderResult(
        FORMAT, contents, stored.arrays.made, tuple(collected.notes), read=read, linear_weights="in-out"
    )


def _read_part(folder: Folder, name: str, stored: FlexFiles) -> tuple[dict[str, Recipe[Place]], FlexMetadata]:
    """Return the whole tensors of one metadata file."""
    where = f"{folder.path}/{name}"
    metadata = read_metadata(folder, name)
    tensors = {}
    for key, shape in metadata.shapes.items():
        parts = [part for piece in metadata.pieces[key] for part in _parts(folder, stored, key, piece, where)]
        tensors[key] = _whole(shape, parts, f"{where}: {key!r}")
    return tensors, metadata


def _parts(folder: Folder, stored: FlexFiles, key: str, piece: FlexPiece, where: str) -> Iterator[Part]:
    """Yield the contents of a piece as boxes of the whole tensor, each one contiguous run of its file."""
    recipe = _tensors_of(folder, stored, piece.file).get(key)
    if recipe is None:
        raise Damaged(f"{where}: {piece.file} does not hold {key[:80]!r}")
    if piece.dtype is not None and piece.dtype is not recipe.dtype:
        raise Damaged(f"{where}: {key[:80]!r} is {recipe.dtype.name} in {piece.file}, expected {piece.dtype.name}")
    if piece.run is None:
        if recipe.shape != piece.box.sizes:
            raise Damaged(
                f"{where}: {key[:80]!r} is {list(recipe.shape)} in {piece.file}, expected {list(piece.box.sizes)}"
            )
        yield piece.box, recipe
        return
    start, stop = piece.run
    if not 0 <= start <= stop <= piece.box.volume or recipe.shape != (stop - start,):
        raise Damaged(
            f"{where}: {key[:80]!r} has {list(recipe.shape)} elements in {piece.file}, expected [{start}:{stop}]"
        )
    for box in flat_boxes(piece.box.sizes, start, stop):
        part = stored.arrays.part(recipe, box.flat_offset(piece.box.sizes) - start, box.sizes)
        yield Box(tuple(a + b for a, b in zip(box.offsets, piece.box.offsets, strict=True)), box.sizes), part


def _tensors_of(folder: Folder, stored: FlexFiles, name: str) -> dict[str, Recipe[Place]]:
    """Read the tensors of a data file on first use: a pickle or safetensors."""
    if name in stored.tensors:
        return stored.tensors[name]
    if name not in folder.files:
        raise Damaged(f"{folder.path}/{name}: the metadata names this file, but it is missing")
    if folder.read_begin(name, 1) == _PICKLE:
        value = stored.arrays.read(name)
        stored.names.update(table_of(value))
        found = {key: item for key, item in value.items() if isinstance(item, Recipe)}
    else:
        places = true_places(folder, name)
        found = {place.spec.key: Recipe.whole(place, place.spec.shape, place.spec.dtype) for place in places}
    return stored.tensors.setdefault(name, found)


def _whole(shape: tuple[int, ...], parts: list[Part], what: str) -> Recipe[Place]:
    """Build a tensor from parts that may overlap. Raises Damaged for a gap."""
    dtypes = {recipe.dtype for _, recipe in parts}
    if len(dtypes) != 1:
        raise Damaged(f"{what}: its parts have {len(dtypes)} dtypes, expected one")
    distinct = dict(reversed(parts))
    terms: list[Term[Place]] = []
    for cell, (box, recipe) in _cells(shape, list(distinct.items()), what):
        for term in recipe.overlapping(cell.relative_to(box)):
            offsets = tuple(a + b for a, b in zip(term.box.offsets, box.offsets, strict=True))
            terms.append(replace(term, box=Box(offsets, term.box.sizes)))
    return Recipe(shape, dtypes.pop(), tuple(terms))


def _cells(shape: tuple[int, ...], parts: list[Part], what: str) -> Iterator[tuple[Box, Part]]:
    """Yield boxes that cover a shape once, each with a part that contains it."""
    boxes = [box for box, _ in parts]
    if fills(boxes, shape):
        yield from zip(boxes, parts, strict=True)
        return
    if len(parts) > _OVERLAPPING:
        raise Damaged(f"{what}: its {len(parts)} parts do not cover its shape {list(shape)} exactly once")
    try:
        cells = cells_of(shape, boxes, what)
    except LayoutError as error:
        raise Damaged(str(error)) from None
    yield from ((cell.box, parts[cell.holders[0]]) for cell in cells)


def _grouped(
    tensors: Mapping[str, Recipe[Place]], paths: Mapping[str, tuple[str, ...]], group: str, where: str
) -> dict[str, dict[str, Recipe[Place]]]:
    """Group tensors by their folder, else by the first name of their path, else by their keys."""
    out: dict[str, dict[str, Recipe[Place]]] = {}
    for key, recipe in tensors.items():
        path = paths.get(key, (key,))
        owner, name = group or MODEL, key
        if not group and len(path) > 1 and is_plain(path[0]):
            owner, name = path[0], ".".join(path[1:])
        elif not group and split_state(key):
            owner = OPTIMIZER
        elif not group and key.endswith(_MASTER_SUFFIX) and key.removesuffix(_MASTER_SUFFIX) in tensors:
            owner = MASTERS
        if out.setdefault(owner, {}).setdefault(name, recipe) is not recipe:
            raise Damaged(f"{where}: two tensors of {owner} have the key {name[:80]!r}, one of them {key[:80]!r}")
    return dict(sorted(out.items(), key=lambda item: item[0] != MODEL))


def _sort(
    collected: PaddleGroups, group: str, tensors: Mapping[str, Recipe[Place]], names: Mapping[str, str], where: str
) -> None:
    if group == MODEL:
        collected.add_model(tensors, where)
        collected.add_names(names)
    elif group == OPTIMIZER:
        collected.add_optimizer(tensors, where)
    elif group == MASTERS:
        collected.add_masters({key.removesuffix(_MASTER_SUFFIX): recipe for key, recipe in tensors.items()}, where)
    else:
        collected.add_tensors(group, tensors, where)
