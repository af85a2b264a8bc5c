"""Requests of saves and restores do not grow with the steps that are there, nor with what was removed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import holdfast
from holdfast import keep
from holdfast.checkpoint.catalog import committed_steps
from holdfast.core.names import MANIFEST, step_folder
from holdfast.format.manifest import decode_manifest, encode_manifest
from holdfast.storage.objects.calls import Calls
from holdfast.storage.objects.store import ObjectStorage
from tests.objects.proxy import Plan, Proxy
from tests.objects.server import Server


class Counting(Plan):
    """Passes everything on, and remembers what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[str] = []

    def next(self, method: str, path: str) -> str:
        self.requests.append(f"{method} {path}")
        return ""

    def take(self) -> int:
        """The requests since the last call, beside those for data."""
        found = [request for request in self.requests if not _is_data(request)]
        self.requests.clear()
        return len(found)


def _is_data(request: str) -> bool:
    name = request.partition("?")[0].rpartition("/")[2]
    return name.endswith((".safetensors", "state.json", ".index.json"))


@pytest.fixture
def counting(server: Server, root: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counting]:
    proxy = Proxy(server.port)
    plan = Counting()
    proxy.set(plan)
    with monkeypatch.context() as patched:  # what cleans the root up afterwards asks the server itself
        patched.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield plan
    proxy.close()


def state(value: float) -> dict[str, object]:
    return {"w": {"a": torch.full((4,), value)}, "note": {"value": value}}


def multiply(root: str, steps: range) -> None:
    """Give a root more steps, each like its first, by requests of their own."""
    storage = ObjectStorage(root)
    calls: Calls = storage._calls
    like = storage.folders()[0]
    first = decode_manifest(storage.read(like, MANIFEST, 1 << 20), root)
    small = {name: calls.get(f"{first.attempt}/{name}", 1 << 20).data for name in (*first.files, ".folder")}

    def make(step: int) -> None:
        attempt = f".attempt-{step:016x}"
        data = encode_manifest(replace(first, step=step, attempt=attempt))
        for name, content in {**small, ".folder": step_folder(step).encode(), MANIFEST: data}.items():
            calls.put(f"{attempt}/{name}", content)
        calls.put(f"{step_folder(step)}/{MANIFEST}", data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(make, steps))


def save(run: holdfast.Checkpointer, step: int) -> None:
    run.save(step, state(step)).result(60)


def requests_of_saves(root: str, counting: Counting, policy: keep.Policy, steps: range) -> list[int]:
    found = []
    with holdfast.Checkpointer(root, keep=policy, on_event=lambda event: None) as run:
        run.restore(state(0))
        for step in steps:
            counting.take()
            save(run, step)
            found.append(counting.take())
    return found[2:]


@pytest.mark.full
def test_the_requests_of_a_save_and_of_a_restore_do_not_grow(root: str, counting: Counting) -> None:
    with holdfast.Checkpointer(root, on_event=lambda event: None) as run:
        save(run, 1)
    few = requests_of_saves(root, counting, keep.last(3), range(2, 12))
    multiply(root, range(20, 180))
    many = requests_of_saves(root, counting, keep.last(1000), range(201, 211))
    assert max(few) <= 40 and max(many) <= 40
    assert min(many) <= min(few)
    with holdfast.Checkpointer(root, on_event=lambda event: None) as run:
        back = state(0)
        counting.take()
        assert run.restore(back) == 210 and back["note"] == {"value": 210}
        assert counting.take() <= 30


def test_removals_of_the_last_hour_cost_no_more_requests(root: str, counting: Counting) -> None:
    found = requests_of_saves(root, counting, keep.last(2), range(1, 31))
    assert max(found[-5:]) <= max(found[2:7]) + 4  # a poll more or less
    assert [entry.step for entry in committed_steps(ObjectStorage(root))] == [29, 30]


def test_what_was_removed_goes_a_few_at_a_time_and_what_is_used_stays(root: str) -> None:
    root = root.replace("?", "?grace_s=0&")
    storage = ObjectStorage(root)
    with holdfast.Checkpointer(root, keep=keep.last(2), on_event=lambda event: None) as run:
        for step in range(1, 9):
            save(run, step)
    left = {item.key.partition("/")[0] for item in storage._calls.list_objects("") if item.key.startswith(".attempt-")}
    living = committed_steps(storage)
    assert [entry.step for entry in living] == [7, 8]
    assert {entry.manifest.attempt for entry in living if entry.manifest} <= left
    assert len(left) <= 4
    storage.sweep()
    left = {item.key.partition("/")[0] for item in storage._calls.list_objects("") if item.key.startswith(".attempt-")}
    assert left == {entry.manifest.attempt for entry in living if entry.manifest}
    assert holdfast.open(f"{root.partition('?')[0]}/{step_folder(8)}").verify().good


def test_a_catalog_of_objects_is_used_and_not_believed(root: str, counting: Counting) -> None:
    with holdfast.Checkpointer(root, on_event=lambda event: None) as run:
        save(run, 1)
    multiply(root, range(2, 30))
    with holdfast.Checkpointer(root, on_event=lambda event: None) as run:
        run.restore(state(0))  # writes the catalog
    counting.take()
    assert len(committed_steps(ObjectStorage(root))) == 29 and counting.take() <= 5
    storage = ObjectStorage(root)
    storage._calls.delete([f"{step_folder(29)}/{MANIFEST}"])  # by somebody else
    storage._calls.put(f"{step_folder(5)}/{MANIFEST}", b"{}")
    multiply(root, range(30, 31))
    found = {entry.step: entry for entry in committed_steps(ObjectStorage(root))}
    assert 29 not in found and found[5].damaged and 30 in found
    with holdfast.Checkpointer(root, on_event=lambda event: None) as run:
        assert run.restore(state(0)) == 30
