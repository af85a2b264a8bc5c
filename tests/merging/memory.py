"""Merge two models in a process of its own; print the peak of its memory above that after the imports."""

import sys
from pathlib import Path

import holdfast
import holdfast.merging.merge


def status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    method, out, *models = sys.argv[1:]
    based = {} if method == "linear" else {"base": models.pop(), "densities": [0.5], "weights": [1.0]}
    Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
    start = status("VmRSS")
    holdfast.merge(models, out, method=method, **based)  # type: ignore[arg-type]
    print(status("VmHWM") - start)
