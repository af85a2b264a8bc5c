"""The catalog is for speed alone: with it, without it, torn or stale, the same steps are found."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from holdfast import keep
from holdfast.checkpoint import catalog_file, retention
from holdfast.checkpoint.catalog import Catalog, committed_steps, living_steps
from holdfast.checkpoint.lineage import LeftStep
from holdfast.checkpoint.retention import RetentionIndex
from holdfast.core.names import MANIFEST, step_folder
from holdfast.format.manifest import FileRecord, Manifest, encode_manifest
from holdfast.storage.base import Stamped
from holdfast.storage.local import LocalStorage

BASE = Manifest(None, None, "", "2026-11-16T18:00:00+00:00", 1 << 20, {}, {}, {"world": 1})


class Counting(LocalStorage):
    """Local files, with a count of the manifests that were read for the catalog."""

    reads = 0

    def read_stamped(self, folder: str, limit_bytes: int) -> Stamped:
        self.reads += 1
        return super().read_stamped(folder, limit_bytes)


def commit(
    root: Path,
    step: int,
    number: int = 0,
    *,
    abandons: tuple[LeftStep, ...] = (),
    skips: tuple[LeftStep, ...] = (),
    times: Mapping[str, float] | None = None,
    **metrics: float,
) -> str:
    """A step without tensors, published as a save publishes it."""
    storage = LocalStorage(root)
    attempt = f".attempt-{step:08x}{number:08x}"
    storage.begin(attempt)
    writer = dict(BASE.writer) | dict(times or {})
    made = replace(BASE, step=step, attempt=attempt, writer=writer, metrics=metrics, abandons=abandons, skips=skips)
    storage.put(attempt, MANIFEST, encode_manifest(made))
    storage.publish(attempt, step_folder(step))
    return attempt


def settle(root: Path) -> None:
    """Date every manifest back, so that none was written a moment ago."""
    long_ago = 1_700_000_000
    for path in root.glob(f"*step-*/{MANIFEST}"):
        os.utime(path, (long_ago, long_ago))


def write_catalog(root: Path) -> None:
    catalog = Catalog(LocalStorage(root))
    catalog.scan()
    catalog.write()


@contextmanager
def without_catalog(root: Path) -> Iterator[Path]:
    """The same steps, known by their manifests alone."""
    plain = root.with_name(f"{root.name}-plain")
    shutil.copytree(root, plain, symlinks=True)
    shutil.rmtree(plain / catalog_file.FOLDER, ignore_errors=True)
    try:
        yield plain
    finally:
        shutil.rmtree(plain)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root with 30 steps whose stamps are settled."""
    monkeypatch.setattr("holdfast.storage.stamps._TICK_NS", 0)
    for step in range(1, 31):
        commit(tmp_path / "run", step, loss=1 / step)
    return tmp_path / "run"


def test_a_second_process_reads_no_manifest_that_it_finds_in_the_catalog(root: Path) -> None:
    write_catalog(root)
    storage = Counting(root)
    assert [entry.step for entry in committed_steps(storage)] == list(range(1, 31))
    assert storage.reads == 0
    commit(root, 31)  # as a version does that knows no catalog
    assert [entry.step for entry in committed_steps(storage)][-1] == 31
    assert storage.reads == 1


def test_the_times_of_saves_are_kept_and_share_one_writer(root: Path) -> None:
    commit(root, 31, times={"seconds": 1.5, "stall_ms": 12.5})
    commit(root, 32, times={"seconds": 2.5})
    settle(root)
    write_catalog(root)
    base = json.loads((root / catalog_file.FOLDER / catalog_file.BASE).read_bytes().split(b"\n", 1)[1])
    assert base["table"].count({"world": 1}) == 1 and "stall_ms" not in json.dumps(base["table"])
    counted = Counting(root)
    steps = {entry.step: entry.manifest for entry in committed_steps(counted)}
    assert counted.reads == 0
    assert [steps[step].writer for step in (30, 31, 32)] == [
        {"world": 1}, {"world": 1, "seconds": 1.5, "stall_ms": 12.5}, {"world": 1, "seconds": 2.5},
    ]  # fmt: skip


