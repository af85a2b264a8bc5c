"""The Pythons of this machine that a release is tried with: on the PATH, and those of pyenv."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")


def find(versions: tuple[str, ...] = VERSIONS) -> dict[str, Path]:
    """Return one interpreter for each version that is found."""
    found = {version: _first_that_runs(version) for version in versions}
    return {version: path for version, path in found.items() if path is not None}


def _first_that_runs(version: str) -> Path | None:
    """Return the first interpreter that says it is this version: a shim of pyenv may stand for none."""
    return next((path for path in _candidates(version) if _version_of(path) == version), None)


def _candidates(version: str) -> list[Path]:
    folders = os.environ.get("PATH", "").split(os.pathsep)
    on_path = [shutil.which(f"python{version}", path=folder) for folder in folders]
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    return [*map(Path, filter(None, on_path)), *sorted(root.glob(f"versions/{version}.*/bin/python{version}"))]


def _version_of(path: Path) -> str | None:
    code = "import ensurepip, venv, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(path), "-I", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
