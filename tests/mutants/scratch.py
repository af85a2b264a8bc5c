"""Scratch copies of src, and pytest runs on them. The worktree itself is never changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OUT = REPOSITORY / "out" / "mutants"


class Scratch:
    """A copy of src under out/mutants, one for each job."""

    def __init__(self, name: str) -> None:
        self.src = OUT / "scratch" / name / "src"
        shutil.rmtree(self.src, ignore_errors=True)
        shutil.copytree(REPOSITORY / "src", self.src, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))

    def write(self, file: str, source: bytes) -> None:
        """Replace a file of the copy; its compiled form, which may look as new, is deleted."""
        path = self.src / "holdfast" / file
        path.write_bytes(source)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()

    def pytest(self, targets: list[str], deadline_s: float, **variables: str) -> tuple[int | None, str]:
        """Run pytest on this copy; the exit code is None where the deadline passed. Its children end with it."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.src),
            "PYTHONHASHSEED": "0",
            "MUTANTS_PACKAGE": str(self.src / "holdfast"),
            **variables,
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "tests.mutants.plugin", "-p", "no:cacheprovider"]
        command += ["-p", "no:randomly", *targets]
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=deadline_s)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def run_tests(self, tests: list[str], deadline_s: float) -> tuple[int | None, str]:
        """Run the tests of these ids, in their order."""
        listed = self.src.parent / "tests.json"
        listed.write_text(json.dumps(tests))
        files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
        return self.pytest(files, deadline_s, MUTANTS_TESTS=str(listed))
