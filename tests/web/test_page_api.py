"""The API: every address, nothing outside of the roots, no text that a browser could run, nothing changed unasked."""

import json
import os
from urllib.parse import quote

import numpy as np
import pytest

from tests.web import sample_runs
from tests.web.running import OWN, running
from tests.web.sample_runs import HOSTILE_KEYS

NEWEST = "step-000000000045"


def test_runs_are_listed(server, samples):
    runs = {run["name"]: run for run in server.get("/api/runs")["runs"]}
    assert list(runs) == ["branches", "damaged", "hostile", "light"]
    light = runs["light"]
    assert (light["kind"], light["steps"], light["newest"], light["problem"]) == ("root", 30, 300, None)
    assert light["address"] == str(samples / "light")


def test_a_step_is_described(server):
    step = server.get(f"/api/runs/{server.run_id('branches')}/steps/step-000000000020")
    assert (step["step"], step["tags"], step["lineage"]["parent"]) == (20, ["best"], 10)
    assert step["optimizer"] == [
        {
            "group": "optimizer",
            "number": 0,
            "params": 1,
            "options": {"lr": 0.001, "betas": {"$tuple": [0.9, 0.95]}, "weight_decay": 0.1},
        }
    ]
    assert step["state"]["note"]["value"]["list"][-1] == "... 100 more"


def test_a_folder_of_one_tensor_is_that_tensors_row(server):
    """Also at the top, below alike layers, and for the keys that hostile names give parts of no letters."""
    steps = f"/api/runs/{server.run_id('branches')}/steps/{NEWEST}"
    rows = server.get(f"{steps}/tree?prefix=model.layers.1")["rows"]
    attention = next(row for row in rows if row["name"].startswith("self_attn"))
    assert (attention["kind"], attention["name"]) == ("tensor", "self_attn.q_proj.weight")
    assert attention["key"] == attention["prefix"] == "model.layers.1.self_attn.q_proj.weight"
    assert attention["shape"] == [16, 16] and attention["depth"] == 3
    hostile = server.get(f"/api/runs/{server.run_id('hostile')}/steps/step-{2**53 - 1}/tree")["rows"]
    assert "__proto__.constructor" in {row["name"] for row in hostile if row["kind"] == "tensor"}


def test_the_tree_has_one_level_a_request(server):
    steps = f"/api/runs/{server.run_id('branches')}/steps/{NEWEST}"
    top = server.get(f"{steps}/tree")
    assert [(row["kind"], row["name"], row["tensors"]) for row in top["rows"]] == [("folder", "model", 13)]
    layers = server.get(f"{steps}/tree?group=model&prefix=model.layers")["rows"]
    assert [(row["name"], row["alike"], row["children"]) for row in layers] == [("0-3", [0, 1, 2, 3], 2)]
    assert server.get(f"{steps}/tree?prefix=model.layers&fold=0&offset=1&limit=2")["rows"][0]["name"] == "1"
    found = server.get(f"{steps}/tree?filter=UP_proj")
    assert found["total"] == 4
    assert found["rows"][0]["key"] == "model.layers.0.mlp.up_proj.weight"
    tensor = server.get(f"{steps}/tensor?group=model&key={found['rows'][0]['key']}")
    assert (tensor["shape"], tensor["dtype"], len(tensor["blocks"])) == ([32, 16], "float32", 1)


