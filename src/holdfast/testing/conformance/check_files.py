"""Conformance of files: written in parts, read into buffers, never read past the end."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.storage.base import Storage
from holdfast.testing.conformance.base import ATTEMPT, Conformance, publish, whole, write_file


class FileConformance(Conformance):
    """A file reads back as it was written."""

    def test_what_is_published_is_read_back(self, storage: Storage) -> None:
        publish(storage, "step-1", {"a.json": b"abc", "empty": b"", "ema/b": b"inner"})
        assert storage.files("step-1") == {"a.json": 3, "ema/b": 5, "empty": 0}
        assert storage.read("step-1", "a.json", 100) == b"abc"
        assert storage.read("step-1", "empty", 0) == b""
        assert storage.read("step-1", "ema/b", 5) == b"inner"

    def test_a_file_is_made_once(self, storage: Storage) -> None:
        storage.begin(ATTEMPT)
        storage.put(ATTEMPT, "f", b"first")
        with pytest.raises(StorageError):
            storage.create(ATTEMPT, "f", 1)
        assert storage.read(ATTEMPT, "f", 10) == b"first"

    def test_several_buffers_are_written_one_after_another(self, storage: Storage) -> None:
        floats = np.array([[1.5]], dtype=np.float32)
        storage.begin(ATTEMPT)
        storage.create(ATTEMPT, "f", 9)
        writer = storage.writer(ATTEMPT, "f")
        writer.write(0, [memoryview(b"ab"), memoryview(b""), memoryview(bytearray(b"cde")), floats.data])
        writer.sync()
        writer.close()
        assert whole(storage.take(ATTEMPT, "f")) == b"abcde" + floats.tobytes()

    def test_more_buffers_than_one_call_takes_are_written_and_read(self, storage: Storage) -> None:
        parts = [bytes([number % 251]) * (number % 7) for number in range(3000)]
        storage.begin(ATTEMPT)
        storage.create(ATTEMPT, "f", sum(map(len, parts)))
        writer = storage.writer(ATTEMPT, "f")
        writer.write(0, [memoryview(part) for part in parts])
        writer.sync()
        writer.close()
        storage.publish(ATTEMPT, "step-1")
        found = [bytearray(len(part)) for part in parts]
        reader = storage.pin("step-1").open("f")
        reader.read_into(0, [memoryview(part) for part in found])
        reader.close()
        assert found == parts

    def test_parts_may_come_in_any_order(self, storage: Storage) -> None:
        storage.begin(ATTEMPT)
        write_file(storage, "f", {6: b"789", 0: b"123", 3: b"456"})
        storage.publish(ATTEMPT, "step-1")
        assert storage.read("step-1", "f", 9) == b"123456789"

    def test_threads_write_parts_at_once(self, storage: Storage) -> None:
        parts = {at * 1000: bytes([at]) * 1000 for at in range(32)}
        storage.begin(ATTEMPT)
        storage.create(ATTEMPT, "f", 32_000)
        writer = storage.writer(ATTEMPT, "f")
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda at: writer.write(at, [memoryview(parts[at])]), parts))
        writer.sync()
        writer.close()
        storage.publish(ATTEMPT, "step-1")
        assert storage.read("step-1", "f", 32_000) == b"".join(parts.values())

    def test_two_writers_share_one_file_unless_files_are_written_whole(self, storage: Storage) -> None:
        if storage.whole_files:
            pytest.skip("only one process writes each file of this storage")
        storage.begin(ATTEMPT)
        storage.create(ATTEMPT, "f", 8)
        first, second = storage.writer(ATTEMPT, "f"), storage.writer(ATTEMPT, "f")
        second.write(4, [memoryview(b"5678")])
        first.write(0, [memoryview(b"1234")])
        for writer in (first, second):
            writer.sync()
            writer.close()
        assert whole(storage.take(ATTEMPT, "f")) == b"12345678"

    def test_what_nobody_wrote_is_zeros_unless_files_are_written_whole(self, storage: Storage) -> None:
        if storage.whole_files:
            pytest.skip("a file of this storage appears when it is complete")
        storage.begin(ATTEMPT)
        storage.create(ATTEMPT, "f", 10_000)
        storage.create(ATTEMPT, "g", 0)
        assert whole(storage.take(ATTEMPT, "f")) == bytes(10_000)
        writer = storage.writer(ATTEMPT, "g")
        writer.write(4, [memoryview(b"xy"), np.ones((0, 2), np.uint8).data])
        writer.close()
        assert storage.read(ATTEMPT, "g", 10) == b"\0\0\0\0xy"

    def test_a_reader_fills_buffers_in_turn_from_an_offset(self, storage: Storage) -> None:
        publish(storage, "step-1", {"f": b"0123456789"})
        reader = storage.pin("step-1").open("f")
        first, second = bytearray(3), np.zeros(2, dtype=np.uint16)
        reader.read_into(2, [memoryview(first), memoryview(b"").cast("B"), second.data])
        assert reader.size == 10
        assert bytes(first) == b"234"
        assert second.tobytes() == b"5678"
        reader.close()

    @pytest.mark.parametrize(("offset", "sizes"), [(0, [11]), (9, [2]), (10, [1]), (100, [1]), (0, [6, 6])])
    def test_reading_past_the_end_is_damage(self, storage: Storage, offset: int, sizes: list[int]) -> None:
        publish(storage, "step-1", {"f": b"0123456789"})
        reader = storage.pin("step-1").open("f")
        with pytest.raises(Damaged):
            reader.read_into(offset, [memoryview(bytearray(size)) for size in sizes])
        reader.close()

    @pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
    def test_a_map_is_the_bytes_of_the_file(self, storage: Storage, offset: int) -> None:
        data = np.random.default_rng(1).bytes(10_000)
        publish(storage, "step-1", {"f": data, "empty": b""})
        reader = storage.pin("step-1").open("f")
        if not reader.mappable:
            pytest.skip("this storage does not map files")
        view = reader.map(offset, 10_000 - offset)
        assert bytes(view) == data[offset:]
        assert bytes(reader.map(offset, 7)) == data[offset : offset + 7]
        assert bytes(reader.map(offset, 0)) == bytes(storage.pin("step-1").open("empty").map(0, 0)) == b""
        with pytest.raises(Damaged):
            reader.map(offset, 10_001 - offset)
        reader.close()
        assert bytes(view) == data[offset:]

    def test_a_small_file_over_the_limit_is_damage(self, storage: Storage) -> None:
        publish(storage, "step-1", {"f": b"12345"})
        assert storage.read("step-1", "f", 5) == storage.pin("step-1").read("f", 5) == b"12345"
        with pytest.raises(Damaged):
            storage.read("step-1", "f", 4)
        with pytest.raises(Damaged):
            storage.pin("step-1").read("f", 4)

    def test_a_file_of_an_attempt_can_be_dropped(self, storage: Storage) -> None:
        storage.begin(ATTEMPT)
        storage.put(ATTEMPT, "travel", b"1")
        storage.put(ATTEMPT, "stays", b"2")
        storage.drop(ATTEMPT, "travel")
        storage.publish(ATTEMPT, "step-1")
        assert storage.files("step-1") == {"stays": 1}

    def test_a_note_replaces_an_older_one_as_a_whole(self, storage: Storage) -> None:
        storage.begin(ATTEMPT)
        storage.note(ATTEMPT, "n", b"a longer text")
        assert storage.read(ATTEMPT, "n", 100) == b"a longer text"
        storage.note(ATTEMPT, "n", b"short", durable=True)
        assert storage.read(ATTEMPT, "n", 100) == b"short"
        assert storage.files(ATTEMPT) == {"n": 5}
        with pytest.raises(NotFound):
            storage.read(ATTEMPT, "other", 100)
