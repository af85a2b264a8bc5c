"""The tag of a release: only of a clean tree, and of a version that the changelog and the citation name."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from holdfast.version import __version__


def find_problems(repository: Path, version: str = __version__) -> list[str]:
    """Return a line for each reason why the commit of a repository cannot be tagged as a version."""
    problems = []
    heading = re.search(rf"^## {re.escape(version)}\b(.*)$", _read(repository / "CHANGELOG.md"), re.MULTILINE)
    if heading is None:
        problems.append(f"CHANGELOG.md has no section '## {version}'")
    elif "unreleased" in heading[1]:
        problems.append(f"CHANGELOG.md calls {version} unreleased: write the date in its place")
    if f'version: "{version}"' not in _read(repository / "CITATION.cff").splitlines():
        problems.append(f"CITATION.cff has no line 'version: \"{version}\"'")
    if _git(repository, "status", "--porcelain"):
        problems.append("the tree is not clean: commit or remove what `git status` lists")
    if _git(repository, "tag", "--list", name_of(version)):
        problems.append(f"the tag {name_of(version)} exists: raise the version in src/holdfast/version.py")
    return problems


def make(repository: Path, version: str = __version__) -> str:
    """Tag the commit, and return the name of the tag. It is pushed by whoever releases."""
    name = name_of(version)
    _git(repository, "tag", "--annotate", name, "--message", f"Holdfast {version}")
    return name


def name_of(version: str) -> str:
    """Return the name of the tag of a version."""
    return f"v{version}"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _git(repository: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=repository, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()
