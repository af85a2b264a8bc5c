"""Whose folders a root may hold, and which links are followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import Damaged, InvalidArgument
from holdfast.storage import trust_check
from holdfast.storage.local import LocalStorage
from holdfast.storage.memory import MemoryStorage
from tests.users import NOBODY, as_user, require_root, shared_folder

ME, OTHER, THIRD = 54321, 54322, 54323
ENTRIES = ("step-1", "step-1/holdfast.json")


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder of the superuser that others may enter, as /mnt/volume is."""
    require_root()
    with shared_folder() as folder:
        folder.chmod(0o755)
        yield folder


def made(root: Path, mode: int, owner: int, step: int | None = None, *, step_mode: int = 0o755) -> Path:
    """A root of a mode and an owner, and a step in it of another owner."""
    folder = root / "step-1"
    folder.mkdir(parents=True)
    (folder / "holdfast.json").touch()
    for path in (folder, folder / "holdfast.json"):
        os.chown(path, owner if step is None else step, NOBODY)
    folder.chmod(step_mode)
    os.chown(root, owner, NOBODY)
    root.chmod(mode)
    return root


def judged(root: Path, user: int = ME) -> str:
    """What a user hears of step-1 under a root; "None" if it is trusted."""
    return as_user(user, lambda: trust_check(LocalStorage(root))("step-1"))


# Reader, owner and mode of the root, owner of the step: ordinary use that must go on.
TRUSTED = {
    "one user": (ME, ME, 0o700, ME),
    "a shared root, an own step": (ME, ME, 0o2775, ME),
    "a root of the superuser's, an own step": (ME, 0, 0o1777, ME),
    "the superuser wrote it (a pod as root before)": (ME, 0, 0o755, 0),
    "the superuser wrote into a shared root": (ME, ME, 0o777, 0),
    "the superuser reads what a user wrote": (0, OTHER, 0o700, OTHER),
    "the superuser reads a user's shared root": (0, OTHER, 0o2775, OTHER),
    "another user reads a run that is somebody's own": (ME, OTHER, 0o755, OTHER),
    "a volume whose files have no owner here": (ME, NOBODY, 0o755, NOBODY),
    "squashed: the superuser's files look like nobody's": (0, NOBODY, 0o700, NOBODY),
    "copied with its owners into a closed root": (ME, ME, 0o755, OTHER),
    "a closed volume of the superuser's": (ME, 0, 0o755, OTHER),
}
REFUSED = {
    "a stranger's step in an open root": (ME, ME, 0o777, OTHER),
    "a stranger's step in a sticky root": (ME, ME, 0o1777, OTHER),
    "a member's step in a group's root": (ME, ME, 0o2775, OTHER),
    "a stranger's step in the superuser's open root": (ME, 0, 0o1777, OTHER),
    "the superuser in an open root": (0, 0, 0o1777, OTHER),
    "a third user's step in another's group root": (ME, OTHER, 0o775, THIRD),
    "nobody's step in an own open root": (ME, ME, 0o777, NOBODY),
}


@pytest.mark.parametrize("case", TRUSTED.values(), ids=TRUSTED)
def test_ordinary_use_is_trusted(top: Path, case: tuple[int, int, int, int]) -> None:
    reader, owner, mode, step = case
    assert judged(made(top / "run", mode, owner, step), reader) == "None"


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_others_may_have_planted_is_refused(top: Path, case: tuple[int, int, int, int]) -> None:
    reader, owner, mode, step = case
    answer = judged(made(top / "run", mode, owner, step), reader)
    assert answer.startswith(f"Untrusted: {top}/run/step-1 belongs to ")
    assert f"uid {step}" in answer and f"set HOLDFAST_TRUST_OWNERS={step}" in answer
    assert ("container or NFS" in answer) == (step == NOBODY)


def test_a_root_that_a_stranger_made_first_is_refused(top: Path) -> None:
    """A predictable root in /tmp, full of steps before its user comes."""
    top.chmod(0o1777)
    for mode in (0o755, 0o777):
        root = made(top / f"run-{mode:o}", mode, OTHER)
        assert f"HOLDFAST_TRUST_OWNERS={OTHER}" in judged(root)
        assert f"HOLDFAST_TRUST_OWNERS={OTHER}" in judged(root, 0)
    assert judged(made(top / "mine", 0o755, ME)) == "None"
    assert judged(made(top / "of-root", 0o755, 0)) == "None"


def test_a_root_that_is_a_link_is_judged_where_it_leads(top: Path) -> None:
    (top / "open").mkdir()
    (top / "open").chmod(0o1777)
    made(top / "open" / "run", 0o755, OTHER)
    (top / "run").symlink_to(top / "open" / "run")
    assert f"HOLDFAST_TRUST_OWNERS={OTHER}" in judged(top / "run")


def test_a_manifest_that_a_stranger_put_into_an_open_step_is_refused(top: Path) -> None:
    root = made(top / "run", 0o777, ME, step_mode=0o777)
    assert judged(root) == "None"
    os.chown(root / "step-1" / "holdfast.json", OTHER, OTHER)
    assert judged(root).startswith(f"Untrusted: {root}/step-1/holdfast.json belongs to ")


