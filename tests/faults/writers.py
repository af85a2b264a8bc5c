"""Writer processes with a fault inside: what they are told by the environment, see inside/sitecustomize.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULT = "HOLDFAST_FAULT"
_INSIDE = str(Path(__file__).parent / "inside")


@contextmanager
def faulty_writers(fault: str = "") -> Iterator[None]:
    """Writers that this process starts meanwhile have the fault, or listen for one."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FAULT)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_INSIDE, before["PYTHONPATH"])))
    if fault:
        os.environ[FAULT] = fault
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
