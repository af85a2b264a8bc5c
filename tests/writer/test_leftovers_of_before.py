"""What a writer of the releases before left is understood: its mailbox under a root, its arenas in memory."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.shared_memory import find_files, unlink_file
from holdfast.core.errors import Damaged
from holdfast.core.ranks import HOST_VARIABLE
from holdfast.storage.local import LocalStorage
from holdfast.writer.arena_card import Card, captured_sets, card_path, kept_states
from holdfast.writer.captured_checkpoint import captured_checkpoint
from holdfast.writer.in_flight import InFlight, saves_in_flight
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.startup_cleanup import clean_arenas, clean_storage, dead_attempts
from tests.writer import two_hosts
from tests.writer.conftest import RUN
from tests.writer.test_messages import GOLDEN
from tests.writer.two_hosts import ATTEMPT

GOLDEN_RUN = "a" * 32  # the root that the golden cards name
ONE_HOST = (0, 0)


@pytest.fixture
def mailbox(tmp_path: Path) -> Mailbox:
    """The mailbox of a save in flight, as the release before wrote it."""
    box = Mailbox(LocalStorage(tmp_path), ATTEMPT)
    box.make()
    for name, text in GOLDEN["published"]["notes"].items():
        if name not in ("outcome", "seen-1"):
            (tmp_path / box.folder / name).write_text(text)
    (tmp_path / ATTEMPT).mkdir()
    return box


def test_its_save_is_in_flight_until_it_is_silent(tmp_path: Path, mailbox: Mailbox) -> None:
    storage = LocalStorage(tmp_path)
    assert saves_in_flight(storage) == [InFlight(ATTEMPT, 3, 2, 0, 296, 2, "waiting for the capture")]
    dead = dead_attempts(storage, 0.05)
    assert dead == {mailbox.folder}
    assert clean_storage(storage, dead) == [ATTEMPT] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", ["published", "failed"])
def test_its_outcome_ends_the_save(tmp_path: Path, mailbox: Mailbox, case: str) -> None:
    (tmp_path / mailbox.folder / "outcome").write_text(GOLDEN[case]["notes"]["outcome"])
    assert saves_in_flight(LocalStorage(tmp_path)) == []
    assert dead_attempts(LocalStorage(tmp_path), 60.0) == {mailbox.folder}


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """The arenas and cards of a state that the release before captured and could not write."""
    monkeypatch.setenv(HOST_VARIABLE, "north")
    paths = [Path(f"/dev/shm/holdfast-{RUN}-{rank}-{2**22}-1-0-{secrets.token_hex(16)}") for rank in (0, 1)]
    for rank, path in enumerate(paths):
        two_hosts.fill_arena(path, rank, ONE_HOST)
        card = Path(card_path(str(path)))
        card.touch(0o600)
        text = GOLDEN["one host"]["cards"][f"arena-{rank}.card"]
        card.write_text(text.replace(f'"arena-{rank}"', f'"{path}"').replace(GOLDEN_RUN, RUN))
    yield paths
    for path in paths:
        unlink_file(str(path))
        unlink_file(card_path(str(path)))


def test_its_captured_state_is_a_checkpoint(arenas: list[Path]) -> None:
    (attempt, cards), *others = captured_sets(RUN).items()
    assert attempt == ATTEMPT and not others and [card.rank for card in cards] == [0, 1]
    checkpoint = captured_checkpoint(cards)
    assert checkpoint.verify().good and checkpoint.manifest.step == 3 and checkpoint.value("note") == {"a": 1}
    assert checkpoint.read("w").tolist() == two_hosts.MATRIX.tolist()
    (kept,) = kept_states(RUN)
    assert (kept.step, kept.size) == (3, sum(path.stat().st_size for path in arenas))


def test_its_memory_is_freed_on_its_host_only(arenas: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_VARIABLE, "south")
    assert captured_sets(RUN) == {} and clean_arenas(RUN) == []
    monkeypatch.setenv(HOST_VARIABLE, "north")
    assert clean_arenas(RUN) == [3, 3] and find_files(RUN) == []


def test_memory_that_changed_since_is_damaged(arenas: list[Path]) -> None:
    with arenas[0].open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff")
    cards = [Card.read(Path(card_path(str(path)))) for path in arenas]
    assert not captured_checkpoint(cards).verify().good
    with pytest.raises(Damaged, match="lack the card of rank 0"):
        captured_checkpoint(cards[1:])
