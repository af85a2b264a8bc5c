"""Publishing by a conditional put: one of two writers, never a mix, and nothing of what was given up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from holdfast.core.errors import Damaged, NotFound, StorageError
from holdfast.storage.objects.store import ObjectStorage
from holdfast.storage.objects.transfer import PART_BYTES
from holdfast.storage.objects.uploads import abort_uploads

FIRST, SECOND = ".attempt-00000000000000aa", ".attempt-00000000000000bb"


def write(storage: ObjectStorage, attempt: str, text: bytes) -> None:
    storage.begin(attempt)
    storage.put(attempt, "data", text)
    storage.put(attempt, "holdfast.json", b'{"attempt": "%s", "text": "%s"}' % (attempt.encode(), text))


def together(*works: Callable[[], None]) -> list[Exception | None]:
    """Do works at the same moment; what each raised."""
    barrier = threading.Barrier(len(works))
    raised: list[Exception | None] = [None] * len(works)

    def run(number: int) -> None:
        barrier.wait(60)
        try:
            works[number]()
        except Exception as error:  # noqa: BLE001  (the test looks at it)
            raised[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return raised


@pytest.mark.parametrize("again", [False, True])
def test_of_two_writers_each_is_published_whole_or_told_of_the_other(root: str, again: bool) -> None:
    refused = 0
    for number in range(12):
        storages = [ObjectStorage(root), ObjectStorage(root)]
        folder = f"step-{number}"
        if again:
            write(storages[0], before := f".attempt-{number:08x}{9:08x}", b"before")
            storages[0].publish(before, folder)
        attempts = [f".attempt-{number:08x}{side:08x}" for side in (1, 2)]
        for storage, attempt in zip(storages, attempts, strict=True):
            write(storage, attempt, attempt.encode())
        raised = together(*(lambda s=s, a=a: s.publish(a, folder) for s, a in zip(storages, attempts, strict=True)))
        assert raised.count(None) >= 1
        winner = storages[0].read(folder, "data", 100).decode()
        assert winner in attempts
        pin = storages[1].pin(folder)
        assert winner.encode() in pin.read("holdfast.json", 1000)
        for attempt, error in zip(attempts, raised, strict=True):
            if error is not None:
                refused += 1
                assert attempt != winner
                assert isinstance(error, StorageError) and folder in str(error) and winner in str(error)
    assert refused, "the two never met: this tested nothing"


def test_a_loser_leaves_nothing_and_the_winner_stays(root: str) -> None:
    storage = ObjectStorage(root)
    write(storage, FIRST, b"first")
    write(storage, SECOND, b"second")
    storage._committed = lambda folder: None  # as if both had looked before
    storage.publish(FIRST, "step-1")
    del storage._committed
    stale = ObjectStorage(root)
    looks = iter([None])
    look = stale._committed
    stale._committed = lambda folder: next(looks, look(folder))
    with pytest.raises(StorageError, match=FIRST):
        stale.publish(SECOND, "step-1")
    stale.discard(SECOND)
    assert storage.read("step-1", "data", 10) == b"first"
    assert storage.hidden() == []


def test_a_pin_reads_one_attempt_while_the_step_is_saved_again(root: str) -> None:
    storage = ObjectStorage(f"{root}&grace_s=0")
    write(storage, FIRST, b"first")
    storage.publish(FIRST, "step-1")
    pin = storage.pin("step-1")
    hold = pin.hold()
    write(storage, SECOND, b"second")
    storage.publish(SECOND, "step-1")
    storage.sweep()
    assert pin.read("data", 10) == b"first" and b"first" in pin.read("holdfast.json", 100)
    hold.release()
    storage.sweep()
    with pytest.raises(NotFound):
        pin.read("data", 10)
    assert storage.read("step-1", "data", 10) == b"second"


def test_who_discards_and_who_publishes_never_both_succeed(root: str) -> None:
    for number in range(10):
        storage, other = ObjectStorage(root), ObjectStorage(root)
        attempt, folder = f".attempt-{number:016x}", f"step-{number}"
        write(storage, attempt, b"data")
        raised = together(lambda: storage.publish(attempt, folder), lambda: other.discard(attempt))
        if folder in storage.folders():
            assert storage.read(folder, "data", 10) == b"data"
        else:
            assert isinstance(raised[0], StorageError | NotFound)


def test_data_of_a_folder_with_two_names_is_never_swept(root: str) -> None:
    storage = ObjectStorage(f"{root}&grace_s=0")
    write(storage, FIRST, b"first")
    storage.publish(FIRST, "step-1")
    manifest = storage.read("step-1", "holdfast.json", 1000)
    storage._calls.put("abandoned-step-1/holdfast.json", manifest)  # a rename that was cut short
    assert storage.remove("step-1")
    storage.sweep()
    assert storage.read("abandoned-step-1", "data", 10) == b"first"


def test_nothing_is_swept_while_a_damaged_manifest_may_point_to_it(root: str) -> None:
    storage = ObjectStorage(f"{root}&grace_s=0")
    write(storage, FIRST, b"first")
    storage.publish(FIRST, "step-1")
    storage._calls.put("step-1/holdfast.json", b'{"attempt": ".att')
    storage.sweep()
    assert storage._calls.exists(f"{FIRST}/data")


@pytest.mark.parametrize("attempt", ["../other", ".attempt-1/../../x", "step-2", "", None, 7, ".x\\u0000"])
def test_a_manifest_that_points_elsewhere_is_not_followed(root: str, attempt: object) -> None:
    storage = ObjectStorage(root)
    write(storage, FIRST, b"secret")
    told = f'"{attempt}"' if isinstance(attempt, str) else "null" if attempt is None else str(attempt)
    storage._calls.put("step-1/holdfast.json", b'{"attempt": %s}' % told.encode())
    assert list(storage.files("step-1")) == ["holdfast.json"]


def test_a_file_that_is_not_completed_leaves_no_object_and_no_upload(root: str) -> None:
    pytest.importorskip("boto3", reason="only boto3 can list uploads")
    storage = ObjectStorage(root)
    storage.begin(FIRST)
    part = memoryview(bytes(PART_BYTES))
    closed = storage.writer(FIRST, "closed")
    killed = storage.writer(FIRST, "killed")
    for writer in (closed, killed):
        for offset in (0, PART_BYTES):
            writer.write(offset, [part])
    closed.close()
    assert storage.files(FIRST) == {}
    time.sleep(1.1)  # uploads are dated to the second
    killed._file = None  # as a killed process leaves it
    assert abort_uploads(storage._address, _now(storage), {FIRST}) == 0  # its attempt is still in use
    assert abort_uploads(storage._address, _now(storage), set()) == 1
    assert abort_uploads(storage._address, _now(storage), set()) == 0


def _now(storage: ObjectStorage):
    return storage._sweeper._now()


def test_a_large_file_is_read_as_it_was_written(root: str) -> None:
    storage = ObjectStorage(root)
    storage.begin(FIRST)
    size = 2 * PART_BYTES + 12_345
    data = memoryview((b"%09d\n" * (size // 10 + 1)) % tuple(range(size // 10 + 1)))[:size]
    writer = storage.writer(FIRST, "large")
    for offset in range(0, size, 5_000_000):
        writer.write(offset, [data[offset : offset + 5_000_000]])
    writer.sync()
    writer.close()
    storage.publish(FIRST, "step-1")
    reader = storage.pin("step-1").open("large")
    found = bytearray(size)
    for offset in range(0, size, 3_000_001):
        reader.read_into(offset, [memoryview(found)[offset : offset + 3_000_001]])
    reader.close()
    assert found == data
    assert bytes(reader.map(size - 9, 9)) == data[-9:]
    with pytest.raises(Damaged, match="too early"):
        reader.read_into(size - 5, [memoryview(bytearray(6))])


def test_a_hole_in_a_file_is_an_error(root: str) -> None:
    storage = ObjectStorage(root)
    storage.begin(FIRST)
    writer = storage.writer(FIRST, "f")
    writer.write(0, [memoryview(b"12")])
    writer.write(4, [memoryview(b"56")])
    with pytest.raises(StorageError, match="at 2 were never written"):
        writer.sync()
    writer.close()
    assert storage.files(FIRST) == {}
