"""Checks of software and devices: torch as another process sees it, the GPUs of the machine, the clock."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from holdfast.doctor.diagnosis import Diagnosis

TORCH_AT_LEAST = (2, 11)
_NEEDED = ".".join(map(str, TORCH_AT_LEAST))
_TORCH_TIMEOUT_S = 120
_ASK_TORCH = """
import json, sys, warnings
warnings.simplefilter("ignore")
try:
    import torch
except ModuleNotFoundError as error:
    print(json.dumps({"missing": error.name == "torch", "problem": str(error)}))
    sys.exit()
except Exception as error:
    print(json.dumps({"missing": False, "problem": f"{type(error).__name__}: {error}"}))
    sys.exit()
built = torch.version.cuda or torch.version.hip
print(json.dumps({"version": torch.__version__, "built": built, "gpus": torch.cuda.device_count()}))
"""
_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of struct timex
_TIMEX_BYTES, _STATUS_OFFSET = 256, 40  # of the struct with some room to spare, on 64 bits


@dataclass(frozen=True, slots=True)
class InstalledTorch:
    """The torch that is installed, as it describes itself. `problem` says why it cannot be imported."""

    version: str = ""
    built: str | None = None
    gpus: int = 0
    missing: bool = False
    problem: str = ""

    @staticmethod
    def ask() -> InstalledTorch:
        """Import torch in a process of its own, which may take seconds or crash."""
        try:
            done = subprocess.run(  # noqa: S603  (this interpreter, with a program of this module)
                [sys.executable, "-c", _ASK_TORCH],
                capture_output=True,
                text=True,
                timeout=_TORCH_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return InstalledTorch(problem=f"its import takes longer than {_TORCH_TIMEOUT_S} s")
        try:
            return InstalledTorch(**json.loads(done.stdout.splitlines()[-1]))
        except (IndexError, ValueError, TypeError):
            return InstalledTorch(problem=f"its import ends the process (exit code {done.returncode})")


def check_torch(torch: InstalledTorch) -> Diagnosis:
    check, install = "torch", f"pip install 'torch>={_NEEDED}'"
    without = "show, ls, verify, convert and other commands work without it"
    if torch.missing:
        return Diagnosis.change(check, f"not installed: nothing is saved or loaded; {without}", "install it", install)
    if torch.problem:
        return Diagnosis.change(check, f"cannot be imported: {torch.problem}", "install it again", install)
    numbers = tuple(map(int, re.findall(r"\d+", torch.version)[:2]))
    if numbers < TORCH_AT_LEAST:
        return Diagnosis.change(
            check, f"{torch.version} is older than {_NEEDED}, the oldest that Holdfast supports", "update it", install
        )
    return Diagnosis.ok(check, f"{torch.version}, {torch.built or 'built for the CPU'}")


def gpus_of_machine() -> int:
    """Return the number of GPUs whose driver is loaded, without torch: NVIDIA's, or AMD's."""
    nvidia = len([*Path("/proc/driver/nvidia/gpus").glob("*")])
    nvidia = nvidia or len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])
    return nvidia or (len([*Path("/dev/dri").glob("renderD*")]) if Path("/dev/kfd").exists() else 0)


def check_gpus(torch: InstalledTorch, found: int) -> Diagnosis:
    """Compare the GPUs of the machine with those that torch can use."""
    check = "GPUs"
    if torch.gpus:
        return Diagnosis.ok(check, f"{torch.gpus}, which torch can use")
    if not found:
        return Diagnosis.ok(check, "none in this machine: training and saves use the CPU")
    if not torch.version:
        return Diagnosis.note(check, f"{found}; whether torch can use them is not known without torch")
    if torch.built is None:
        return Diagnosis.change(
            check,
            f"{found}, but torch {torch.version} is built for the CPU",
            "install a build of torch for them",
            f"pip uninstall torch; pip install 'torch>={_NEEDED}'",
        )
    return Diagnosis.change(
        check,
        f"{found}, but torch (built for {torch.built}) can use none",
        "give the container its GPUs, clear CUDA_VISIBLE_DEVICES, or update the driver",
        "nvidia-smi",
        "docker run --gpus all ...",
    )


def check_clock(*, shared: bool) -> Diagnosis:
    """Ask the kernel whether a time service keeps its clock right. Hosts that share a root compare ages by it."""
    check = "clock"
    is_synchronized = _is_synchronized()
    if is_synchronized is None:
        return Diagnosis.note(check, "the system does not say whether it is synchronized (NTP)")
    if is_synchronized:
        return Diagnosis.ok(check, "synchronized (NTP)")
    commands = ("timedatectl set-ntp true", "systemctl enable --now chronyd", "chronyc tracking")
    remedy = "start a time service on the host; a container has the clock of its host"
    if shared:
        why = "hosts that share a root judge the age of steps and of uploads by it"
        return Diagnosis.change(check, f"not synchronized (NTP): {why}", remedy, *commands)
    return Diagnosis.note(
        check, "not synchronized (NTP); that is harmless for a run on a single host", remedy, *commands
    )


def _is_synchronized() -> bool | None:
    """Return the kernel's answer; None if it gives none."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "adjtimex"):
        return None
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)  # no mode is set: the call only reads
    if libc.adjtimex(buffer) < 0:
        return None
    return not ctypes.c_int.from_buffer(buffer, _STATUS_OFFSET).value & _UNSYNCHRONIZED
