"""The fuzzer finds nothing in the parsers, and finds what is put into a broken one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.errors import Damaged
from tests.fuzz import runner
from tests.fuzz.__main__ import run
from tests.fuzz.runner import judge_in_child, minimized
from tests.fuzz.targets import TARGETS, Target

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_the_parsers_stand_three_seconds(tmp_path: Path) -> None:
    total = run(TARGETS, 3.0, seed=7, out=tmp_path, quiet=True)
    assert total.findings == []
    assert total.executions > 200
    assert total.grown_bytes < runner.MEMORY_BYTES
    assert {name for name, _ in total.fresh} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_the_seeds_are_good_inputs(name: str) -> None:
    for seed in TARGETS[name].seeds:
        assert TARGETS[name].parse(seed) is not None


def test_a_manifest_that_is_changed_and_signed_again_is_refused_behind_its_digest() -> None:
    target = TARGETS["manifest"]
    fields = json.loads(target.unseal(target.seeds[0]))
    fields["step"] = -1
    with pytest.raises(Damaged, match="step is '-1'"):
        target.parse(target.seal(json.dumps(fields, separators=(",", ":")).encode()))


def broken(data: bytes) -> object:
    """A parser with one bug of each kind, behind bytes that mutations come upon."""
    if b"9" * 50 in data:
        while True:
            pass
    if b"[" * 20 in data:
        return bytearray(10 << 30)
    if data.count(b'"') % 2:
        raise KeyError("a bug")
    raise Damaged("refused")


def test_a_crash_a_hang_and_a_memory_blow_up_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "INPUT_S", 0.1)
    monkeypatch.setattr("tests.fuzz.__main__.minimized", lambda target, found: minimized(target, found, 0.5))
    target = Target("index", (b'{"a":[1,2,{"b":null}],"c":"x"}',), broken)
    total = run({"index": target}, 4.0, seed=1, out=tmp_path, quiet=True)
    assert {found.kind for found in total.findings} == {"crash", "hang", "memory"}
    assert {path.name.split("-")[1] for path in tmp_path.iterdir()} == {"crash", "hang", "memory"}


def test_a_finding_is_made_small() -> None:
    target = Target("index", (b"",), broken)
    found = judge_in_child(target, b'{"a": "and much more that has nothing to do with it}')
    assert found is not None and found.kind == "crash"
    assert minimized(target, found, 5.0).data == b'"'


def test_a_parser_that_kills_its_process_is_found() -> None:
    target = Target("index", (b"",), lambda data: os.kill(os.getpid(), signal.SIGKILL))
    found = judge_in_child(target, b"x")
    assert found is not None and (found.kind, found.data) == ("crash", b"x")


def test_a_saved_input_is_played_again(tmp_path: Path) -> None:
    path = tmp_path / "header-crash-0"
    path.write_bytes(b"\0" * 9)
    command = [sys.executable, "-m", "tests.fuzz", "--replay", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert (done.returncode, done.stdout) == (0, f"{path}: refused or read, as it should be\n")
