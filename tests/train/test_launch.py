"""Becoming a rank: devices, commands, and local ranks that can be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.train.launch import is_rank, local_ranks_command, pick_device, process_group, run_local_ranks
from holdfast.train.local_ranks import LocalRanks


def test_a_process_alone_needs_no_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not is_rank()
    with process_group(torch.device("cpu")):
        assert not torch.distributed.is_initialized()


def test_ranks_do_not_start_ranks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank()
    with pytest.raises(holdfast.InvalidArgument, match="--nproc"):
        run_local_ranks(2, ["train"])


def test_the_command_is_torchrun_and_this_package():
    command = local_ranks_command(3, ["train", "a.toml"])
    assert command[1:3] == ["-m", "torch.distributed.run"]
    assert command[command.index("--nproc-per-node") + 1] == "3"
    assert command[-4:] == ["-m", "holdfast", "train", "a.toml"]


def test_devices(monkeypatch: pytest.MonkeyPatch):
    assert pick_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(holdfast.InvalidArgument, match=r"train\.device=cpu"):
        pick_device("cuda")


def test_ranks_that_end_well_and_ranks_that_do_not(tmp_path: Path):
    ranks = LocalRanks(2, ["--version"], tmp_path / "good")
    ranks.finish(60)
    assert not ranks.alive()
    assert "holdfast" in (tmp_path / "good" / "rank-1.log").read_text()
    with pytest.raises(holdfast.PeerFailed, match=r"(?s)exited with 2.*No such command"):
        LocalRanks(1, ["nonsense"], tmp_path / "bad").finish(60)


_LONG = (
    "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(7)); print('ready', flush=True); time.sleep(99)"
)
_PARENT = """
import sys
from holdfast.train import launch
launch.local_ranks_command = lambda count, arguments: [sys.executable, "-c", arguments[0]]
sys.exit(launch.run_local_ranks(2, sys.argv[1:]))
"""


def _catches(process: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    (line,) = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) & 1 << number - 1)


def test_what_ends_the_parent_ends_the_ranks(tmp_path: Path):
    """`kill` of `holdfast train --nproc`: nothing trains on behind its back, and it waits until they are gone."""
    quiet = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, _LONG], stdout=subprocess.PIPE, text=True, env=quiet)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    end = time.monotonic() + 60
    while not _catches(parent.pid, signal.SIGTERM):  # it begins to listen after it has started the ranks
        assert time.monotonic() < end
        time.sleep(0.01)
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(90) == 128 + signal.SIGTERM
    assert parent.stdout.read() == "", "the pipe is closed: whoever had the other end is gone"
    parent.stdout.close()


def test_a_killed_rank_is_told_of_and_late_ones_are_ended(tmp_path: Path):
    ranks = LocalRanks(1, ["top", str(tmp_path / "never"), "--interval", "99"], tmp_path / "logs")
    ranks.kill(0)
    with pytest.raises(holdfast.PeerFailed, match="exited with -9"):
        ranks.finish(60)
