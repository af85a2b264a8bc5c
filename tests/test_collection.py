"""The tests themselves: none is left out by its folder's name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_every_test_file_is_collected() -> None:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "--collect-only", "--full", "-q", "-p", "no:cacheprovider"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    written = {str(path.relative_to(root)) for path in (root / "tests").rglob("test_*.py")}
    assert written == {line.partition(":")[0] for line in listed.splitlines() if line.startswith("tests/")}