@pytest.mark.parametrize("value", [f"{OTHER}", f"7, {OTHER} ,8", "*", f"nobody,{OTHER}"])
def test_an_owner_that_is_named_is_trusted(top: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOLDFAST_TRUST_OWNERS", value)
    assert judged(made(top / "run", 0o777, ME, OTHER)) == "None"


@pytest.mark.parametrize("value", [f"{THIRD}", "", " , ", "nobody"])
def test_others_are_not(top: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HOLDFAST_TRUST_OWNERS", value)
    assert "Untrusted" in judged(made(top / "run", 0o777, ME, OTHER))


def test_a_name_that_is_no_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_TRUST_OWNERS", "no-such-user")
    with pytest.raises(InvalidArgument, match="unknown user 'no-such-user'"):
        trust_check(LocalStorage(tmp_path))


def test_the_user_behind_sudo_is_trusted_by_the_superuser_alone(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = made(top / "run", 0o1777, 0, OTHER)
    monkeypatch.setenv("SUDO_UID", str(OTHER))
    assert judged(root, 0) == "None"
    assert "Untrusted" in judged(root, ME)


@pytest.mark.raises_nothing
def test_other_storages_have_no_owners(tmp_path: Path) -> None:
    trust_check(MemoryStorage())("step-1")
    trust_check(LocalStorage(tmp_path / "none"))("step-1")


# Links.


def linked(top: Path, place: Path) -> Path:
    """A root of ME with step-1 as a link to a folder of ME's in a place."""
    root = made(top / "run", 0o700, ME)
    place.mkdir(parents=True, exist_ok=True)
    os.chown(place, ME, ME)
    (root / "step-1").rename(place / "target")
    (root / "step-1").symlink_to(place / "target")
    os.lchown(root / "step-1", ME, ME)
    return root


def test_a_link_to_a_place_of_this_user_is_followed(top: Path) -> None:
    assert judged(linked(top, top / "scratch")) == "None"


def test_a_relative_link_within_the_root_is_followed(top: Path) -> None:
    root = made(top / "run", 0o700, ME)
    (root / "step-1").rename(root / "kept")
    (root / "step-1").symlink_to("kept")
    assert judged(root) == "None"


@pytest.mark.parametrize("what", ["target", "place", "above"])
def test_a_link_through_a_strangers_folder_is_not_followed(top: Path, what: str) -> None:
    root = linked(top, top / "above" / "place")
    changed = {"target": top / "above/place/target", "place": top / "above/place", "above": top / "above"}[what]
    os.chown(changed, OTHER, OTHER)
    answer = judged(root)
    assert answer.startswith(f"Untrusted: {root}/step-1 is a symbolic link to {top}/above/place/target, and {changed} ")
    assert f"HOLDFAST_TRUST_OWNERS={OTHER}" in answer


def test_a_link_through_a_folder_that_everyone_may_change_is_not_followed(top: Path) -> None:
    root = linked(top, top / "place")
    (top / "place").chmod(0o777)
    assert f"chmod o-w {top}/place" in judged(root)
    (top / "place").chmod(0o1777)
    assert judged(root) == "None"  # as in /tmp: nobody but its owner may replace the target


def test_a_strangers_link_in_an_open_root_is_not_followed(top: Path) -> None:
    root = linked(top, top / "scratch")
    root.chmod(0o777)
    assert judged(root) == "None"
    os.lchown(root / "step-1", OTHER, OTHER)
    assert f"HOLDFAST_TRUST_OWNERS={OTHER}" in judged(root)


@pytest.mark.parametrize(
    ("target", "why"), [("none", "does not exist"), ("step-1", "does not exist"), ("file", "not a folder")]
)
def test_a_link_that_leads_nowhere_says_so(tmp_path: Path, target: str, why: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "step-1").symlink_to(target)
    with pytest.raises(Damaged, match=why):
        trust_check(LocalStorage(tmp_path))("step-1")


def test_checking_a_closed_root_costs_one_call_for_each_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of steps are checked at every save and restore."""
    tmp_path.chmod(0o700)
    for number in range(50):
        (tmp_path / f"step-{number}").mkdir()
    require = trust_check(LocalStorage(tmp_path))
    calls: list[object] = []

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(arguments)
            return original(*arguments, **options)

        return call

    for name in ("stat", "lstat"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    for number in range(50):
        require(f"step-{number}")
    assert len(calls) <= 50
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", [".catalog", ".policy", ".tags"])
def test_a_file_of_a_stranger_in_a_folder_that_a_run_goes_by_is_refused(top, name):
    root = made(top / "run", 0o2775, ME)
    folder = root / name
    folder.mkdir()
    (folder / "file.json").write_text("{}")
    os.chown(folder, ME, NOBODY)
    os.chown(folder / "file.json", OTHER, NOBODY)
    folder.chmod(0o2775)

    def look() -> None:
        trust_check(LocalStorage(root))(name)

    assert "file.json belongs to" in as_user(ME, look)
    os.chown(folder / "file.json", ME, NOBODY)
    assert as_user(ME, look) == "None"
