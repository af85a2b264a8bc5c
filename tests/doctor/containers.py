"""Small containers for tests: mounts of their own, limits and capabilities taken, an interpreter without torch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import holdfast

WITHOUT_TORCH = ("numpy", "numpy.libs", "ml_dtypes", "xxhash", "rich", "click", "pygments", "markdown_it", "mdurl")


def _refused() -> str:
    """Why no mounts of its own can be made here, "" if they can."""
    try:
        done = subprocess.run(
            ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unshare: {error}"
    return done.stderr.strip() or f"unshare ended with {done.returncode}" if done.returncode else ""


def bare_python(folder: Path) -> Path:
    """An interpreter with everything that Holdfast requires, and no torch: a virtual environment with links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
    (site,) = (folder / "lib").glob("python*/site-packages")
    installed = Path(numpy.__file__).parents[1]
    for name in WITHOUT_TORCH:
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return folder / "bin" / "python"


def doctor(*arguments, inside="", python=sys.executable, limits=()):
    """Run `holdfast doctor --json` in mounts of its own, after the shell commands `inside`; its exit code, by check."""
    reason = _refused() if inside else ""
    if reason:
        pytest.skip(f"no mounts of its own are allowed here: {reason}")
    program = [*limits, str(python), "-m", "holdfast", "doctor", "--json", *map(str, arguments)]
    if inside:
        program = ["unshare", "--mount", "sh", "-ec", f'{inside}\nexec "$@"', "sh", *program]
    source = str(Path(holdfast.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(program, capture_output=True, text=True, timeout=150, check=False, env=environment)
    assert done.stdout, done.stderr
    return done.returncode, {finding["check"]: finding for finding in json.loads(done.stdout)}


def without_locking(size_kb):
    """A command that takes the right to lock memory from the program that follows: at most this many kilobytes."""
    if os.getuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv to take a capability away with")
    caps = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"] if os.getuid() == 0 else []
    return ("sh", "-c", f'ulimit -l {size_kb} && exec "$@"', "sh", *caps)
