"""Conformance of pins: a reader gets the folder that it opened or an error that it is gone, never other bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from holdfast.core.errors import Damaged, NotFound
from holdfast.storage.base import Pin, Storage
from holdfast.testing.conformance.base import Conformance, publish, whole

OLD = {"a": b"old-a", "ema/b": b"old-b"}
NEW = {"a": b"newer-a", "ema/b": b"newer-b"}
ROUNDS = 12


def _read(pin: Pin, name: str) -> bytes | None:
    """Read a file through a pin; return None if it is gone."""
    try:
        data = pin.read(name, 100)
        assert whole(pin.open(name)) == data
    except (NotFound, Damaged):
        return None
    return data


def _same_or_gone(pin: Pin) -> None:
    for name, data in OLD.items():
        assert _read(pin, name) in (data, None)


class PinConformance(Conformance):
    """A pin is a snapshot of one committed folder."""

    def test_a_pin_reads_its_folder(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        assert pin.files() == {"a": 5, "ema/b": 5}
        assert {name: pin.read(name, 100) for name in OLD} == {name: whole(pin.open(name)) for name in OLD} == OLD

    def test_a_pin_stays_what_it_was_after_a_rename(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        storage.rename("step-1", "other")
        publish(storage, "step-1", NEW)
        _same_or_gone(pin)

    def test_a_pin_stays_what_it_was_when_it_is_set_aside(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        publish(storage, "step-1", NEW, "aside")
        _same_or_gone(pin)
        assert storage.pin("step-1").read("a", 100) == NEW["a"]

    def test_a_held_pin_is_read_to_the_end_when_it_is_replaced(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        hold = pin.hold()
        publish(storage, "step-1", NEW)
        assert {name: _read(pin, name) for name in OLD} == OLD
        assert storage.read("step-1", "a", 100) == NEW["a"]
        hold.release()

    def test_a_pin_of_a_replaced_folder_never_reads_the_new_one(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        publish(storage, "step-1", NEW)
        _same_or_gone(pin)

    def test_a_pin_of_a_removed_folder_reads_what_it_was_or_nothing(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        assert storage.remove("step-1")
        _same_or_gone(pin)
        publish(storage, "step-1", NEW)
        _same_or_gone(pin)

    def test_what_is_held_is_not_removed_or_still_read(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        hold = pin.hold()
        removed = storage.remove("step-1")
        assert {name: _read(pin, name) for name in OLD} == OLD
        assert storage.folders() == ([] if removed else ["step-1"])
        hold.release()
        if not removed:
            assert storage.remove("step-1") is True
            assert storage.folders() == []

    def test_what_is_removed_can_be_held_only_if_it_is_still_read(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        pin = storage.pin("step-1")
        storage.remove("step-1")
        try:
            hold = pin.hold()
        except NotFound:
            return
        assert {name: _read(pin, name) for name in OLD} == OLD
        hold.release()

    def test_a_hold_outlives_its_pin(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)
        hold = storage.pin("step-1").hold()
        kept = not storage.remove("step-1")
        hold.release()
        assert storage.folders() == (["step-1"] if kept else [])

    def test_readers_see_one_folder_or_the_other_while_it_is_replaced(self, storage: Storage) -> None:
        publish(storage, "step-1", OLD)

        def change(number: int) -> None:
            publish(storage, "step-1", NEW if number % 2 == 0 else OLD)

        found = _read_while(storage, change)
        assert found <= {tuple(OLD.values()), tuple(NEW.values()), None}
        assert storage.folders() == ["step-1"]

    def test_readers_see_all_of_a_folder_or_nothing_while_it_is_removed(self, storage: Storage) -> None:
        def change(number: int) -> None:
            publish(storage, "step-1", OLD)
            while not storage.remove("step-1"):
                pass

        assert _read_while(storage, change) <= {tuple(OLD.values()), None}
        assert storage.folders() == []


def _read_while(storage: Storage, change: Callable[[int], None]) -> set[tuple[bytes, ...] | None]:
    """Read repeatedly while a folder changes; return all contents seen, None for gone."""
    found: set[tuple[bytes, ...] | None] = set()
    failures: list[BaseException] = []
    end = threading.Event()

    def read() -> None:
        while not end.is_set():
            try:
                pin = storage.pin("step-1")
                hold = pin.hold()
            except NotFound:
                found.add(None)
                continue
            except BaseException as error:  # noqa: BLE001  (reported below by the main thread)
                failures.append(error)
                return
            read = [_read(pin, name) for name in OLD]
            found.add(tuple(data or b"torn" for data in read))
            hold.release()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(ROUNDS):
            change(number)
    finally:
        end.set()
        thread.join(60)
    if failures:
        pytest.fail(f"a reader raised {failures[0]!r}")
    return found
