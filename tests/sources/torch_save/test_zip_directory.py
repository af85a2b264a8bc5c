"""The directory of a zip archive: what torch writes is found, what was tampered with is refused."""

from __future__ import annotations

import io
import struct
import zipfile

import pytest
import torch

from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.sources.torch_save.zip_directory import read_zip
from tests.sources.made import reader, torch_file


def archive(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as file:
        for name, data in entries.items():
            file.writestr(name, data)
    return packed.getvalue()


def test_entries_are_where_they_lie():
    data = torch_file({"a": torch.arange(1000), "b": torch.zeros(3)})
    found = read_zip(reader(b"xx" + data + b"yy"), "test", 2, 2 + len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        assert set(found) == set(file.namelist())
        for name, entry in found.items():
            assert (b"xx" + data)[entry.begin : entry.begin + entry.size] == file.read(name)


def test_large_archives_have_other_numbers():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file, file.open("a/b", "w", force_zip64=True) as entry:
        entry.write(b"data")
    data = packed.getvalue()
    assert data[read_zip(reader(data), "test")["a/b"].begin :][:4] == b"data"


def test_many_entries_need_the_large_end():
    data = archive({f"e/{number}": b"x" for number in range(66_000)})
    assert len(read_zip(reader(data), "test")) == 66_000


def test_compressed_entries_are_refused():
    with pytest.raises(Unsupported, match="is compressed"):
        read_zip(reader(archive({"a": b"0" * 10**6}, zipfile.ZIP_DEFLATED)), "test")


@pytest.mark.parametrize("name", ["../outside", "a/../../b", "/etc/passwd", "a\\b"])
def test_names_that_lead_out_are_refused(name):
    with pytest.raises(Damaged, match="leads out"):
        read_zip(reader(archive({name: b"x"})), "test")


def changed(data: bytes, at: int, form: str, value: int) -> bytes:
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


def directory_at(data: bytes) -> int:
    return struct.unpack("<L", data[-6:-2])[0]


def test_entries_that_overlap_are_refused():
    data = archive({"a": b"x" * 100, "b": b"y" * 100})
    at = directory_at(data)
    with pytest.raises(Damaged, match=r"two zip entries|overlaps|does not begin|overlaps what follows"):
        read_zip(reader(changed(data, data.rindex(b"PK\x01\x02") + 42, "<L", 0)), "test")
    for offset in (20, 24):  # the sizes of the first
        data = changed(data, at + offset, "<L", 150)
    with pytest.raises(Damaged, match="overlaps what follows"):
        read_zip(reader(data), "test")


def test_an_entry_past_the_end_is_refused():
    data = archive({"a": b"x" * 10})
    for value in (2**31, len(data)):
        with pytest.raises(HoldfastError):
            read_zip(reader(changed(data, directory_at(data) + 42, "<L", value)), "test")


def test_two_entries_of_one_name_are_refused():
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        file.writestr("a", b"1")
        with pytest.warns(UserWarning):
            file.writestr("a", b"2")
    with pytest.raises(Damaged, match="two zip entries"):
        read_zip(reader(packed.getvalue()), "test")


def test_a_file_that_was_cut_is_refused_wherever():
    data = torch_file({"a": torch.arange(10)})
    for size in range(0, len(data), 7):
        with pytest.raises(HoldfastError):
            read_zip(reader(data[:size]), "test")


def test_a_bomb_of_entries_is_refused_by_its_size():
    data = archive({"a": b"x"})
    claimed = changed(changed(data, len(data) - 14, "<H", 60_000), len(data) - 12, "<H", 60_000)
    with pytest.raises(Damaged, match="does not fit the file"):
        read_zip(reader(claimed), "test")
