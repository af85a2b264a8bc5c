"""With --allow-changes: tags are set and deleted, and gc deletes exactly what was shown, or nothing."""

import pytest

from tests.web import sample_runs
from tests.web.running import OWN, running

OLD, NEW = "step-000000000010", "step-000000000045"


@pytest.fixture
def page(tmp_path):
    sample_runs.branches(tmp_path / "run")
    with running(tmp_path / "run", allow_changes=True) as server:
        yield server, f"/api/runs/{server.get('/api/runs')['runs'][0]['id']}"


def test_a_tag_is_set_and_deleted(page):
    server, run = page
    assert server.request("POST", f"{run}/steps/{NEW}/tag", {"name": "mine"}, OWN).status == 200
    assert server.get(run)["steps"]["tags"][-1] == ["mine"]
    assert server.request("DELETE", f"{run}/steps/{OLD}/tag", {"name": "mine"}, OWN).status == 400
    assert server.request("DELETE", f"{run}/steps/{NEW}/tag", {"name": "mine"}, OWN).status == 200
    assert server.get(run)["steps"]["tags"][-1] == []


@pytest.mark.parametrize("name", ["../../x", "a/b", ".hidden", "", "a\0", "<b>", "x" * 500, None, 5, ["a"]])
def test_a_tag_is_a_plain_name(page, name):
    server, run = page
    assert server.request("POST", f"{run}/steps/{NEW}/tag", {"name": name}, OWN).status == 400


def test_gc_deletes_what_was_shown(page, tmp_path):
    server, run = page
    shown = [row["folder"] for row in server.get(run)["retention"]["rows"] if not row["keep"]]
    assert shown == [OLD]
    done = server.job(f"{run}/gc", {"folders": shown, "confirm": True})
    assert (done["state"], done["result"]["removed"], done["result"]["problems"]) == ("done", [10], [])
    assert not (tmp_path / "run" / OLD).exists()
    assert OLD not in server.get(run)["steps"]["folder"]


def test_gc_deletes_nothing_else(page, tmp_path):
    server, run = page
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    for body in (
        {"folders": [OLD]},
        {"folders": [OLD], "confirm": "true"},
        {"folders": [], "confirm": True},
        {"confirm": True},
    ):
        assert server.request("POST", f"{run}/gc", body, OWN).status == 400
    for folders in ([NEW], [OLD, NEW], ["../run"], [OLD, OLD, "step-000000000020"]):
        done = server.job(f"{run}/gc", {"folders": folders, "confirm": True})
        assert (done["state"], done["error"]["kind"]) == ("failed", "Mismatch")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before
    assert server.request("POST", f"{run}/gc", {"folders": [OLD], "confirm": True}, {}).status == 403


def test_gc_deletes_nothing_when_more_goes_than_was_shown(page, tmp_path):
    server, run = page
    sample_runs.write_step(tmp_path / "run", 12, {"model": sample_runs.model_arrays(12)}, parent=10)
    done = server.job(f"{run}/gc", {"folders": [OLD], "confirm": True})
    assert (done["state"], done["error"]["kind"]) == ("failed", "Mismatch")
    assert (tmp_path / "run" / OLD).exists()
