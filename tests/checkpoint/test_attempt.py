"""The attempt and its block writer: bytes in place, digests for the manifest, one publication."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.checkpoint.attempt import Attempt, new_attempt
from holdfast.checkpoint.commit import BlockReport
from holdfast.core.errors import HoldfastError
from holdfast.format.digest import digest_hex
from holdfast.plan.files import aligned_buffer
from holdfast.plan.save_plan import BlockPlan
from holdfast.storage.local import LocalStorage, LocalWriter


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    made = Attempt(LocalStorage(tmp_path), new_attempt(), "step-000000000001")
    made.create([("a", 8), ("b", 4)])
    return made


def views(*parts: bytes) -> Iterator[memoryview]:
    return (memoryview(part) for part in parts)


def test_a_block_is_written_from_its_parts_and_reported_with_its_digest(attempt: Attempt, tmp_path: Path) -> None:
    writer = attempt.block_writer(["a", "a"])
    assert writer.write("a", 4, 4, views(b"ef", b"gh")) == BlockReport("a", 4, 4, digest_hex(b"efgh"))
    assert writer.write("a", 0, 4, views(b"abcd")) == BlockReport("a", 0, 4, digest_hex(b"abcd"))
    assert (tmp_path / attempt.name / "a").read_bytes() == b"abcdefgh"


@pytest.mark.parametrize("parts", [(b"abc",), (b"abc", b"de"), ()])
def test_a_block_of_another_size_is_not_written(attempt: Attempt, tmp_path: Path, parts: tuple[bytes, ...]) -> None:
    size = sum(map(len, parts))
    with pytest.raises(HoldfastError, match=f"a at 4: gathered {size} of 4 bytes"):
        attempt.block_writer(["a"]).write("a", 4, 4, views(*parts))
    assert (tmp_path / attempt.name / "a").read_bytes() == bytes(8)


def test_a_file_is_synced_after_its_last_block(attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("sync", "close"):
        monkeypatch.setattr(LocalWriter, name, lambda self, name=name: calls.append(name))
    writer = attempt.block_writer(["a", "b", "a"])
    writer.write("a", 0, 4, views(b"abcd"))
    assert calls == []
    writer.write("b", 0, 4, views(b"abcd"))
    assert calls == ["sync", "close"]
    writer.write("a", 4, 4, views(b"efgh"))
    writer.close()
    assert calls == ["sync", "close"] * 2


def test_blocks_may_come_from_several_threads(tmp_path: Path) -> None:
    attempt = Attempt(LocalStorage(tmp_path), new_attempt(), "step-000000000001")
    attempt.create([("a", 64)])
    writer = attempt.block_writer(["a"] * 64)
    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(lambda at: writer.write("a", at, 1, views(bytes([at]))), range(64)))
    assert (tmp_path / attempt.name / "a").read_bytes() == bytes(range(64))
    assert [report.offset for report in reports] == list(range(64))


@pytest.mark.parametrize("is_local", [True, False])
def test_blocks_past_the_page_cache_have_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    attempt = Attempt(LocalStorage(tmp_path, mappable=is_local), new_attempt(), "step-000000000001")
    attempt.create([("a", 3 * 4096 + 5)])
    tried: list[int] = []
    write_uncached = LocalWriter.write_uncached

    def watched(writer: LocalWriter, offset: int, buffer: memoryview) -> bool:
        tried.append(offset)
        return write_uncached(writer, offset, buffer)

    monkeypatch.setattr(LocalWriter, "write_uncached", watched)
    buffer = aligned_buffer(2 * 4096 + 5)
    buffer[:] = 3
    writer = attempt.block_writer(["a"] * 2, uncached=True)
    assert writer.write("a", 0, 4096, [buffer[:4096].data]).digest == digest_hex(bytes([3]) * 4096)
    writer.write("a", 4096, buffer.nbytes, [buffer.data])
    assert tried == [0, 4096]
    assert (tmp_path / attempt.name / "a").read_bytes() == bytes([3]) * (3 * 4096 + 5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("whole_files", [False, True])
def test_all_blocks_are_written_on_threads_and_reported_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, whole_files: bool
) -> None:
    monkeypatch.setattr(LocalStorage, "whole_files", whole_files)
    attempt = Attempt(LocalStorage(tmp_path), new_attempt(), "step-000000000001")
    attempt.create([("a", 16), ("b", 16)])
    blocks = [BlockPlan(file, at, 1, 0, b"", ()) for at in reversed(range(16)) for file in "ab"]
    seen: list[tuple[str, int, int]] = []
    gatherers: list[int] = []

    def gatherer() -> Callable[[BlockPlan], Iterator[memoryview]]:
        gatherers.append(threading.get_ident())

        def gather(block: BlockPlan) -> Iterator[memoryview]:
            assert threading.get_ident() in gatherers
            seen.append((block.file, block.offset, threading.get_ident()))
            return views(bytes([block.offset]))

        return gather

    done: list[BlockReport] = []
    reports = attempt.write(blocks, gatherer, threads, done.append)
    assert [(report.file, report.offset) for report in reports] == [(block.file, block.offset) for block in blocks]
    assert sorted(done, key=str) == sorted(reports, key=str)
    assert 1 <= len(gatherers) <= threads
    for name in "ab":
        assert (tmp_path / attempt.name / name).read_bytes() == bytes(range(16))
        if whole_files:
            assert [at for file, at, _ in seen if file == name] == list(range(16))
            assert len({thread for file, _, thread in seen if file == name}) == 1


def test_a_block_that_cannot_be_gathered_fails_the_write_and_leaves_no_file_open(attempt: Attempt) -> None:
    before = len(os.listdir("/proc/self/fd"))
    blocks = [BlockPlan("a", 0, 8, 0, b"", ()), BlockPlan("b", 0, 4, 0, b"", ())]

    def gather(block: BlockPlan) -> Iterator[memoryview]:
        if block.file == "b":
            raise HoldfastError("gone")
        return views(bytes(8))

    with pytest.raises(HoldfastError, match="gone"):
        attempt.write(blocks, lambda: gather, 2)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_it_is_hidden_until_it_is_published(attempt: Attempt, tmp_path: Path) -> None:
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []
    assert (tmp_path / attempt.name / "a").stat().st_size == 8
    attempt.put({"config.json": b"{}", "holdfast.json": b"{}"})
    attempt.publish()
    assert (tmp_path / attempt.folder / "config.json").read_bytes() == b"{}"
    assert not (tmp_path / attempt.name).exists()


def test_nothing_remains_of_what_is_discarded(attempt: Attempt, tmp_path: Path) -> None:
    attempt.discard()
    assert not (tmp_path / attempt.name).exists() and not (tmp_path / attempt.folder).exists()
