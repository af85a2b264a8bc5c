"""Links, pipes and folders where a file should be."""

import os
import time

import pytest

from attacks.forge import INDEX, MODEL, examine, tensor, tensor_file
from holdfast.core.errors import Damaged, HoldfastError

FILES = [MODEL, INDEX, "state.json", "holdfast.json"]


def by_link(path):
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def by_link_outside(path):
    outside = path.parent.with_name("outside")
    path.rename(outside)
    path.symlink_to(outside)


def by_dangling_link(path):
    path.unlink()
    path.symlink_to("none")


def by_loop(path):
    path.unlink()
    path.symlink_to(path.name)


def by_endless_device(path):
    path.unlink()
    path.symlink_to("/dev/zero")


def by_pipe(path):
    path.unlink()
    os.mkfifo(path)


def by_folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "replaced", [by_link, by_link_outside, by_dangling_link, by_loop, by_endless_device, by_pipe, by_folder]
)
def test_a_file_replaced_by_something_else_is_damage_at_once(checkpoint, name, replaced):
    replaced(checkpoint / name)
    started = time.process_time()
    with pytest.raises(Damaged, match=r"is a symbolic link, not a file|is not a regular file"):
        examine(checkpoint)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("replaced", [by_link, by_link_outside, by_endless_device, by_pipe, by_folder])
@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_a_foreign_file_replaced_by_something_else_is_refused_at_once(foreign, name, replaced):
    (foreign / name).write_bytes(tensor_file({"key": tensor(0, 4)}, b"data"))
    replaced(foreign / name)
    started = time.process_time()
    with pytest.raises(HoldfastError):
        examine(foreign)
    assert time.process_time() - started < 1


def test_a_file_that_the_index_names_must_be_a_file(foreign):
    (foreign / "a.safetensors").write_bytes(tensor_file({"key": tensor(0, 4)}, b"data"))
    (foreign / INDEX).write_bytes(b'{"weight_map":{"key":"a.safetensors"}}')
    by_link(foreign / "a.safetensors")
    with pytest.raises(Damaged, match=r"names a\.safetensors, which is not there"):
        examine(foreign)
