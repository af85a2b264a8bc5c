"""The rules on a device that is not the CPU, where there is none: no handler leaves a tensor behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.spmd import elsewhere
from tests.spmd.cases import Case, cases_of
from tests.spmd.ops import all_operations
from tests.spmd.raises import reason
from tests.spmd.team import Team

EVERY = 2803
LIMIT = "python_dispatch.cpp"  # torch.tensor() does not know devices that are written in Python
CAUSAL = Case("sdpa_causal", "even", "4", ("0",), "follow")  # in float64, for which GPUs have no fused kernel
LEFT_OUT = (
    "polar",  # its gradient conjugates, which that device's tensors do not know
    "t_",  # changes the shape of what it is given, which that device's tensors cannot
    *("argmin_full", "argmax_full"),  # torch.tensor() again, on ranks that have something: the others wait for it
)

FROM_CPU = [
    Case(operation, "uneven", "4", (place,), others)
    for operation in ("index_copy_from_cpu", "index_from_cpu")
    for place in ("0", "1", "P")
    for others in ("follow", "apart")
]

REFUSED = f"""
import torch
from tests.spmd import elsewhere

elsewhere.install()
there, here = torch.ones(3, 2, device="{elsewhere.NAME}"), torch.ones(3, 2)
assert (there * torch.tensor(2.0)).sum().item() == 12 and there[torch.tensor([0])].device.type == "{elsewhere.NAME}"
assert there.cpu().device.type == "cpu"
try:
    there + here
except RuntimeError as error:
    print(error)
"""


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_slice_of_the_table_elsewhere() -> None:
    table = all_operations()
    chosen = [name for name in table if name not in LEFT_OUT and table[name].family != "training"]
    operations = [table[name] for name in chosen if not table[name].random]
    cases = [case for operation in operations for case in cases_of(operation)][::EVERY]
    with Team(enable=True, threads=True, device=elsewhere.NAME) as team:
        findings = list(team.find([*cases, CAUSAL]))
    bad = [finding for finding in findings if not finding.is_right and LIMIT not in finding.detail]
    assert [finding for finding in bad if not reason(finding.case.operation)] == []


@pytest.mark.timeout(120)
def test_indices_on_the_cpu_do_or_raise_what_they_do_on_one_device() -> None:
    with Team(enable=True, threads=True, device=elsewhere.NAME) as team:
        findings = list(team.find(FROM_CPU))
    assert [finding for finding in findings if not finding.is_right] == []


@pytest.mark.full
def test_the_device_refuses_tensors_of_the_cpu() -> None:
    command = [sys.executable, "-W", "ignore", "-c", REFUSED]
    words = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "same device, but found (3, 2) on elsewhere:0, (3, 2) on cpu" in words
