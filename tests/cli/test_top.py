import json
import os
import signal
import time

import torch

import holdfast
from holdfast.checkpoint.run_identity import run_id
from holdfast.checkpoint.shared_memory import find_files
from holdfast.storage.local import LocalStorage
from tests.cli.calls import call


def test_committed_steps_are_shown_with_how_long_they_took(tmp_path):
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, {"w": torch.ones(10)}).result()
    done = call("top", tmp_path)
    assert done.exit_code == 0
    assert "no save in flight" in done.output
    assert any(line.split()[0] == "7" and line.rstrip().endswith("s") for line in done.output.splitlines() if line)
    fields = json.loads(call("top", "--json", tmp_path).output)
    assert fields["in_flight"] == [] and fields["committed"][0]["step"] == 7
    assert fields["committed"][0]["seconds"] > 0


def test_a_save_in_flight_is_followed(tmp_path):
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(10)}).result()
        writer = checkpointer._engine.background.writer.pid
        checkpointer._engine.background._arena.seal = lambda attempt: None  # the capture seems to go on
        handle = checkpointer.save(2, {"w": torch.ones(10)})
        end = time.monotonic() + 120
        while not (flights := json.loads(call("top", "--json", tmp_path).output)["in_flight"]):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert flights[0]["step"] == 2 and flights[0]["world"] == 1 and flights[0]["total"] > 0
        assert "saving step 2" in call("top", "--once", tmp_path).output
        os.kill(writer, signal.SIGKILL)
        assert handle.wait(120) and handle.error is not None
        checkpointer._warnings.clear()
    assert not find_files(run_id(LocalStorage(tmp_path))), "a dead writer leaves no memory behind"


def test_a_missing_root_is_a_wrong_call(tmp_path):
    assert call("top", tmp_path / "absent").exit_code != 0
    (tmp_path / "file").write_text("")
    assert "is a file" in str(call("top", tmp_path / "file").exception)
    holdfast.save(tmp_path / "one", {"w": torch.ones(1)})
    assert "give the root that contains it" in str(call("top", tmp_path / "one").exception)
    assert call("top", "--interval", "-1", tmp_path).exit_code == 2