def test_with_few_steps_there_is_no_catalog(tmp_path: Path) -> None:
    for step in range(1, catalog_file.WORTH):
        commit(tmp_path, step)
    write_catalog(tmp_path)
    assert not (tmp_path / catalog_file.FOLDER).exists()


@pytest.mark.parametrize("kind", ["torn", "empty", "other version", "not JSON", "a folder", "gone"])
def test_a_catalog_that_cannot_be_read_is_made_again(root: Path, kind: str) -> None:
    write_catalog(root)
    base = root / catalog_file.FOLDER / catalog_file.BASE
    data = base.read_bytes()
    base.unlink()
    made = {"torn": data[: len(data) // 2], "empty": b"", "other version": data.replace(b'"version":3', b'"version":4')}
    if kind == "a folder":
        base.mkdir()
    elif kind != "gone":
        base.write_bytes(made.get(kind, b"[" * 100_000))
    storage = Counting(root)
    assert len(committed_steps(storage)) == 30 and storage.reads == 30
    if kind != "a folder":
        write_catalog(root)
        storage = Counting(root)
        assert len(committed_steps(storage)) == 30 and storage.reads == 0


def test_an_entry_counts_only_as_long_as_its_manifest_is_the_same_file(root: Path) -> None:
    write_catalog(root)
    kept = root / step_folder(5) / MANIFEST
    before = kept.stat()
    data = kept.read_bytes()
    with kept.open("r+b") as file:  # in place, of the same size, with the times that it had
        file.write(data.replace(b'"step":5', b'"step":6'))
    os.utime(kept, ns=(before.st_atime_ns, before.st_mtime_ns))
    shutil.rmtree(root / step_folder(7))
    (root / step_folder(9)).rename(root / "abandoned-step-000000000009")
    commit(root, 11, number=1, loss=0.5)  # saved again
    found = {entry.step: entry for entry in committed_steps(LocalStorage(root))}
    assert 7 not in found and 9 not in found
    assert found[5].damaged and found[11].manifest is not None and found[11].manifest.metrics == {"loss": 0.5}


def test_a_manifest_that_changed_right_after_it_was_read_is_read_again(tmp_path: Path) -> None:
    for step in range(1, 13):
        commit(tmp_path, step)
    write_catalog(tmp_path)
    path = tmp_path / step_folder(12) / MANIFEST
    status, data = path.stat(), path.read_bytes()
    entry = Catalog(LocalStorage(tmp_path))
    entry.scan()
    damaged = bytearray(data)
    damaged[-3] ^= 1
    with path.open("r+b") as file:
        file.write(damaged)
    if path.stat().st_ctime_ns == status.st_ctime_ns:
        assert path.stat().st_mtime_ns == status.st_mtime_ns  # a stamp cannot tell them apart
    assert next(found for found in committed_steps(LocalStorage(tmp_path)) if found.step == 12).damaged


def test_a_copied_root_and_one_that_cannot_be_written_are_read_as_they_are(root: Path) -> None:
    write_catalog(root)
    copy = root.with_name("copy")
    shutil.copytree(root, copy)
    shutil.rmtree(copy / step_folder(3))
    storage = Counting(copy)
    assert len(committed_steps(storage)) == 29 and storage.reads == 29  # other files than those of the catalog
    folder = copy / catalog_file.FOLDER
    shutil.rmtree(folder)
    folder.write_text("not a folder, so that nothing can be written there")
    write_catalog(copy)
    assert len(committed_steps(LocalStorage(copy))) == 29


def test_what_many_steps_give_up_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.storage.stamps._TICK_NS", 0)
    left = tuple((step, f".attempt-{step:016x}") for step in range(1000, 2000))
    for step in range(1, 41):
        commit(tmp_path, step, abandons=left)
    write_catalog(tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / catalog_file.FOLDER).iterdir())
    assert size < 3 * (tmp_path / step_folder(1) / MANIFEST).stat().st_size
    storage = Counting(tmp_path)
    assert all(entry.manifest and entry.manifest.abandons == left for entry in committed_steps(storage))
    assert storage.reads == 0


@pytest.mark.slow
def test_a_save_among_many_steps_reads_as_many_manifests_as_among_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.storage.stamps._TICK_NS", 0)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power is lost here
    policy = keep.last(3) | keep.every(10) | keep.best(2, "loss")
    counts = []
    for count in (12, 250):
        root = tmp_path / str(count)
        for step in range(10, 10 * count + 10, 10):
            commit(root, step, loss=1 / step)
        storage, first = Counting(root), 10 * count + 1
        index = RetentionIndex(storage)
        for step in range(first, first + 20):
            commit(root, step, loss=1.0)
            if step == first + 10:
                storage.reads = 0
            outcome = retention.apply(storage, policy, step, index)
            assert outcome.problems == []
            assert outcome.removed == ([step - 3] if step - 3 >= first and (step - 3) % 10 else [])
        counts.append(storage.reads)
    assert counts[0] == counts[1] <= 20


def damage(root: Path, step: int, how: str) -> None:
    path = root / step_folder(step) / MANIFEST
    if not path.exists():
        return
    if how == "gone":
        path.unlink()
    elif how == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def decisions(storage: LocalStorage, policy: keep.Policy, committed: int) -> set[int]:
    return {one.entry.step for one in retention.decide(storage, policy, committed) if not one.stays}


def outline(root: Path) -> list[tuple[int, str, bool]]:
    return [
        (entry.step, entry.manifest.attempt if entry.manifest else "", entry.damaged)
        for entry in living_steps(LocalStorage(root))
    ]


def policy_of(draw: random.Random) -> keep.Policy:
    rules = [
        keep.last(draw.choice([1, 3, 8])),
        keep.every(draw.choice([2, 5])),
        keep.best(2, "loss"),
        keep.best(1, "loss", "max"),
    ]
    policy = keep.last(2)
    for rule in draw.sample(rules, draw.randrange(3)):
        policy |= rule
    return policy


def act(root: Path, draw: random.Random, number: int, present: list[int], top: int) -> int:
    """One thing that happens to a root; returns the step that was committed, 0 if none was."""
    kind = draw.choice(["save"] * 6 + ["again", "rewind", "skip", "remove", "move", "damage", "tear", "stale", "drop"])
    folder = root / catalog_file.FOLDER
    some = draw.choice(present) if present else 0
    if kind == "again" and present:
        commit(root, some, number, loss=draw.random())
        return some
    if kind in ("rewind", "skip") and present:
        later = tuple(
            (entry.step, entry.manifest.attempt)
            for entry in living_steps(LocalStorage(root))
            if entry.manifest and entry.step > some
        )
        given_up: dict[str, Any] = {"abandons" if kind == "rewind" else "skips": later[:3]}
        commit(root, top + 1, number, loss=draw.random(), **given_up)
        return top + 1
    if kind == "remove" and present:
        shutil.rmtree(root / step_folder(some))
    elif kind == "move" and present:
        (root / step_folder(some)).rename(root / f"moved-{number}")
    elif kind == "damage" and present:
        damage(root, some, draw.choice(["gone", "torn", "flip"]))
    elif kind == "tear" and folder.exists():
        path = draw.choice(list(folder.iterdir()))
        path.write_bytes(path.read_bytes()[: draw.randrange(200)])
    elif kind == "stale" and folder.exists():
        for path in folder.iterdir():
            old = root.parent / f"old-{path.name}"
            if old.exists() and draw.random() < 0.5:
                shutil.copyfile(old, path)
            else:
                shutil.copyfile(path, old)
    elif kind == "drop":
        shutil.rmtree(folder, ignore_errors=True)
    elif kind == "save":
        commit(root, top + 1, number, loss=draw.random())
        return top + 1
    return 0


@pytest.mark.sliced(3)
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_histories_come_out_the_same_with_and_without_a_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("holdfast.checkpoint.catalog_file.WORTH", 1)
    monkeypatch.setattr("holdfast.checkpoint.catalog_file._TAIL_ENTRIES", 4)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power is lost here
    draw = random.Random(seed)
    root, policy = tmp_path / "run", policy_of(draw)
    root.mkdir()
    storage = LocalStorage(root)
    index = RetentionIndex(storage)
    for number in range(50):
        present = [int(path.name[5:]) for path in root.glob("step-*")]
        committed = act(root, draw, number, present, max(present, default=0))
        if draw.random() < 0.1:
            index = RetentionIndex(storage)  # another process
        with without_catalog(root) as plain:
            assert outline(root) == outline(plain), (seed, number)
            if committed:
                judged = LocalStorage(plain)
                retention.apply(judged, None)  # sets aside what was given up
                expected = decisions(judged, policy, committed)
        if committed:
            outcome = retention.apply(storage, policy, committed, index)
            assert outcome.problems == [] and set(outcome.removed) == expected, (seed, number)


def test_a_summary_has_what_a_manifest_says(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.begin(".attempt-1")
    files = {"a.bin": FileRecord(0, ()), "b.bin": FileRecord(0, ())}
    made = replace(
        BASE, step=3, parent=2, attempt=".attempt-1", files=files, skips=((1, "x"),), writer={"seconds": 1.5}
    )
    storage.put(".attempt-1", MANIFEST, encode_manifest(made))
    storage.publish(".attempt-1", step_folder(3))
    for step in range(4, 20):
        commit(tmp_path, step)
    write_catalog(tmp_path)
    (found,) = [entry for entry in committed_steps(LocalStorage(tmp_path)) if entry.step == 3]
    summary = found.manifest
    assert summary is not None
    assert (summary.parent, summary.attempt, summary.skips, summary.writer) == (
        2,
        ".attempt-1",
        ((1, "x"),),
        {"seconds": 1.5},
    )
    assert datetime.fromisoformat(summary.created).tzinfo == UTC


@pytest.mark.slow
def test_changes_among_very_many_steps_are_noticed_at_the_latest_after_some_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"stamps._TICK_NS": 0, "stamps._MANY": 20, "stamps._LIST_EVERY": 4}.items():
        monkeypatch.setattr(f"holdfast.storage.{name}", value)
    for name, value in {"_ALWAYS": 5, "_ALL": 10, "_IN_TURN": 4}.items():
        monkeypatch.setattr(f"holdfast.checkpoint.retention.{name}", value)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # no power is lost here
    for step in range(10, 410, 10):
        commit(tmp_path, step, loss=1 / step)
    policy = keep.last(3) | keep.every(10) | keep.best(2, "loss")
    storage = LocalStorage(tmp_path)
    index = RetentionIndex(storage)
    for step in range(401, 460):
        commit(tmp_path, step, loss=1.0)
        if step == 410:
            shutil.rmtree(tmp_path / step_folder(50))
            damage(tmp_path, 60, "flip")
            commit(tmp_path, 5)  # by another process; nothing keeps it
        elif step == 430:
            shutil.rmtree(tmp_path / step_folder(step - 1))  # one of the last: noticed at once
        outcome = retention.apply(storage, policy, step, index)
        assert outcome.problems == [] and 60 not in outcome.removed
        if step == 430:
            assert outcome.removed == []
    with without_catalog(tmp_path) as plain:
        assert decisions(LocalStorage(plain), policy, 459) == set()
        assert outline(tmp_path) == outline(plain)
    assert index.catalog.get(step_folder(50)) is None and index.catalog.get(step_folder(5)) is None
    seen = index.catalog.get(step_folder(60))
    assert seen is not None and seen.damaged
