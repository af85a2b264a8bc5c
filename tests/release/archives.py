"""Build the sdist and the wheel, and check what is in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from holdfast.version import __version__

# What belongs to the repository only.
LEFT_OUT = (".ci/", ".github/", ".gitignore")


def build(repository: Path, target: Path) -> tuple[Path, Path]:
    """Build the sdist, and the wheel from it; returns both paths. The target folder is emptied before."""
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(repository)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    sdist, wheel = target / f"holdfast-{__version__}.tar.gz", target / f"holdfast-{__version__}-py3-none-any.whl"
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)], check=True, timeout=120
    )
    return sdist, wheel


def files_of_sdist(sdist: Path) -> list[str]:
    """Return the files of an sdist, without its top folder."""
    with tarfile.open(sdist) as archive:
        return [member.name.partition("/")[2] for member in archive if member.isfile()]


def files_of_wheel(wheel: Path) -> list[str]:
    """Return the files of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def find_problems(tracked: Iterable[str], sdist: Iterable[str], wheel: Iterable[str]) -> Iterator[str]:
    """Yield a line for each file that is missing in an archive, or does not belong there."""
    packed, installed = set(sdist), set(wheel)
    for name in sorted(tracked):
        if not name.startswith(LEFT_OUT) and name not in packed:
            yield f"the sdist lacks {name}: add it to MANIFEST.in"
        if name.startswith("src/") and name.removeprefix("src/") not in installed:
            yield f"the wheel lacks {name.removeprefix('src/')}"
    for name in sorted(installed):
        if not name.startswith(("holdfast/", "holdfast-")):
            yield f"the wheel has {name}, which is not of the package"
