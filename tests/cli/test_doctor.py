"""`holdfast doctor` in real circumstances: a small /dev/shm, no page-locking, no O_DIRECT, no torch; all well."""

import json

import pytest
import torch

import holdfast
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.doctor.mounts import Mount
from tests.cli.calls import call
from tests.doctor.containers import bare_python, doctor, without_locking


def on_a_disk(folder):
    mount = Mount.of(folder)
    if mount is None or mount.kind not in {"ext4", "xfs", "btrfs"}:
        pytest.skip(f"{folder} is not on a disk: {mount}")


def changes(found):
    return {check for check, finding in found.items() if finding["verdict"] == "change"}


def test_a_poor_container_is_told_everything_that_it_lacks(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    code, found = doctor(
        disk,
        "--gpu",
        inside=f"mount -t tmpfs -o size=16m,mode=1777 tmpfs /dev/shm\nmount -t ramfs ramfs {disk}",
        python=bare_python(tmp_path / "bare"),
        limits=without_locking(64),
    )
    assert code == 1
    assert changes(found) >= {"torch", "shared memory", "page-locking", "O_DIRECT", "file system"}
    assert "not installed" in found["torch"]["text"]
    assert found["torch"]["commands"] == ["pip install 'torch>=2.11'"]
    assert "16.78 MB" in found["shared memory"]["text"]
    assert "docker run --shm-size=2g ..." in found["shared memory"]["commands"]
    assert "65.54 kB" in found["page-locking"]["text"]
    assert "ulimit -l unlimited" in found["page-locking"]["commands"]
    assert "past the page cache" in found["O_DIRECT"]["text"]
    assert "ext4" in found["O_DIRECT"]["remedy"]
    assert "ramfs" in found["file system"]["text"]
    assert not [*disk.iterdir()]


def test_all_well_is_exit_code_0(tmp_path):
    on_a_disk(tmp_path)
    holdfast.save(tmp_path / "run" / "step-000000000001", {"model": torch.nn.Linear(4, 3)}, step=1)
    code, found = doctor(tmp_path / "run")
    assert (code, changes(found)) == (0, set())
    assert {"torch", "GPUs", "shared memory", "page-locking", "file system", "free space", "O_DIRECT"} <= found.keys()
    assert found["torch"]["text"].startswith(torch.__version__)
    assert "step 1" in found["shared memory"]["text"]
    assert "step 1" in found["free space"]["text"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000000000001"]


def test_every_change_is_printed_with_its_commands(tmp_path, monkeypatch):
    from holdfast.doctor import software_checks

    monkeypatch.setattr(software_checks, "_ASK_TORCH", "print('{\"missing\": true}')")
    done = call("doctor", tmp_path / "new", "--state", "900TB")
    assert done.exit_code == 1
    assert "CHANGE  torch: not installed" in done.output
    assert "            pip install 'torch>=2.11'" in done.output
    assert "CHANGE  shared memory: " in done.output
    assert "--shm-size=1080000g" in done.output
    assert "CHANGE  free space: " in done.output
    assert "3 things to change" in done.output.splitlines()[-1] or "4 things to change" in done.output.splitlines()[-1]
    assert not (tmp_path / "new").exists()


def test_the_state_is_shared_by_its_hosts(tmp_path, monkeypatch):
    from holdfast.doctor import software_checks

    monkeypatch.setattr(software_checks, "_ASK_TORCH", "print('{\"missing\": true}')")
    for hosts, verdict in ((1, "change"), (1_000_000, "ok")):
        found = json.loads(call("doctor", "--state", "900TB", "--hosts", hosts, "--json").output)
        memory = next(finding for finding in found if finding["check"] == "shared memory")
        assert memory["verdict"] == verdict


def test_wrong_calls_are_refused(tmp_path):
    holdfast.save(tmp_path / "a", {"model": torch.nn.Linear(1, 1)})
    for arguments, kind, text in (
        ([tmp_path / "a"], NotFound, "is a checkpoint"),
        (["--state", "much"], InvalidArgument, "much"),
        (["--hosts", 2], InvalidArgument, "--state"),
    ):
        error = call("doctor", *arguments).exception
        assert isinstance(error, kind)
        assert text in str(error)
