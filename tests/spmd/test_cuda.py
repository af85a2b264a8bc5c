"""The rules on CUDA kernels, against one device.

Four ranks share one GPU: they are threads of one process with torch's threaded group, since two NCCL ranks cannot
share a GPU. `HOLDFAST_CUDA_S` is how many seconds to spend; the cases are in an order that samples every operation.
Several processes share the cases: `HOLDFAST_CUDA_PART=3/14` takes every 14th from the fourth on.
"""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest
import torch

from tests.spmd.cases import Case, cases_of
from tests.spmd.ops import all_operations
from tests.spmd.raises import reason
from tests.spmd.team import Team

DEVICE = os.environ.get("HOLDFAST_CUDA_DEVICE", "cuda")  # "cpu" tries the test itself where there is no GPU
SECONDS = float(os.environ.get("HOLDFAST_CUDA_S", "75"))
PART, PARTS = map(int, os.environ.get("HOLDFAST_CUDA_PART", "0/1").split("/"))
FEWEST = 100  # cases in that time, or something is stuck
LIMIT = "ReduceScatter does not support"  # of torch's threaded group, whose ReduceScatter only adds; NCCL's multiplies
OUT_OF_RANGE = ("select_range", "set_range", "index_range")  # a CUDA kernel that asserts ends the process

pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="no CUDA device: run it on a machine that has one"
)


def _cases() -> list[Case]:
    """Cases of each operation in turn, begun at another place in each, so that any number of them is a fair sample."""
    chosen = [
        list(cases_of(operation))
        for name, operation in all_operations().items()
        if not operation.random and name not in OUT_OF_RANGE
    ]
    turned = [cases[place % len(cases) :] + cases[: place % len(cases)] for place, cases in enumerate(chosen)]
    longest = max(len(cases) for cases in turned)
    return [cases[place] for place in range(longest) for cases in turned if place < len(cases)]


@pytest.mark.timeout(600)
def test_rules_on_cuda_agree_with_one_device():
    began, outcomes, bad = time.monotonic(), Counter[str](), []
    cases = _cases()[PART::PARTS]
    with Team(enable=True, threads=True, device=DEVICE) as team:
        for finding in team.find(cases):
            outcomes[finding.outcome] += 1
            explained = finding.outcome == "raise" and (reason(finding.case.operation) or LIMIT in finding.detail)
            if finding.outcome in ("wrong", "hang", "raise") and not explained:
                bad.append(f"{finding.outcome} {finding.case} {finding.detail}")
            if time.monotonic() - began > SECONDS:
                break
    operations = len({case.operation for case in cases[: outcomes.total()]})
    words = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    print(
        f"\n{where}, torch {torch.__version__}: {outcomes.total()} of {len(cases)} cases of {operations} operations "
        f"in {time.monotonic() - began:.0f} s: {words}"
    )
    print("\n".join(bad))
    assert bad == []
    assert outcomes.total() >= FEWEST


if __name__ == "__main__":  # where there is no pytest with its plugins: python -m tests.spmd.test_cuda
    test_rules_on_cuda_agree_with_one_device()
