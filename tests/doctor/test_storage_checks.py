"""Storage: kinds of file systems and their options, and what is measured on the real ones of this machine."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.doctor import storage_checks
from holdfast.doctor.diagnosis import Verdict
from holdfast.doctor.mounts import Mount
from holdfast.doctor.run_needs import RunNeeds
from holdfast.storage import linux
from holdfast.storage.local import LocalStorage
from tests.users import NOBODY, as_user

NEEDS = RunNeeds(1000, 1, 1, "step 4")


def mount(kind, *options, source="server:/a"):
    return Mount("/data", kind, source, frozenset(options))


@pytest.mark.parametrize(
    ("found", "verdict", "text"),
    [
        (mount("ext4", "rw"), Verdict.OK, "ext4"),
        (mount("ext4", "ro"), Verdict.CHANGE, "read-only"),
        (mount("tmpfs", "rw"), Verdict.CHANGE, "lost with this host"),
        (mount("overlay", "rw"), Verdict.CHANGE, "deleted with the container"),
        (mount("nfs4", "rw", "hard", "local_lock=none"), Verdict.OK, "network file system with locks"),
        (mount("nfs", "rw", "nolock"), Verdict.CHANGE, "nolock"),
        (mount("nfs4", "rw", "local_lock=all"), Verdict.CHANGE, "local_lock=all"),
        (mount("nfs4", "rw", "soft"), Verdict.CHANGE, "failed write"),
        (mount("lustre", "rw", "flock"), Verdict.OK, "network file system with locks"),
        (mount("lustre", "rw", "localflock"), Verdict.CHANGE, "without flock"),
        (mount("cifs", "rw", "nobrl"), Verdict.CHANGE, "nobrl"),
        (mount("fuse.s3fs", "rw"), Verdict.CHANGE, "neither atomic renames nor locks"),
        (mount("fuse", "rw", source="mountpoint-s3"), Verdict.CHANGE, "neither atomic renames nor locks"),
        (mount("exfat", "rw"), Verdict.CHANGE, "no atomic renames"),
        (mount("virtiofs", "rw"), Verdict.NOTE, "measurements"),
        (None, Verdict.NOTE, "not known"),
    ],
)
def test_kinds_of_file_systems_and_their_options(found, verdict, text):
    finding = storage_checks._check_kind(Path("/data/run"), found)
    assert finding.verdict is verdict
    assert text in finding.text
    assert bool(finding.remedy) == (verdict is Verdict.CHANGE)


def by_check(root, needs=NEEDS):
    return {finding.check: finding for finding in storage_checks.check_storage(LocalStorage(root), needs)}


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path):
    found = by_check(tmp_path / "a" / "b")
    assert str(tmp_path) in found["file system"].text
    assert found["fsync, rename, lock"].verdict is Verdict.OK
    assert found["time of the file system"].verdict is Verdict.OK
    assert not [*tmp_path.iterdir()]


def test_free_space_is_compared_with_one_more_step(tmp_path):
    assert "more steps (step 4)" in by_check(tmp_path)["free space"].text
    full = by_check(tmp_path, RunNeeds(10**18, 1, 1, "step 4"))["free space"]
    assert full.verdict is Verdict.CHANGE
    assert f"holdfast gc {tmp_path} --keep 'last(2)' --dry-run" in full.commands


def test_free_space_that_a_file_system_does_not_say_is_a_note(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=1))
    assert by_check(tmp_path)["free space"].verdict is Verdict.NOTE


def test_a_folder_of_another_user_cannot_be_written(tmp_path):
    def judge():
        finding = by_check(tmp_path)["root"]
        return f"{finding.verdict.value}: {finding.text}"

    tmp_path.chmod(0o755)
    assert as_user(NOBODY, judge).startswith("change: ")


def test_a_file_system_without_locks_or_with_another_time_is_found(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(linux, "lock", lambda *_, **__: True)
        assert "no locks" in by_check(tmp_path)["fsync, rename, lock"].text
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: os.stat(tmp_path).st_mtime + 60)
        finding = by_check(tmp_path)["time of the file system"]
    assert finding.verdict is Verdict.CHANGE
    assert "60 s older" in finding.text or "59 s older" in finding.text


def test_a_file_is_no_root(tmp_path):
    (tmp_path / "file").write_text("")
    assert "not a folder" in by_check(tmp_path / "file")["root"].text
