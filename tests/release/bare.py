"""A bare virtual environment with nothing but the wheel: without torch, and with it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.house.sources import REPOSITORY

TRY_IT = Path(__file__).with_name("try_wheel.py")
CUDA_PACKAGES = REPOSITORY / "requirements" / "cuda_packages.py"


class BareEnvironment:
    """A fresh virtual environment of one Python."""

    def __init__(self, python: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder = folder
        _run([str(python), "-m", "venv", str(folder)])
        self._python = str(folder / "bin" / "python")
        self._pip("install", "--upgrade", "pip")  # older ones download a wheel to say what it needs

    def install(self, wheel: Path, torch: str = "") -> None:
        """Install the wheel with what it requires, and torch by its extra; check that the packages fit each other."""
        self._pip("install", *([f"{wheel}[torch]", torch] if torch else [str(wheel)]))
        self._pip("check")

    def cuda_packages(self, requirement: str) -> list[str]:
        """Return the CUDA packages that pip would install with a requirement, without downloading them."""
        return _run([self._python, str(CUDA_PACKAGES), "--list", requirement]).split()

    def try_wheel(self, golden: Path, *, torch: bool) -> None:
        """Use the installed package as try_wheel.py does; a failure ends the release."""
        work = self._folder / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        _run([self._python, "-I", str(TRY_IT), str(golden), json.dumps(torch)], cwd=work)

    def _pip(self, *arguments: str) -> None:
        _run([self._python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def _run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command and return what it prints; what fails ends the release with its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-6000:]}{done.stderr[-6000:]}")
    return done.stdout
