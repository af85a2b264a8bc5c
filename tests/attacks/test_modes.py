"""Private by default: what a save leaves, and what it uses on the way, is for its user alone."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.attempt import new_attempt
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.lineage import Lineage
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import Arena, bind_private, create_file, find_files, replace_text, unlink_file
from holdfast.checkpoint.tags import add_tag
from holdfast.plan.writer_job import WriterJob
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_card import Card, card_path
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.messages import SaveStarted


def state() -> dict[str, object]:
    return {"model": torch.nn.Linear(4, 3), "ema/model": {"x": torch.ones(2)}, "note": {"epoch": 1}}


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(*tops: Path) -> dict[str, tuple[int, int]]:
    """How many files and folders have which modes: (kind, mode) by path."""
    paths = [path for top in tops for path in (top, *top.rglob("*"))]
    found = {}
    for path in paths:
        status = path.lstat()
        found[str(path)] = (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode))
    return found


def check_private(*tops: Path) -> int:
    """Every file is 0600 and every folder 0700; returns how many there are."""
    found = modes(*tops)
    wrong = {
        path: oct(mode)
        for path, (kind, mode) in found.items()
        if mode != {stat.S_IFREG: 0o600, stat.S_IFDIR: 0o700}.get(kind)
    }
    assert not wrong
    return len(found)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_a_blocking_save_is_private_whatever_the_umask_would_allow(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        holdfast.save(tmp_path / "above" / "run" / "c", state())
    assert check_private(tmp_path / "above") > 8
    assert holdfast.open(tmp_path / "above" / "run" / "c").verify().good


@pytest.mark.parametrize("mask", [0o000, 0o022])
def test_a_save_in_the_background_is_private(tmp_path: Path, mask: int) -> None:
    root = tmp_path / "run"
    with umask(mask), holdfast.Checkpointer(root) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state()).result()
        arenas = find_files(run_id(LocalStorage(root)))
        assert arenas and all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in arenas)
        assert check_private(root) > 16
    assert check_private(root) > 16
    assert sorted(path.name for path in root.glob("step-*")) == ["step-000000000001", "step-000000000002"]


def test_a_umask_that_takes_more_away_is_honoured(tmp_path: Path) -> None:
    with umask(0o277):
        descriptor = os.open(tmp_path / "plain", os.O_CREAT | os.O_WRONLY, 0o600)
        os.close(descriptor)
    storage = LocalStorage(tmp_path)
    storage.begin(".a")
    with umask(0o277):
        storage.create(".a", "x", 0)
    assert stat.S_IMODE((tmp_path / ".a" / "x").stat().st_mode) == 0o400
    assert stat.S_IMODE((tmp_path / "plain").stat().st_mode) == 0o400


def test_notes_mailboxes_and_tags_are_private(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with umask(0):
        with holdfast.Checkpointer(root) as checkpointer:
            checkpointer.save(1, state()).result()
        storage = LocalStorage(root)
        mailbox = Mailbox(storage, new_attempt())
        mailbox.make()
        mailbox.post_begun(SaveStarted(1, 1, 9))
        (entry,) = committed_steps(storage)
        add_tag(storage, "best", entry)
    assert (root / ".tags" / "best").is_file() and (root / mailbox.folder / "begun").is_file()
    check_private(root)


def test_shared_memory_and_cards_are_private_under_names_nobody_can_guess() -> None:
    with umask(0):
        paths = [create_file(4096, "test-modes-") for _ in range(2)]
        card = Card(
            ".attempt-0", Lineage(1), 0, paths[0], WriterJob("p", 0, 1, 0, 1, {}, (), ()), None, (), {}, "", "here"
        )
        card.write()
    try:
        for path in (*paths, card_path(paths[0])):
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        endings = [re.search(r"-([0-9a-f]{32})$", path) for path in paths]
        assert all(endings) and len({match[1] for match in endings if match}) == 2
    finally:
        for path in (*paths, card_path(paths[0])):
            unlink_file(path)


def test_nobody_else_may_send_to_a_rank(tmp_path: Path) -> None:
    with umask(0), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        bind_private(receiver, tmp_path / "mail")
    assert stat.S_IMODE((tmp_path / "mail").stat().st_mode) == 0o600


def test_shared_memory_that_others_may_read_is_refused() -> None:
    path = create_file(4096, "test-modes-")
    try:
        os.chmod(path, 0o644)
        with pytest.raises(holdfast.StorageError, match="was not created by Holdfast"):
            Arena(path, 4096)
    finally:
        unlink_file(path)


def test_a_text_is_private_before_it_has_its_name(tmp_path: Path) -> None:
    with umask(0):
        replace_text(str(tmp_path / "card"), b"x")
    assert stat.S_IMODE((tmp_path / "card").stat().st_mode) == 0o600


def test_attempts_have_names_nobody_can_guess() -> None:
    assert len({new_attempt() for _ in range(100)}) == 100
    assert re.fullmatch(r"\.attempt-[0-9a-f]{16}", new_attempt())
