"""Say if pip would bring CUDA packages to a machine without a GPU, and how to take torch's build for the CPU.

python requirements/cuda_packages.py -r requirements/torch.txt        print a notice, if there is a reason for one
python requirements/cuda_packages.py --list "torch==2.13.0"           print the CUDA packages, one a line

Needs nothing but pip. Nothing is downloaded but the names of what would be installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

NOTICE = """
This machine has no NVIDIA GPU, and pip would install torch with {count} CUDA packages: several GB.
PyTorch's build for the CPU is much smaller. To take it, stop this (Ctrl-C), choose "Pip" and "CPU" at
https://pytorch.org/get-started/locally and give the address that is shown behind --index-url:

    make demo TORCH_INDEX=ADDRESS    (or another target, the first time)
"""
WAIT_S = 10


def cuda_packages(arguments: list[str]) -> list[str]:
    """Return the CUDA packages that pip would install for the arguments; none if pip cannot say."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        names = [entry["metadata"]["name"] for entry in json.loads(done.stdout)["install"]]
    except (subprocess.SubprocessError, ValueError, KeyError):
        return []  # the install itself will say what is wrong
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-")))


def has_gpu() -> bool:
    """Return whether the machine has an NVIDIA GPU with a driver."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/proc/driver/nvidia/version").exists()


def main() -> None:
    """Print the packages, or the notice; in a terminal leave time to read it."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["--list"]:
        print("\n".join(cuda_packages(arguments[1:])))
        return
    packages = [] if has_gpu() else cuda_packages(arguments)
    if packages:
        print(NOTICE.format(count=len(packages)), flush=True)
        if sys.stdin.isatty():
            print(f"Going on in {WAIT_S} s.", flush=True)
            time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
