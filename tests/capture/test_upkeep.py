"""Many saves: no memory and no file is kept; a second run of the same program starts clean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.storage.identity import IDENTITY

PROGRAM = """
import gc, json, os, sys, torch, holdfast
from torch import nn

def resident(pid):
    fields = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
    return int(fields["RssAnon"].split()[0])

def files(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))

model = nn.Linear(1000, 1000)
optimizer = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": optimizer, "note": {"step": 0}}
events = []
with holdfast.Checkpointer(sys.argv[1], on_event=lambda event: events.append(event.name)) as checkpointer:
    start = checkpointer.restore(state)
    facts = []
    for step in range((start or 0) + 1, (start or 0) + 16):
        optimizer.zero_grad(); model(torch.ones(4, 1000)).sum().backward(); optimizer.step()
        state["note"] = {"step": step}
        checkpointer.save(step, state).result(60)
        gc.collect()
        writer = checkpointer._engine.background.writer.pid
        facts.append([resident(os.getpid()), resident(writer), files(os.getpid()), files(writer)])
print(json.dumps({"start": start, "facts": facts, "events": events}))
"""


def run(root: Path) -> dict[str, object]:
    command = [sys.executable, "-c", PROGRAM, str(root)]
    # Large blocks of their own, given back at once: what is left is what somebody keeps.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.full
def test_ten_saves_keep_nothing_and_the_next_run_starts_clean(tmp_path: Path) -> None:
    for expected in (None, 15):
        result = run(tmp_path)
        assert result["start"] == expected
        assert "cleaned" not in result["events"] and "failed" not in result["events"]
        early, late = result["facts"][4], result["facts"][14]
        assert late[0] <= early[0] * 1.01 and late[1] <= early[1] * 1.01, result["facts"]
        assert late[2:] == early[2:], result["facts"]
        assert late[1] < 150_000, "a writer stays small"
        assert all(path.name.startswith("step-") for path in tmp_path.iterdir() if path.name != IDENTITY)
