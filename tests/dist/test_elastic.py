"""torchrun restarts ranks that fail: each life goes on from the last step, and a failing restart says what to set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.adapters import comm

SCRIPT = Path(__file__).with_name("elastic_script.py")


@pytest.mark.full  # half a minute each, most of it torchrun's
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("deaths", "lives"),
    [
        ("raise", {"0": [1, 2, 3], "1": [3, 4, 5, 6, 7, 8]}),
        ("raise, kill", {"0": [1, 2, 3], "1": [3, 4, 5], "2": [5, 6, 7, 8]}),
    ],
)
def test_deaths_are_survived_by_torchrun(tmp_path: Path, deaths: str, lives: dict[str, list[int]]) -> None:
    root, log = tmp_path / "run", tmp_path / "log"
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:1", "--nproc-per-node=2", "--max-restarts=3"]
    launch += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--monitor-interval=0.1"]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = [*launch, str(SCRIPT), str(root), str(log), deaths]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in log.read_text().splitlines()]
    steps: dict[str, list[int]] = {}
    for life, step, _ in lines:
        steps.setdefault(life, []).append(int(step))
    assert steps == lives
    losses = {(step, loss) for _, step, loss in lines}
    assert len(losses) == 8, "a step that was done twice has the same loss"
    with holdfast.Checkpointer(root) as checkpointer:
        assert checkpointer.steps()[-1] == 8


@pytest.mark.parametrize(
    ("restarts", "shared", "named"), [("1", None, True), ("0", None, False), ("2", "1", False), (None, None, False)]
)
def test_a_group_that_fails_after_a_restart_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, restarts: str | None, shared: str | None, named: bool
) -> None:
    for name, value in (("TORCHELASTIC_RESTART_COUNT", restarts), ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", shared)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    group = torch.nn.Identity()  # anything that can be referred to weakly
    with pytest.raises(holdfast.PeerFailed) as caught, comm._waiting_for_others(group, 0, 5.0):  # type: ignore[arg-type]
        raise RuntimeError("connectFullMesh failed")
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(caught.value)) is named
