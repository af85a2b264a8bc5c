"""Small files beside the checkpoints that a power loss, or somebody, made unreadable: what still works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import keep
from holdfast.checkpoint import retention
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.tags import add_tag, read_tags
from holdfast.core.errors import Damaged
from holdfast.storage.local import LocalStorage
from tests.cli.calls import call

pytestmark = pytest.mark.slow  # runs of a Checkpointer, and commands


BAD = {"empty": b"", "zeros": bytes(30), "torn": b'[["last"', "not text": b"\xff\xfe", "another kind": b"17"}


@pytest.fixture(scope="module", params=list(BAD.values()), ids=list(BAD))
def data(request: pytest.FixtureRequest) -> bytes:
    found: bytes = request.param
    return found


def save(root: Path, *steps: int) -> None:
    for step in steps:
        holdfast.save(root / f"step-{step:012d}", {"w": torch.full((3,), float(step))}, step=step)


def test_a_policy_that_cannot_be_read_keeps_everything_until_it_is_written_anew(tmp_path: Path, data: bytes) -> None:
    save(tmp_path, 1, 2, 3)
    (tmp_path / ".policy").mkdir()
    (tmp_path / ".policy" / "keep.json").write_bytes(data)
    storage = LocalStorage(tmp_path)
    with pytest.raises(Damaged, match="--keep"):
        retention.saved_policy(storage)
    done = call("gc", tmp_path)
    assert done.exit_code == 0 and "no checkpoint is deleted: " in done.output and "--keep" in done.output
    assert len(committed_steps(storage)) == 3
    outcome = retention.apply(storage, keep.last(1), 3)
    assert outcome.problems == [] and outcome.removed == [1, 2]
    assert retention.saved_policy(storage) == keep.last(1)


def test_a_tag_that_cannot_be_read_protects_all_and_can_be_given_anew(tmp_path: Path, data: bytes) -> None:
    save(tmp_path, 1, 2, 3)
    storage = LocalStorage(tmp_path)
    add_tag(storage, "good", committed_steps(storage)[0])
    (tmp_path / ".tags" / "bad").write_bytes(data)
    done = call("gc", tmp_path, "--keep", "last(1)")
    assert done.exit_code == 0 and "no checkpoint is deleted: " in done.output and "--delete" in done.output
    assert len(committed_steps(storage)) == 3
    assert any(".tags/bad" in problem for problem in retention.apply(storage, keep.last(1), 3).problems)
    listed = call("ls", tmp_path)
    assert listed.exit_code == 0 and "tag good" in listed.output and ".tags/bad" in listed.output
    assert call("tag", tmp_path).exit_code == 0
    with holdfast.Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore({"w": torch.zeros(3)}) == 3
    if data:
        assert call("tag", tmp_path, "bad", "--delete").exit_code == 0
    else:
        assert call("tag", tmp_path, "bad", "--step", "2").exit_code == 0
    assert set(read_tags(storage)) == ({"good"} if data else {"good", "bad"})