OUTSIDE = [
    "..",
    "../branches",
    "../../etc/passwd",
    "/etc/passwd",
    "....//....//etc/passwd",
    "step-000000000045/../../../etc/passwd",
    "step-000000000045\0",
    "\0",
    ".tags",
    ".policy",
    ".",
    "",
    "self",
    "~",
    "C:\\windows",
    "file:///etc/passwd",
    "s3://bucket/x",
    "a" * 5000,
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_outside_of_the_roots_is_read(server, name):
    run, coded = server.run_id("branches"), quote(name, safe="")
    for path in (
        f"/api/runs/{coded}",
        f"/api/runs/{run}/steps/{coded}",
        f"/api/runs/{run}/steps/{coded}/tree",
        f"/api/runs/{run}/steps/{NEWEST}/tree?group={coded}",
        f"/api/runs/{run}/steps/{NEWEST}/tensor?group={coded}&key=a",
        f"/api/runs/{run}/steps/{NEWEST}/tensor?group=model&key={coded}",
        f"/static/{coded}",
        f"/{coded}x",
    ):
        answer = server.request("GET", path)
        if path.endswith(("/steps/", "tree?group=", "/api/runs/")) and answer.status == 200:
            continue  # an empty name means the default
        assert answer.status in (400, 404, 414), path
        assert b"root:" not in answer.body
        assert "error" in answer.json


def test_encoded_dots_lead_nowhere(server):
    for path in ("/%2e%2e/%2e%2e/etc/passwd", "/static/%2e%2e/__init__.py", "/static/..%2f__init__.py", "//etc/passwd"):
        assert server.request("GET", path).status == 404
    assert (
        server.raw(b"GET /static/../__init__.py HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").split()[1]
        == b"404"
    )


def test_symlinks_that_leave_the_roots_are_not_followed(tmp_path):
    """A step that is a link to a checkpoint elsewhere, a run that is one, and metrics that are one."""
    secret = tmp_path / "secret"
    sample_runs.write_step(secret, 7, {"model": {"classified": np.ones(2, np.float32)}}, metrics={"secret": 1.0})
    (secret / "metrics.jsonl").write_text('{"step": 1, "classified": 2}\n')
    (secret / "config.toml").write_text("classified = true")
    root = tmp_path / "roots" / "run"
    sample_runs.light_steps(root, [1])
    (root / "step-000000000007").symlink_to(secret / "step-000000000007")
    (tmp_path / "roots" / "linked").symlink_to(secret)
    trained = tmp_path / "roots" / "trained"
    (trained / "checkpoints").mkdir(parents=True)
    (trained / "metrics.jsonl").symlink_to(secret / "metrics.jsonl")
    (trained / "config.toml").symlink_to(secret / "config.toml")
    with running(tmp_path / "roots") as server:
        assert [run["name"] for run in server.get("/api/runs")["runs"]] == ["run", "trained"]
        run = server.run_id("run")
        steps = server.get(f"/api/runs/{run}")["steps"]
        assert (steps["step"], steps["state"]) == ([1, 7], ["committed", "untrusted"])
        for path in ("", "/tree", "/tensor?group=model&key=classified"):
            answer = server.request("GET", f"/api/runs/{run}/steps/step-000000000007{path}")
            assert answer.status == 403
            assert str(secret).encode() not in answer.body
        trained_id = server.run_id("trained")
        for path in ("", "/metrics"):
            assert b"classified" not in server.request("GET", f"/api/runs/{trained_id}{path}").body


def test_hostile_names_and_numbers_come_as_inert_json(server):
    run = server.run_id("hostile")
    paths = [f"/api/runs/{run}", f"/api/runs/{run}/metrics"]
    folder = server.get(paths[0])["steps"]["folder"][0]
    paths += [f"/api/runs/{run}/steps/{folder}{more}" for more in ("", "/tree", "/tree?filter=e")]
    for path in paths:
        answer = server.request("GET", path)
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
        assert not set(answer.body) & set(b"<>&"), path
        assert all(32 <= byte < 127 for byte in answer.body)
        json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    found = {row["key"] for row in server.get(f"/api/runs/{run}/steps/{folder}/tree?filter=e&limit=100")["rows"]}
    assert "<img src=x onerror=alert(1)>.weight" in found
    for key in HOSTILE_KEYS:
        answer = server.get(f"/api/runs/{run}/steps/{folder}/tensor?group=model&key={quote(key, safe='')}")
        assert answer["key"] == key
        assert server.request(
            "GET", f"/api/runs/{run}/steps/{folder}/layout?group=model&key={quote(key, safe='')}&mesh=fsdp:4,tp:2"
        ).status in (200, 400)


def test_statistics_of_numbers_that_are_none_are_text(server):
    run = server.run_id("hostile")
    folder = server.get(f"/api/runs/{run}")["steps"]["folder"][0]
    state = server.job(f"/api/runs/{run}/steps/{folder}/statistics", {"group": "model", "keys": list(HOSTILE_KEYS)})
    assert state["state"] == "done"
    assert {(row["nan"], row["inf"]) for row in state["result"]["tensors"]} == {(1, 2)}


def test_a_damaged_step_says_what_is_wrong_and_the_others_work(server):
    run = server.run_id("damaged")
    fields = server.get(f"/api/runs/{run}")["steps"]
    assert fields["state"] == ["committed", "committed", "damaged", "committed"]
    assert "digest" in fields["note"][2]
    answer = server.request("GET", f"/api/runs/{run}/steps/step-000000000030")
    assert (answer.status, answer.json["error"]["kind"]) == (422, "Damaged")
    found = server.job(f"/api/runs/{run}/steps/step-000000000020/verify", {})["result"]
    assert (found["ok"], found["damaged"][0]["file"]) == (False, "model-00001-of-00001.safetensors")
    assert "model.layers.3.self_attn.q_proj.weight" in found["damaged"][0]["keys"]
    assert server.job(f"/api/runs/{run}/steps/step-000000000040/verify", {})["result"]["ok"] is True
    assert server.get(f"/api/runs/{run}")["steps"]["verified"] == [None, False, None, True]


@pytest.mark.parametrize(
    "query",
    ["offset=-1", "offset=a", "limit=1e9", "limit=9999999999999999", "offset=%00", "offset=٣"],
)
def test_numbers_of_a_query_are_checked(server, query):
    path = f"/api/runs/{server.run_id('light')}/steps/step-000000000010/tree?{quote(query, safe='=%')}"
    assert server.request("GET", path).status == 400


def test_the_number_of_rows_is_limited(server):
    path = f"/api/runs/{server.run_id('light')}/steps/step-000000000010/tree?limit=99999999&offset=0"
    assert len(server.get(path)["rows"]) == 1


def test_nothing_changes_without_being_allowed(server, samples):
    run = server.run_id("branches")
    before = sorted(str(path) for path in samples.rglob("*"))
    for method, path, body in (
        ("POST", f"/api/runs/{run}/steps/{NEWEST}/tag", {"name": "x"}),
        ("DELETE", f"/api/runs/{run}/steps/step-000000000020/tag", {"name": "best"}),
        ("POST", f"/api/runs/{run}/gc", {"folders": ["step-000000000010"], "confirm": True}),
    ):
        answer = server.request(method, path, body, OWN)
        assert answer.status == 403, answer.body
        assert "--allow-changes" in answer.json["error"]["message"]
    assert sorted(str(path) for path in samples.rglob("*")) == before


def test_reading_everything_changes_no_file(tmp_path):
    sample_runs.branches(tmp_path / "run")
    before = {path: os.stat(path).st_mtime_ns for path in tmp_path.rglob("*")}
    with running(tmp_path / "run") as server:
        run = server.get("/api/runs")["runs"][0]["id"]
        for path in (
            "",
            "/metrics",
            "/flights",
            f"/steps/{NEWEST}",
            f"/steps/{NEWEST}/tree",
            f"/steps/{NEWEST}/layout",
        ):
            server.get(f"/api/runs/{run}{path}")
        server.job(f"/api/runs/{run}/steps/{NEWEST}/verify", {})
        both = {"a": {"run": run, "step": "step-000000000020"}, "b": {"run": run, "step": NEWEST}}
        assert server.job("/api/compare", both)["state"] == "done"
    assert {path: os.stat(path).st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_an_unexpected_error_tells_the_client_nothing(server, monkeypatch, capsys):
    def fail():
        raise RuntimeError("a secret path /home/me")

    monkeypatch.setattr(server.api, "about", fail)
    answer = server.request("GET", "/api/about")
    assert (answer.status, b"secret" in answer.body) == (500, False)
    assert "a secret path" in capsys.readouterr().err


def test_a_checkpoint_itself_is_served_as_its_only_step(tmp_path):
    path = sample_runs.write_step(tmp_path, 3, {"model": sample_runs.model_arrays(0)})
    with running(path) as server:
        run = server.get("/api/runs")["runs"][0]
        assert run["kind"] == "checkpoint"
        assert server.get(f"/api/runs/{run['id']}/steps/self")["step"] == 3
        assert server.get(f"/api/runs/{run['id']}/steps/self/tree")["total"] == 1
        assert server.request("GET", f"/api/runs/{run['id']}/steps/step-000000000003").status == 404
