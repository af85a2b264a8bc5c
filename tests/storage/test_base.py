"""What every storage must do, run on each of them."""

import numpy as np
import pytest

from holdfast.core.errors import Damaged, NotFound
from holdfast.storage.base import Storage
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage

ATTEMPT = ".attempt-1"


@pytest.fixture(params=["local", "local without maps", "memory"])
def storage(request, tmp_path):
    if request.param == "memory":
        return MemoryStorage()
    return LocalStorage(tmp_path / "run", mappable=None if request.param == "local" else False)


def publish(storage, folder, files):
    storage.begin(ATTEMPT)
    for name, data in files.items():
        storage.put(ATTEMPT, name, data)
    storage.publish(ATTEMPT, folder)


def whole(reader):
    data = bytearray(reader.size)
    reader.read_into(0, [memoryview(data)])
    reader.close()
    return bytes(data)


def test_each_is_a_storage_with_a_name(storage):
    assert isinstance(storage, Storage)
    assert storage.name


def test_a_root_that_is_not_there_has_no_folders(storage):
    assert storage.folders() == []


def test_what_is_published_is_read_back(storage):
    publish(storage, "step-1", {"a.json": b"abc", "empty": b"", "ema/b": b"inner"})
    assert storage.folders() == ["step-1"]
    assert storage.files("step-1") == {"a.json": 3, "ema/b": 5, "empty": 0}
    assert storage.read("step-1", "a.json", 100) == b"abc"
    assert storage.read("step-1", "empty", 0) == b""
    assert storage.read("step-1", "ema/b", 5) == b"inner"


def test_an_attempt_is_hidden_until_it_is_published(storage):
    storage.begin(ATTEMPT)
    storage.put(ATTEMPT, "a", b"1")
    assert storage.folders() == []
    storage.publish(ATTEMPT, "step-1")
    assert storage.folders() == ["step-1"]
    with pytest.raises(NotFound):
        storage.files(ATTEMPT)


def test_folders_are_sorted(storage):
    for folder in ("step-3", "step-1", "other", "step-2"):
        publish(storage, folder, {"a": b"1"})
    assert storage.folders() == ["other", "step-1", "step-2", "step-3"]


def test_publishing_replaces_an_older_folder_as_a_whole(storage):
    publish(storage, "step-1", {"a": b"old", "only-old": b"1"})
    publish(storage, "step-1", {"a": b"newer", "ema/b": b"2"})
    assert storage.folders() == ["step-1"]
    assert storage.files("step-1") == {"a": 5, "ema/b": 1}
    assert storage.read("step-1", "a", 10) == b"newer"
    with pytest.raises(NotFound):
        storage.files(ATTEMPT)


def test_an_attempts_name_can_be_used_again_once_it_is_published(storage):
    publish(storage, "step-1", {"a": b"1"})
    publish(storage, "step-2", {"b": b"2"})
    assert storage.files("step-2") == {"b": 1}


def test_a_created_file_has_its_full_size_and_zeros(storage):
    storage.begin(ATTEMPT)
    storage.create(ATTEMPT, "f", 10_000)
    assert whole(storage.take(ATTEMPT, "f")) == bytes(10_000)


def test_several_buffers_are_written_one_after_another(storage):
    storage.begin(ATTEMPT)
    storage.create(ATTEMPT, "f", 12)
    writer = storage.writer(ATTEMPT, "f")
    floats = np.array([[1.5]], dtype=np.float32)
    writer.write(2, [memoryview(b"ab"), memoryview(b""), memoryview(bytearray(b"cde")), memoryview(floats)])
    writer.sync()
    writer.close()
    assert whole(storage.take(ATTEMPT, "f")) == b"\0\0abcde" + floats.tobytes() + b"\0"


def test_more_buffers_than_one_call_takes_are_written_and_read(storage):
    parts = [bytes([number % 251]) * (number % 7) for number in range(3000)]
    expected = b"".join(parts)
    storage.begin(ATTEMPT)
    storage.create(ATTEMPT, "f", len(expected))
    writer = storage.writer(ATTEMPT, "f")
    writer.write(0, [memoryview(part) for part in parts])
    writer.close()
    storage.publish(ATTEMPT, "step-1")
    assert storage.read("step-1", "f", len(expected)) == expected
    found = [bytearray(len(part)) for part in parts]
    reader = storage.pin("step-1").open("f")
    reader.read_into(0, [memoryview(part) for part in found])
    reader.close()
    assert found == parts


def test_two_writers_share_one_file(storage):
    storage.begin(ATTEMPT)
    storage.create(ATTEMPT, "f", 8)
    first, second = storage.writer(ATTEMPT, "f"), storage.writer(ATTEMPT, "f")
    second.write(4, [memoryview(b"5678")])
    first.write(0, [memoryview(b"1234")])
    first.close()
    second.close()
    assert whole(storage.take(ATTEMPT, "f")) == b"12345678"


