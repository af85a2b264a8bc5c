"""The mount of a path, from lines of mountinfo and from this machine."""

import os
from pathlib import Path

from holdfast.doctor import mounts
from holdfast.doctor.mounts import Mount

LINES = r"""22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:45 / /data rw,noatime shared:2 - nfs4 server:/exports/a\040b rw,vers=4.2,hard,local_lock=none
24 23 0:46 / /data/with\040space ro,relatime - tmpfs tmpfs rw,size=64k
25 22 0:47 / /data rw - lustre 10.0.0.1@tcp:/scratch rw,flock
"""


def test_the_innermost_mount_holds_a_path_and_a_later_one_hides_an_earlier_one():
    assert Mount.of(Path("/home/u"), LINES) == Mount("/", "ext4", "/dev/sda1", frozenset({"rw", "relatime"}))
    data = Mount.of(Path("/data/run"), LINES)
    assert data is not None
    assert (data.kind, data.source) == ("lustre", "10.0.0.1@tcp:/scratch")
    assert "flock" in data.options
    spaced = Mount.of(Path("/data/with space/run"), LINES)
    assert spaced is not None
    assert (spaced.kind, spaced.point) == ("tmpfs", "/data/with space")
    assert {"ro", "size=64k"} <= spaced.options
    elsewhere = Mount.of(Path("/database"), LINES)
    assert elsewhere is not None
    assert elsewhere.point == "/"


def test_an_escaped_source_is_read():
    assert Mount.parse(LINES.splitlines()[1]).source == "server:/exports/a b"


def test_the_mount_of_this_machine_is_found(tmp_path):
    mount = Mount.of(tmp_path)
    assert mount is not None
    assert os.path.ismount(mount.point)


def test_a_mount_whose_name_is_not_utf8_is_read(tmp_path, monkeypatch):
    lines = tmp_path / "mountinfo"
    lines.write_bytes(LINES.encode() + b"26 22 0:48 / /caf\xe9 rw - xfs /dev/sdb rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", lines)
    assert Mount.of(Path("/home/u")).kind == "ext4"
    assert Mount.of(Path(os.fsdecode(b"/caf\xe9/run"))).kind == "xfs"
