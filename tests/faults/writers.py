"""Writer processes with a fault inside: what they are told by the environment, see inside/sitecustomize.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FAULT, WHEN = "HOLDFAST_FAULT", "HOLDFAST_FAULT_WHEN"
_INSIDE = str(Path(__file__).parent / "inside")


@contextmanager
def faulty_writers(fault: str = "", when: str = "") -> Iterator[None]:
    """Writers that this process starts meanwhile have the fault, from the moment that the file `when` is there."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", FAULT, WHEN)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_INSIDE, before["PYTHONPATH"])))
    if fault:
        os.environ[FAULT] = fault
    if when:
        os.environ[WHEN] = when
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
