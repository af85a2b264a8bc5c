"""Links, pipes, sockets, devices and folders where a file should be."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

from tests.attacks.attack import Attack
from tests.attacks.forge import INDEX, MODEL, OUTSIDE, index, tensor, tensor_file

Replace = Callable[[Path], None]


def by_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to("moved")


def by_link_outside(path: Path) -> None:
    outside = path.parent.with_name("outside")
    path.rename(outside)
    path.symlink_to(outside)


def by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("none")


def by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def by_link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def by_device(path: Path) -> None:
    """An endless device itself, where this user may make one; else a link to it."""
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def by_link_to_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


def by_socket(path: Path) -> None:
    path.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:  # by the open folder: the path of a socket may not be long
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


REPLACED: tuple[Replace, ...] = (
    by_link,
    by_link_outside,
    by_dangling_link,
    by_loop,
    by_link_to_a_device,
    by_device,
    by_pipe,
    by_link_to_a_pipe,
    by_socket,
    by_folder,
)
FILES = (MODEL, INDEX, "state.json", "holdfast.json")


def _in_checkpoint(name: str, replace: Replace) -> Attack:
    return Attack(f"{name} {replace.__name__}", lambda folder: replace(folder / name))


def _in_foreign(name: str, replace: Replace) -> Attack:
    def plant(folder: Path) -> None:
        (folder / name).write_bytes(tensor_file({"key": tensor(0, 4)}, b"data"))
        if name == "a.safetensors":
            (folder / INDEX).write_bytes(index({"key": name}))
        replace(folder / name)

    return Attack(f"foreign {name} {replace.__name__}", plant, on="foreign")


def _subfolder(make: Callable[[Path], None]) -> Attack:
    """An index names a file in a subfolder that is none, or that leads out."""

    def plant(folder: Path) -> None:
        (folder / INDEX).write_bytes(index({"key": f"sub/{OUTSIDE}"}))
        make(folder / "sub")

    return Attack(f"subfolder: {make.__name__}", plant, on="foreign")


def a_link_to_the_parent(path: Path) -> None:
    path.symlink_to("..")


def a_link_to_the_root(path: Path) -> None:
    path.symlink_to("/")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_file(path: Path) -> None:
    path.write_bytes(b"")


ATTACKS = (
    *(_in_checkpoint(name, replace) for name in FILES for replace in REPLACED),
    *(_in_foreign(name, replace) for name in ("model.safetensors", INDEX, "a.safetensors") for replace in REPLACED),
    *map(_subfolder, (a_link_to_the_parent, a_link_to_the_root, a_pipe, a_file)),
)
