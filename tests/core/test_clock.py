"""Clocks of a start."""

from __future__ import annotations

import subprocess
import sys

from holdfast.core.clock import PhaseClock, process_age_s


def test_the_clocks():
    clock = PhaseClock()
    clock.end("a")
    clock.end("b")
    assert list(clock.seconds) == ["a", "b"] and 0 <= sum(clock.seconds.values()) <= clock.total_s
    age = process_age_s()
    assert age is not None and 0 < age < 3600 * 24
    text = "from holdfast.core.clock import process_age_s; print(process_age_s())"
    young = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    assert 0 < float(young.stdout) < age
