"""torch as a process of its own sees it, GPUs against what torch can use, and the clock."""

import re
from pathlib import Path

from holdfast.doctor import software_checks
from holdfast.doctor.diagnosis import Verdict
from holdfast.doctor.software_checks import InstalledTorch, check_clock, check_gpus, check_torch

CPU = InstalledTorch(version="2.13.0+cpu")
CUDA = InstalledTorch(version="2.13.0", built="13.0")


def test_the_oldest_torch_is_that_of_the_package():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert set(re.findall(r'"torch>=([\d.]+)"', text)) == {".".join(map(str, software_checks.TORCH_AT_LEAST))}


def test_a_torch_that_crashes_is_a_change(monkeypatch):
    monkeypatch.setattr(software_checks, "_ASK_TORCH", "import os; os.kill(os.getpid(), 11)")
    finding = check_torch(InstalledTorch.ask())
    assert finding.verdict is Verdict.CHANGE
    assert "ends the process" in finding.text


def test_versions_of_torch():
    assert check_torch(CPU).verdict is Verdict.OK
    assert check_torch(InstalledTorch(version="2.10.1")).verdict is Verdict.CHANGE
    assert check_torch(InstalledTorch(version="3.0.0a1")).verdict is Verdict.OK
    assert "libcudart" in check_torch(InstalledTorch(problem="OSError: libcudart.so.13")).text


def test_gpus_that_torch_cannot_use_are_a_change():
    assert check_gpus(CPU, 0).verdict is Verdict.OK
    assert "built for the CPU" in check_gpus(CPU, 8).text
    assert check_gpus(CPU, 8).verdict is Verdict.CHANGE
    assert check_gpus(CUDA, 8).commands[0] == "nvidia-smi"
    assert check_gpus(InstalledTorch(version="2.13.0", built="13.0", gpus=8), 8).verdict is Verdict.OK
    assert check_gpus(InstalledTorch(missing=True), 8).verdict is Verdict.NOTE


def test_an_unsynchronized_clock_matters_where_hosts_share_a_root(monkeypatch):
    assert software_checks._is_synchronized() in (True, False)
    for answer, shared, verdict in (
        (True, True, Verdict.OK),
        (False, True, Verdict.CHANGE),
        (False, False, Verdict.NOTE),
        (None, True, Verdict.NOTE),
    ):
        monkeypatch.setattr(software_checks, "_is_synchronized", lambda answer=answer: answer)
        assert check_clock(shared=shared).verdict is verdict
