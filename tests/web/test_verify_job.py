"""What a verification says: bounded lists with full counts, remembered by the server, in bounded memory."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.web import verify_job
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import PageJob
from holdfast.web.verify_job import verify_step
from tests.web import sample_runs
from tests.web.running import OWN
from tests.web.test_http_server import process_of
from tests.web.test_run_records import column, records_of

STEP = "step-000000000001"


def verified(root: Path) -> dict[str, Any]:
    records = records_of(root)
    opened = OpenStep(holdfast.open(root / STEP))
    return verify_step(PageJob("verify", 60), records, opened)


def test_lists_are_bounded_and_counts_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of both files is bad; a tensor in two bad blocks counts once."""
    arrays = {f"layers.{number}.w": np.full(300, number, np.float32) for number in range(100)}
    holdfast.save(tmp_path / STEP, {"model": arrays}, step=1, block_bytes=4096, max_shard_size=80_000)
    for file in (tmp_path / STEP).glob("model-*.safetensors"):
        data = file.read_bytes()
        file.write_bytes(data[:-200_000] + bytes(byte ^ 1 for byte in data[-200_000:]))
    monkeypatch.setattr(verify_job, "_DAMAGE", 20)
    monkeypatch.setattr(verify_job, "_ALL_KEYS", 7)
    found = verified(tmp_path)
    assert (found["ok"], found["damaged_tensors"], found["damaged_files"]) == (False, 100, 2)
    assert found["damaged_count"] > 25
    assert len(found["damaged"]) == 20
    assert sum(len(one["keys"]) for one in found["damaged"]) == 7
    assert found["damaged"][0]["keys_count"] > 7


def test_the_server_remembers_what_it_found(tmp_path: Path) -> None:
    """Another window, or the same one after a reload, must not take the step for the newest intact one."""
    sample_runs.light_steps(tmp_path, [1, 2])
    file = next((tmp_path / STEP).glob("model-*.safetensors"))
    records = records_of(tmp_path)
    good = file.read_bytes()
    for data, state, is_good in ((good[:-1] + b"\x7f", "damaged", False), (good, "committed", True)):
        file.write_bytes(data)
        opened = OpenStep(holdfast.open(tmp_path / STEP))
        assert verify_step(PageJob("verify", 60), records, opened)["ok"] is is_good
        assert column(records, "state") == [state, "committed"]
        assert column(records, "verified") == [is_good, None]


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("damage", [None, -5, 200], ids=["intact", "tensor", "header"])
def test_a_hundred_thousand_keys_are_verified_in_little_memory(tmp_path: Path, damage: int | None) -> None:
    sample_runs.keys(tmp_path / "keys")
    path = "/api/runs/{}/steps/step-000000001000"
    if damage is not None:
        file = sorted((tmp_path / "keys").glob("step-*/model-*.safetensors"))[0]
        data = bytearray(file.read_bytes())
        data[damage] ^= 1
        file.write_bytes(data)
    with process_of(tmp_path) as (port, facts):
        address = path.format(ask(port, "GET", "/api/runs")["runs"][0]["id"])
        if damage != 200:
            ask(port, "GET", f"{address}/tree")
            ask(port, "GET", f"{address}/tree?prefix=model.layers")
        for _ in range(2):
            job = ask(port, "POST", f"{address}/verify")["job"]
            while (state := ask(port, "GET", f"/api/jobs/{job}"))["state"] == "running":
                time.sleep(0.05)
            assert state["result"]["ok"] is (damage is None), state
        assert facts()[0] < 150, f"{facts()[0]:.0f} MB"


def ask(port: int, method: str, path: str) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request(method, path, b"{}" if method == "POST" else None, OWN)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    assert answer.status == 200, body[:200]
    return json.loads(body)