def test_a_reader_fills_buffers_in_turn_from_an_offset(storage):
    publish(storage, "step-1", {"f": b"0123456789"})
    reader = storage.pin("step-1").open("f")
    first, second = bytearray(3), np.zeros(2, dtype=np.uint16)
    reader.read_into(2, [memoryview(first), memoryview(second)])
    assert reader.size == 10
    assert bytes(first) == b"234"
    assert second.tobytes() == b"5678"
    reader.close()


@pytest.mark.parametrize(("offset", "size"), [(0, 11), (9, 2), (10, 1), (100, 1)])
def test_reading_past_the_end_is_damage(storage, offset, size):
    publish(storage, "step-1", {"f": b"0123456789"})
    reader = storage.pin("step-1").open("f")
    with pytest.raises(Damaged, match="too early"):
        reader.read_into(offset, [memoryview(bytearray(size))])
    reader.close()


def test_reading_past_the_end_with_several_buffers_is_damage(storage):
    publish(storage, "step-1", {"f": b"0123456789"})
    reader = storage.pin("step-1").open("f")
    with pytest.raises(Damaged, match="too early"):
        reader.read_into(0, [memoryview(bytearray(6)), memoryview(bytearray(6))])
    reader.close()


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
def test_a_map_is_the_bytes_of_the_file(storage, offset):
    data = np.random.default_rng(1).bytes(10_000)
    publish(storage, "step-1", {"f": data})
    reader = storage.pin("step-1").open("f")
    view = reader.map(offset, 10_000 - offset)
    assert bytes(view) == data[offset:]
    assert bytes(reader.map(offset, 7)) == data[offset : offset + 7]
    reader.close()
    assert bytes(view) == data[offset:]


def test_a_file_of_an_attempt_can_be_dropped(storage):
    storage.begin(ATTEMPT)
    storage.put(ATTEMPT, "travel", b"1")
    storage.put(ATTEMPT, "stays", b"2")
    storage.drop(ATTEMPT, "travel")
    storage.publish(ATTEMPT, "step-1")
    assert storage.files("step-1") == {"stays": 1}


def test_discarding_removes_an_attempt_and_nothing_else(storage):
    publish(storage, "step-1", {"a": b"1"})
    storage.begin(ATTEMPT)
    storage.put(ATTEMPT, "ema/b", b"2")
    storage.discard(ATTEMPT)
    with pytest.raises(NotFound):
        storage.files(ATTEMPT)
    assert storage.read("step-1", "a", 1) == b"1"


def test_discarding_what_is_not_there_is_no_error(storage):
    storage.discard(".attempt-none")


def test_a_file_over_the_limit_is_damage(storage):
    publish(storage, "step-1", {"f": b"12345"})
    assert storage.read("step-1", "f", 5) == b"12345"
    with pytest.raises(Damaged, match="5 bytes, more than the limit of 4"):
        storage.read("step-1", "f", 4)


@pytest.mark.parametrize(
    "ask",
    [
        lambda storage: storage.files("none"),
        lambda storage: storage.read("none", "a", 1),
        lambda storage: storage.read("step-1", "none", 1),
        lambda storage: storage.read("step-1", "none/a", 1),
        lambda storage: storage.pin("step-1").open("none"),
        lambda storage: storage.take(".attempt-none", "a"),
        lambda storage: storage.create(".attempt-none", "a", 1),
        lambda storage: storage.put(".attempt-none", "a", b""),
        lambda storage: storage.writer(".attempt-none", "a"),
        lambda storage: storage.writer("step-1", "none"),
        lambda storage: storage.drop("step-1", "none"),
        lambda storage: storage.publish(".attempt-none", "step-2"),
    ],
)
def test_what_is_missing_is_not_found(storage, ask):
    publish(storage, "step-1", {"a": b"1"})
    with pytest.raises(NotFound):
        ask(storage)
    assert storage.folders() == ["step-1"]


@pytest.mark.parametrize("name", ["", "..", "../a", "/etc/passwd", "a\0", "a\nb", "a/b/c", ".a", "a\\b", "n" * 300])
def test_a_hostile_file_name_never_reaches_the_storage(storage, name):
    publish(storage, "step-1", {"a": b"1"})
    storage.begin(ATTEMPT)
    for ask in (
        lambda: storage.read("step-1", name, 1),
        lambda: storage.pin("step-1").open(name),
        lambda: storage.take(ATTEMPT, name),
        lambda: storage.create(ATTEMPT, name, 1),
        lambda: storage.put(ATTEMPT, name, b"1"),
        lambda: storage.writer(ATTEMPT, name),
        lambda: storage.drop(ATTEMPT, name),
    ):
        with pytest.raises(Damaged, match="not an allowed file name"):
            ask()
    assert storage.files(ATTEMPT) == {}
