"""Damage to the bytes of a checkpoint: all of it is found by `verify` and by reading, and nothing else is.

What is damaged is a small checkpoint of several files and blocks, in memory: the file system
would only make it slower. A sample of each kind is done to real folders, where `restore` falls back.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core import names
from holdfast.core.names import step_folder
from holdfast.storage.memory import MemoryStorage
from tests.faults.cases import BLOCK_BYTES, DEADLINE_S, Lost, Wrong, chance, fresh_root, run_cases
from tests.faults.row import Row, Tally

DAMAGE = "truncated files; bit flips; zeroed and swapped pages; files swapped between steps"
FALLBACK = "restore falls back from a damaged step"
DATA_BITS, SAMPLE = 1000, 25
PAGE = 4096
FOLDER = "it"


@dataclass(frozen=True, slots=True)
class Hurt:
    """One damage: the file, its new bytes (None if it is gone), and where they differ."""

    what: str
    file: str
    data: bytes | None
    begin: int
    end: int


def state_of_step(step: int) -> dict[str, Any]:
    """Tensors of different sizes in two groups, one of them in two files, and values."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"layer{number}": torch.randn(60 + 900 * number, generator=generator) for number in range(4)}
    return {"w": weights, "other": {"v": torch.arange(30) + step}, "note": {"step": step}}


class Sound:
    """The undamaged checkpoint: its files, and every tensor of it."""

    def __init__(self, folder: Path) -> None:
        self.files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        checkpoint = holdfast.open(folder)
        self.tensors = {
            (group, key): checkpoint.read(key, group) for group in checkpoint.groups for key in checkpoint.keys(group)
        }
        self.manifest = checkpoint.manifest
        self.places = checkpoint.places

    def headers(self) -> dict[str, int]:
        records = self.manifest.files.items()
        return {name: record.header.size for name, record in records if record.header is not None}

    def touched(self, hurt: Hurt) -> set[tuple[str, str]]:
        """The tensors that a reader must refuse: in a hurt block, or in a file that cannot be trusted at all."""
        whole = hurt.data is None or len(hurt.data) != len(self.files[hurt.file])
        whole = whole or hurt.begin < self.headers().get(hurt.file, 0)
        blocks = [
            b for b in self.manifest.files[hurt.file].blocks if b.offset < hurt.end and hurt.begin < b.offset + b.size
        ]
        begin, end = (blocks[0].offset, blocks[-1].offset + blocks[-1].size) if blocks else (0, 0)
        return {
            (group, key)
            for group, members in self.places.items()
            for key, place in members.items()
            if place.file == hurt.file and (whole or (place.begin < end and begin < place.end))
        }


def flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def bit_flips(sound: Sound, seed: int) -> Iterator[Hurt]:
    """Every bit of the manifest and of all headers, and some of the data and of the other JSON files."""
    headers = sound.headers()
    for name, size in {names.MANIFEST: len(sound.files[names.MANIFEST]), **headers}.items():
        for bit in range(8 * size):
            yield Hurt(f"bit {bit} of {name}", name, flip(sound.files[name], bit), bit // 8, bit // 8 + 1)
    random = chance(seed, DAMAGE, "bits")
    rest = [name for name in sound.files if name != names.MANIFEST]
    data_bits = [(name, 8 * headers.get(name, 0), 8 * len(sound.files[name])) for name in rest]
    for _ in range(DATA_BITS):
        name, first, last = random.choices(data_bits, [last - first for _, first, last in data_bits])[0]
        bit = random.randrange(first, last)
        yield Hurt(f"bit {bit} of {name}", name, flip(sound.files[name], bit), bit // 8, bit // 8 + 1)


def truncations(sound: Sound, seed: int) -> Iterator[Hurt]:
    random = chance(seed, DAMAGE, "ends")
    for name, data in sound.files.items():
        yield Hurt(f"{name} is gone", name, None, 0, len(data))
        yield Hurt(f"{name} is longer", name, data + b"\0", len(data), len(data) + 1)
        for size in {0, 1, 7, 8, len(data) - 1, *(random.randrange(len(data)) for _ in range(40))}:
            if size < len(data):
                yield Hurt(f"{name} has {size} bytes", name, data[:size], size, len(data))


def page_faults(sound: Sound) -> Iterator[Hurt]:
    """Pages of zeros, pages of the page before, and two pages that have changed places."""
    for name, data in sound.files.items():
        pages = [data[at : at + PAGE] for at in range(0, len(data), PAGE)]
        for number, page in enumerate(pages):
            at = number * PAGE
            yield Hurt(f"page {number} of {name} is zero", name, _with(data, at, bytes(len(page))), at, at + len(page))
            if number and len(page) == PAGE:
                yield Hurt(f"page {number} of {name} is stale", name, _with(data, at, pages[number - 1]), at, at + PAGE)
                swapped = _with(_with(data, at, pages[number - 1]), at - PAGE, page)
                yield Hurt(
                    f"pages {number - 1} and {number} of {name} are swapped", name, swapped, at - PAGE, at + PAGE
                )


def _with(data: bytes, at: int, page: bytes) -> bytes:
    return data[:at] + page + data[at + len(page) :]


def foreign_files(sound: Sound, others: list[Sound]) -> Iterator[Hurt]:
    """Files of another step under the same name."""
    for number, other in enumerate(others):
        for name, data in sound.files.items():
            if other.files.get(name, data) != data and name != names.MANIFEST:
                yield Hurt(f"{name} is of step {number + 2}", name, other.files[name], 0, len(data))


def examine(sound: Sound, hurt: Hurt) -> None:
    """Raise Wrong if damage is not found, Lost if what is untouched cannot be read."""
    if hurt.data == sound.files[hurt.file]:
        return
    storage = MemoryStorage("damaged")
    files = {**sound.files, hurt.file: hurt.data}
    storage.begin(FOLDER)
    for name, data in files.items():
        if data is not None:
            storage.put(FOLDER, name, data)
    try:
        checkpoint = Checkpoint(storage, FOLDER)
    except (holdfast.Damaged, holdfast.NotFound, holdfast.Unsupported):
        if hurt.file != names.MANIFEST:
            raise
        return
    if hurt.file == names.MANIFEST:
        if hurt.data is None and checkpoint.step is None:
            return  # no checkpoint of any step: a folder of weights, as others write them
        raise Wrong(f"{hurt.what}: the manifest was taken for good")
    report = checkpoint.verify()
    if report.good:
        raise Wrong(f"{hurt.what}: verify found nothing")
    if {damage.file for damage in report.damage} != {hurt.file}:
        raise Wrong(f"{hurt.what}: verify named {report.damage}")
    _read_all(checkpoint, sound, hurt)


def _read_all(checkpoint: Checkpoint, sound: Sound, hurt: Hurt) -> None:
    touched = sound.touched(hurt) if hurt.file in sound.headers() else set()
    for group, key in sound.tensors:
        try:
            array = checkpoint.read(key, group)
        except holdfast.Damaged:
            if (group, key) not in touched:
                raise Lost(f"{hurt.what}: {group}/{key} is untouched, and was refused") from None
            continue
        if (group, key) in touched:
            raise Wrong(f"{hurt.what}: {group}/{key} was read without an error")
        if not np.array_equal(array, sound.tensors[group, key]):
            raise Wrong(f"{hurt.what}: {group}/{key} has wrong bytes")
    try:
        checkpoint.value("note")
    except holdfast.Damaged:
        if hurt.file != names.STATE:
            raise Lost(f"{hurt.what}: the values are untouched, and were refused") from None
    else:
        if hurt.file == names.STATE:
            raise Wrong(f"{hurt.what}: values were read without an error")


def all_hurts(sounds: list[Sound], seed: int) -> Iterator[Hurt]:
    sound = sounds[0]
    yield from bit_flips(sound, seed)
    yield from truncations(sound, seed)
    yield from page_faults(sound)
    yield from foreign_files(sound, sounds[1:])


def _save_steps(root: Path, count: int) -> list[Path]:
    paths = [root / step_folder(step) for step in range(1, count + 1)]
    for step, path in enumerate(paths, 1):
        holdfast.save(path, state_of_step(step), step=step, block_bytes=BLOCK_BYTES, max_shard_size=12_000)
    return paths


def damage(seed: int, every: int = 1) -> Tally:
    """All damage there is, or one in `every` of it."""
    with fresh_root() as root:
        sounds = [Sound(path) for path in _save_steps(root, 4)]
    hurts = list(all_hurts(sounds, seed))[::every]
    return run_cases(DAMAGE, seed, [(hurt.what, partial(examine, sounds[0], hurt)) for hurt in hurts])


def fall_back(root: Path, sound: Sound, hurt: Hurt) -> None:
    """Step 2 is hurt: what it holds is refused, what is untouched still loads, `restore` takes step 1."""
    path = root / step_folder(2)
    kept = path.with_name("kept")
    shutil.copytree(path, kept)
    try:
        if hurt.data is None:
            (path / hurt.file).unlink()
        else:
            (path / hurt.file).write_bytes(hurt.data)
        if hurt.file != names.MANIFEST:
            _load_parts(path, sound, hurt)
        _restore(root, must_fall=hurt.file in (names.MANIFEST, names.STATE) or bool(sound.touched(hurt)))
    finally:
        shutil.rmtree(path)
        kept.rename(path)


def _load_parts(path: Path, sound: Sound, hurt: Hurt) -> None:
    """`load` of some of the tensors: those that are hurt are refused, the others are right."""
    touched = sound.touched(hurt) if hurt.file in sound.headers() else set()
    for key in ("layer0", "layer1", "layer2", "layer3"):
        live = state_of_step(0)["w"]
        try:
            holdfast.load(path, {"w": live}, only=[key], strict=False)
        except holdfast.Damaged:
            if ("w", key) not in touched and hurt.file != names.STATE:  # which says what the tensors belong to
                raise Lost(f"{key} is untouched, and was refused") from None
        else:
            if ("w", key) in touched or not np.array_equal(live[key].numpy(), sound.tensors["w", key]):
                raise Wrong(f"{key} was loaded without an error")


def _restore(root: Path, must_fall: bool) -> None:
    live = state_of_step(0)
    with holdfast.Checkpointer(root, deadline_s=DEADLINE_S, block_bytes=BLOCK_BYTES) as checkpointer:
        found = checkpointer.restore(live)
    if found not in (1, 2) or (must_fall and found != 1):
        raise Wrong(f"restored step {found}")
    expected = state_of_step(found)["w"]
    if not all(torch.equal(live["w"][key], expected[key]) for key in expected) or live["note"] != {"step": found}:
        raise Wrong(f"step {found} was restored with wrong bytes")


def fallback(seed: int, count: int = SAMPLE) -> Tally:
    with fresh_root() as root:
        _save_steps(root, 2)
        sound = Sound(root / step_folder(2))
        hurts = list(all_hurts([sound], seed))
        named = [hurt for hurt in hurts if hurt.data is None]
        chosen = named + chance(seed, FALLBACK).sample(hurts, max(1, count - len(named)))
        cases = [(hurt.what, partial(fall_back, root, sound, hurt)) for hurt in chosen[:count]]
        return run_cases(FALLBACK, seed, cases)


ROWS = (Row(DAMAGE, damage, counted=False), Row(FALLBACK, fallback, counted=False))
