"""Memory: arenas that ended runs left count as room that can be freed; the limits of a real process."""

import os
import secrets

import pytest

from holdfast.checkpoint.shared_memory import Arena, create_file, unlink_file
from holdfast.doctor import memory_checks
from holdfast.doctor.diagnosis import Verdict
from holdfast.doctor.run_needs import RunNeeds
from tests.doctor.containers import bare_python, doctor, without_locking


def needs(size):
    return RunNeeds(size, 1, 1, "step 4")


def free():
    status = os.statvfs("/dev/shm")
    return status.f_bavail * status.f_frsize


def test_memory_of_ended_runs_is_named_and_that_of_living_ones_counts_as_room():
    room = free()
    path = create_file(64 << 20, f"{secrets.token_hex(16)}-0-1-1-1-", in_memory=True)
    wanted = needs(room - (32 << 20))
    try:
        left = memory_checks.check_shared_memory(wanted)
        arena = Arena(path, 64 << 20, hold=True)
        held = memory_checks.check_shared_memory(wanted)
        arena.close()
    finally:
        unlink_file(path)
    assert (left.verdict, left.commands) == (Verdict.CHANGE, ("holdfast arenas", "holdfast arenas --free all"))
    assert "ended runs left" in left.remedy
    assert held.verdict is Verdict.OK


def test_too_small_for_the_state_is_a_change_with_a_size_that_is_enough():
    finding = memory_checks.check_shared_memory(needs(900 * 10**12))
    assert finding.verdict is Verdict.CHANGE
    assert "900.00 TB" in finding.text
    assert "docker run --shm-size=1080000g ..." in finding.commands


def test_a_missing_shared_memory_is_a_change(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_checks, "SHARED_MEMORY", tmp_path / "none")
    finding = memory_checks.check_shared_memory(needs(10**9))
    assert finding.verdict is Verdict.CHANGE
    assert "mount -t tmpfs -o size=2g" in finding.commands[0]


def limited(tmp_path, monkeypatch, groups, files):
    (tmp_path / "own").write_text(groups)
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(memory_checks, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory_checks, "CONTROL_GROUPS", tmp_path / "groups")
    return memory_checks.check_memory_limit(needs(80 * 10**9))


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        ("0::/\n", {"memory.max": "64000000000\n"}),
        ("0::/job/step\n", {"job/memory.max": "64000000000\n", "job/step/memory.max": "max\n"}),
        ("0::/of/the/host\n", {"memory.max": "64000000000\n"}),
        ("4:cpu,memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "64000000000\n"}),
    ],
)
def test_a_memory_limit_below_the_state_is_a_change(tmp_path, monkeypatch, groups, files):
    finding = limited(tmp_path, monkeypatch, groups, files)
    assert finding.verdict is Verdict.CHANGE
    assert "64.00 GB" in finding.text and "80.00 GB" in finding.text
    assert finding.remedy == "allow 96 GB on top of what training takes"
    assert "Kubernetes: resources.limits.memory" in finding.commands


@pytest.mark.parametrize(
    ("groups", "files", "text"),
    [
        ("0::/\n", {}, "none"),
        ("0::/\n", {"memory.max": "max\n"}, "none"),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "none"),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": "96000000000\n"}, "96.00 GB"),
    ],
)
def test_a_memory_limit_that_is_enough_or_not_there_is_ok(tmp_path, monkeypatch, groups, files, text):
    finding = limited(tmp_path, monkeypatch, groups, files)
    assert finding.verdict is Verdict.OK
    assert text in finding.text


def test_a_memory_limit_that_leaves_little_beside_the_state_is_a_note(tmp_path, monkeypatch):
    finding = limited(tmp_path, monkeypatch, "0::/\n", {"memory.max": "80000000001\n"})
    assert finding.verdict is Verdict.NOTE
    assert finding.remedy == "allow 96 GB on top of what training takes"


def test_the_limit_of_locked_memory_counts_for_gpus_only_and_against_the_state(tmp_path):
    python = bare_python(tmp_path / "bare")
    for arguments, kilobytes, verdict in (
        ([], 64, "ok"),
        (["--gpu", "--state", "60kB"], 64, "ok"),
    ):
        _, found = doctor(*arguments, python=python, limits=without_locking(kilobytes))
        assert found["page-locking"]["verdict"] == verdict, (arguments, found["page-locking"])
