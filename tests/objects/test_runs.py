"""Runs on an object store: restarts, damage, a server that is killed, and the command line."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import StorageError
from holdfast.core.names import step_folder
from holdfast.storage.identity import IDENTITY
from holdfast.storage.objects.open_attempts import OPEN
from holdfast.storage.objects.store import ObjectStorage
from tests.cli.calls import call
from tests.dist.harness import Victims, tell_parent
from tests.objects.server import Server

pytestmark = pytest.mark.sliced(2)


def state(number: int, elements: int = 3000) -> dict[str, Any]:
    return {"model": {"a": torch.full((elements,), float(number))}, "number": number}


def save_steps(root: str, *steps: int) -> None:
    with holdfast.Checkpointer(root) as run:
        for step in steps:
            run.save(step, state(step)).result(30)


def restored(root: str, elements: int = 3000) -> tuple[int | None, float]:
    """The step that a new start finds, and the number that all of its state has."""
    found = state(0, elements)
    with holdfast.Checkpointer(root) as run:
        step = run.restore(found)
        run.finish(30)
    assert found["model"]["a"].unique().tolist() == [found["number"]]
    return step, found["number"]


def test_a_step_saved_again_replaces_it_and_the_same_is_not_written(root: str) -> None:
    save_steps(root, 1, 2)
    storage = ObjectStorage(root)
    before = storage.read(step_folder(2), "holdfast.json", 1 << 20)
    with holdfast.Checkpointer(root) as run:
        run.save(2, state(2)).result(30)
        assert storage.read(step_folder(2), "holdfast.json", 1 << 20) == before
        run.save(2, state(7)).result(30)
    assert restored(root) == (2, 7)
    assert storage.hidden() == []


@pytest.mark.parametrize("damage", ["data", "short", "missing", "manifest"])
def test_restore_falls_back_past_damage(root: str, damage: str) -> None:
    save_steps(root, 1, 2)
    storage = ObjectStorage(root)
    attempt = json.loads(storage.read(step_folder(2), "holdfast.json", 1 << 20))["attempt"]
    key = f"{attempt}/model-00001-of-00001.safetensors"
    data = bytearray(storage._calls.get(key, 1 << 20).data)
    if damage == "manifest":
        storage._calls.put(f"{step_folder(2)}/holdfast.json", b'{"format": ')
    elif damage == "missing":
        storage._calls.delete([key])
    else:
        data[-100] ^= 1
        storage._calls.put(key, bytes(data[:-8] if damage == "short" else data))
    with pytest.warns(holdfast.HoldfastWarning, match="skipped damaged checkpoints"):
        assert restored(root) == (1, 1)


def save_and_wait(root: str) -> None:
    run = holdfast.Checkpointer(root)
    run.save(1, state(1)).result(30)
    run.save(2, state(2))
    tell_parent("captured")
    time.sleep(60)


def test_a_killed_trainer_leaves_its_step_to_the_writer(root: str) -> None:
    victims = Victims(1, save_and_wait, root)
    assert victims.hear() == ["captured"]
    victims.signal(signal.SIGKILL)
    victims.end()
    assert restored(root) == (2, 2)
    assert ObjectStorage(root).hidden() == []


@pytest.mark.filterwarnings("ignore::holdfast.HoldfastWarning")
@pytest.mark.full
def test_a_server_that_is_killed_while_a_step_is_saved_keeps_the_others(root: str, server: Server) -> None:
    root = f"{root.split('?', maxsplit=1)[0]}?deadline_s=1&timeout_s=1"
    elements = 3_000_000
    with holdfast.Checkpointer(root) as run:
        run.save(1, state(1, elements)).result(30)
        handle = run.save(2, state(2, elements))
        time.sleep(0.02)
        server.kill()
        try:
            with pytest.raises(StorageError):
                handle.result(30)
        finally:
            server.start()
    assert restored(root, elements) in ((1, 1), (2, 2)), "step 2 may have stayed in memory"
    assert holdfast.open(f"{root.split('?')[0]}/{step_folder(1)}").verify().good


def test_the_command_line_takes_addresses(root: str) -> None:
    save_steps(root, 1, 2)
    plain = root.split("?", maxsplit=1)[0]
    one, two = (f"{plain}/{step_folder(step)}" for step in (1, 2))
    assert [entry["step"] for entry in json.loads(call("ls", root, "--json").stdout)] == [1, 2]
    assert two in call("show", root).stdout
    assert call("verify", root).exit_code == call("verify", one).exit_code == 0
    assert call("diff", one, two).exit_code == 1
    assert "2 checkpoints" in call("top", root, "--once").stdout
    assert isinstance(call("ls", f"{plain}-none").exception, holdfast.NotFound)
    assert isinstance(call("top", one).exception, holdfast.NotFound)
    assert isinstance(call("ls", "ftp://x/y").exception, holdfast.HoldfastError)


def test_a_root_that_is_a_checkpoint_is_refused(root: str) -> None:
    save_steps(root, 1)
    with holdfast.Checkpointer(f"{root.split('?', maxsplit=1)[0]}/{step_folder(1)}") as run:
        with pytest.raises(holdfast.HoldfastError, match="takes the folder above it"):
            run.restore(state(0))


@pytest.mark.parametrize("data", [b"", b"{", b"[17]", b"\xff" * 100])
def test_an_identity_that_cannot_be_read_is_made_anew(root: str, data: bytes) -> None:
    save_steps(root, 1)
    storage = ObjectStorage(root)
    before = storage.identity(make=False)
    storage._calls.put(IDENTITY, data)
    assert storage.identity(make=False) is None
    made = storage.identity(make=True)
    assert before is not None and made is not None and made.id != before.id
    assert restored(root) == (1, 1) and storage.identity(make=True) == made


@pytest.mark.parametrize("data", [b"", b"{", b"[17]"])
def test_a_mailbox_that_cannot_be_found_any_more_goes(root: str, data: bytes) -> None:
    save_steps(root, 1)
    storage = ObjectStorage(root)
    storage._calls.put(f"{OPEN}/.mail-0123456789abcdef", data)
    with holdfast.Checkpointer(root, silence_s=0.1) as run:
        assert run.restore(state(0)) == 1
        run.save(2, state(2)).result(30)
    assert storage.hidden() == []
