from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import Damaged, InvalidArgument, StorageError
from holdfast.storage.base import SharedStorage
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from holdfast.testing.faults import Fault, faulty, writer_faults
from holdfast.testing.watched import WatchedStorage


def committed(fault: Fault | str | None = None) -> Any:
    """A storage with the file `f` in step-1, and a fault in what comes next."""
    inner = MemoryStorage()
    inner.begin(".a")
    inner.put(".a", "f", b"0123456789")
    inner.publish(".a", "step-1")
    return faulty(inner, fault, quiet=True)


def read(storage: WatchedStorage, size: int = 10) -> bytes:
    reader = storage.pin("step-1").open("f")
    data = bytearray(size)
    reader.read_into(0, [memoryview(data)[:4], memoryview(data)[4:]])
    return bytes(data)


def test_without_a_fault_it_only_counts() -> None:
    storage = committed()
    assert read(storage) == b"0123456789"
    assert storage.gate.count == 3  # pin, open, read_into
    assert storage.gate.done == []


@pytest.mark.parametrize(("do", "word"), [("enospc", "No space"), ("edquot", "quota"), ("eio", "Input/output")])
def test_an_error_is_raised_at_the_call_and_only_then(do: str, word: str) -> None:
    storage = committed(Fault(do, at=2, call="folders"))
    assert storage.folders() == ["step-1"]
    with pytest.raises(StorageError, match=word) as caught:
        storage.folders()
    assert caught.value.errno
    assert storage.folders() == ["step-1"]
    assert storage.gate.done == [f"{do}@2:folders#0~3600 at folders "]


def test_a_lasting_fault_stays() -> None:
    storage = committed(Fault("eio", at=2, lasting=True))
    storage.folders()
    for call in (storage.folders, storage.hidden):
        with pytest.raises(StorageError):
            call()


def test_only_calls_of_the_kinds_named_are_counted() -> None:
    storage = committed("eio@2:write|sync")
    storage.begin(".b")
    storage.create(".b", "g", 2)
    writer = storage.writer(".b", "g")
    writer.write(0, [memoryview(b"ab")])
    with pytest.raises(StorageError, match=r"sync \.b/g"):
        writer.sync()
    writer.close()


def test_a_short_write_leaves_half() -> None:
    storage = committed("short@1:write|put")
    storage.begin(".b")
    with pytest.raises(StorageError, match="after 3 of 6 bytes"):
        storage.put(".b", "g", b"abcdef")
    assert storage.read(".b", "g", 10) == b"abc"


def test_a_short_read_is_damage_or_half() -> None:
    with pytest.raises(Damaged, match="too early"):
        read(committed("short@1:read_into"))
    assert committed("short@1:read").read("step-1", "f", 10) == b"01234"


@pytest.mark.parametrize("seed", range(5))
def test_one_bit_is_flipped_and_always_the_same(seed: int) -> None:
    found = read(committed(Fault("corrupt", 1, "read_into", seed=seed)))
    differing = [a ^ b for a, b in zip(found, b"0123456789", strict=True) if a != b]
    assert len(differing) == 1 and differing[0].bit_count() == 1
    assert read(committed(Fault("corrupt", 1, "read_into", seed=seed))) == found


def test_a_flipped_write_leaves_the_callers_bytes_alone() -> None:
    storage = committed("corrupt@1:put#3")
    data = b"abcdef"
    storage.begin(".b")
    storage.put(".b", "g", data)
    assert data == b"abcdef" != storage.read(".b", "g", 10)


def test_a_call_hangs_until_it_is_released() -> None:
    storage = committed("hang@1:folders")
    started = time.monotonic()
    threading.Timer(0.2, storage.gate.release).start()
    with pytest.raises(StorageError, match="timed out"):
        storage.folders()
    assert time.monotonic() - started >= 0.2


def test_a_call_hangs_until_its_time_is_over() -> None:
    with pytest.raises(StorageError, match="timed out"):
        committed("hang@1~0.05").folders()


def test_a_kill_ends_the_process_before_the_call(tmp_path: Path) -> None:
    storage = faulty(LocalStorage(tmp_path), "kill@2:put", quiet=True)
    storage.begin(".a")
    child = os.fork()
    if child == 0:
        storage.put(".a", "f", b"1")
        storage.put(".a", "g", b"2")
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert storage.files(".a") == {"f": 1}


@pytest.mark.parametrize("fault", [Fault("kill", 3), Fault("eio", 1, "write|sync", True, 7, 2.5)])
def test_the_text_of_a_fault_makes_it_again(fault: Fault) -> None:
    assert Fault.parse(str(fault)) == fault


@pytest.mark.parametrize("text", ["", "kill", "kill@x", "kill@0", "burn@1", "eio@1:a b"])
def test_what_is_no_fault_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Fault.parse(text)


def test_what_was_done_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StorageError):
        faulty(MemoryStorage("here"), "eio@1").folders()
    assert "holdfast.testing: eio@1:#0~3600 at folders" in capsys.readouterr().err


def test_a_wrapped_storage_is_shared_only_if_it_was(tmp_path: Path) -> None:
    assert isinstance(faulty(LocalStorage(tmp_path), None), SharedStorage)
    assert not isinstance(faulty(MemoryStorage(), None), SharedStorage)


@pytest.mark.slow
def test_a_fault_reaches_the_writer_process(tmp_path: Path) -> None:
    with writer_faults("enospc@1:publish"), holdfast.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(StorageError, match=r"publish .*No space left"):
            checkpointer.save(1, {"w": torch.ones(3)}).result(60)
        with pytest.warns(UserWarning, match="step 1 was not saved"):
            assert checkpointer.save(2, {"w": torch.ones(3)}).result(60).verify().good


@pytest.mark.slow
def test_writers_started_after_the_block_have_no_fault(tmp_path: Path) -> None:
    with writer_faults(Fault("enospc", 1, "publish", lasting=True)):
        pass
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, {"w": torch.ones(3)}).result(60).verify().good


def test_an_invalid_fault_is_refused_before_any_writer_starts() -> None:
    with pytest.raises(InvalidArgument), writer_faults("burn@1"):
        pass


@pytest.mark.slow
def test_no_environment_variable_changes_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOLDFAST_TESTING_FAULTS", "HOLDFAST_FAULTS", "HOLDFAST_FAULT"):
        monkeypatch.setenv(name, "enospc@1+:")
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.save(1, {"w": torch.ones(3)}).result(60).verify().good


def test_no_module_outside_of_testing_names_it() -> None:
    """Production code neither imports holdfast.testing nor reads a variable for tests."""
    package = Path(holdfast.__file__).parent
    named = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.relative_to(package).parts[0] != "testing"
        and re.search(r"holdfast\.testing|HOLDFAST_\w*(TEST|FAULT|DEBUG)", path.read_text())
    ]
    assert named == []
