"""More files than a process may open: saved, loaded, verified and converted with a bounded number of them open."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.checkpoint.attempt import FileWriters
from holdfast.storage.open_files import LazyReaders, OpenReaders, open_limit
from tests.dist.harness import run_ranks

LIMIT, FILES = 64, 100

WORK = """
import resource, sys, warnings
resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
import torch, holdfast
from torch import nn
warnings.simplefilter("error")
root, kind = sys.argv[1:]

def module(value):
    made = nn.Module()
    for number in range(FILES):
        made.register_parameter(f"w{number}", nn.Parameter(torch.full((16, 16), value * number)))
    return made

def check(state):
    assert all((tensor == number).all() for number, tensor in enumerate(state["model"].parameters()))

def load(path, **options):
    state = {"model": module(0.0)}
    holdfast.load(path, state, **options)
    check(state)

state = {"model": module(1.0)}
if kind == "background":
    with holdfast.Checkpointer(f"{root}/run", max_shard_size=1024, writer_threads=8) as run:
        for step in (1, 2):
            run.save(step, state).result(60)
        back = {"model": module(0.0)}
        assert run.restore(back) == 2
        check(back)
elif kind == "blocking":
    checkpoint = holdfast.save(f"{root}/one", state, max_shard_size=1024)
    assert len(checkpoint.manifest.groups["model"].files) == FILES
    load(f"{root}/one")
    load(f"{root}/one", verify=False)
    assert holdfast.open(f"{root}/one").verify().good
    from holdfast.storage.local import LocalStorage
    from pathlib import Path
    from holdfast.checkpoint.checkpoint import Checkpoint
    read = Checkpoint(LocalStorage(Path(root), mappable=False), "one")  # as from a network file system
    assert all((read.read(f"w{number}") == number).all() for number in range(FILES))
else:
    from click.testing import CliRunner
    from holdfast.cli.main import cli
    holdfast.save(f"{root}/one", state, max_shard_size=1024)
    for form in ("hf", "dcp", "paddle", "holdfast"):
        for arguments in (
            ["convert", f"{root}/one", f"{root}/{form}", "--to", form, "--max-shard-size", "1024"],
            ["convert", f"{root}/{form}", f"{root}/{form}-back", "--to", "holdfast", "--max-shard-size", "1024"],
            ["verify", f"{root}/{form}-back"],
        ):
            result = CliRunner().invoke(cli, arguments)
            assert result.exit_code == 0, (arguments, result.output)
        load(f"{root}/{form}")
        load(f"{root}/{form}-back")
"""


@pytest.mark.sliced(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["background", "blocking", pytest.param("convert", marks=pytest.mark.full)])
def test_a_checkpoint_of_more_files_than_may_be_open(tmp_path, kind):
    work = WORK.replace("OPEN_FILES", str(LIMIT)).replace("FILES", str(FILES))
    done = subprocess.run(
        [sys.executable, "-c", work, str(tmp_path), kind], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


class File:
    """A file that counts how many of its kind are open."""

    size, mappable = 8, False
    now = most = 0
    lock = threading.Lock()

    def __init__(self, name: str) -> None:
        self.name = name
        self.synced = False
        with File.lock:
            File.now += 1
            File.most = max(File.most, File.now)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        assert not self.synced

    def read_into(self, offset: int, buffers: Sequence[memoryview]) -> None:
        buffers[0][:] = f"{self.name:>8}".encode()

    def sync(self) -> None:
        self.synced = True

    def close(self) -> None:
        with File.lock:
            File.now -= 1


opened: Any = File


@pytest.fixture(autouse=True)
def _none_open():
    File.now = File.most = 0
    yield
    assert File.now == 0


def test_readers_are_closed_when_others_are_needed():
    readers = LazyReaders(map(str, range(500)), opened)
    for name in [*map(str, range(500)), "3", "499", "3"]:
        found = bytearray(8)
        readers[name].read_into(0, [memoryview(found)])
        assert found.decode().strip() == name
    assert File.most <= open_limit()
    readers.close()


def test_a_reader_in_use_stays_open():
    readers = OpenReaders(opened, limit=2)
    with readers.using("a") as first:
        for name in "bcdef":
            with readers.using(name):
                pass
        with readers.using("a") as again:
            assert again is first
    assert File.most <= 3
    readers.close()


def test_a_writer_is_synced_and_closed_after_its_last_block():
    blocks = [str(number) for number in range(200) for _ in range(3)]
    made = {}

    def open_writer(name):
        made[name] = File(name)
        return made[name]

    writers = FileWriters(open_writer, blocks)
    waiting = list(reversed(blocks))

    def work():
        while True:
            with File.lock:
                if not waiting:
                    return
                name = waiting.pop()
            with writers.block(name) as writer:
                writer.write(0, [])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 200 and all(file.synced for file in made.values())
    assert File.most <= 8
    writers.close()


def test_a_writer_that_fails_is_closed_and_not_synced():
    writers = FileWriters(File, ["a", "a"])
    seen: list[Any] = []
    with pytest.raises(OSError, match="full"), writers.block("a") as writer:
        seen.append(writer)
        raise OSError("full")
    assert not seen[0].synced
    writers.close()


def save_and_load(root):
    import resource

    import torch

    import holdfast
    from tests.dist.test_background import weights

    resource.setrlimit(resource.RLIMIT_NOFILE, (96, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    state: dict[str, Any] = {"w": {f"t{number}": weights(0)["w"] * number for number in range(60)}}
    with holdfast.Checkpointer(root, max_shard_size=1024) as run:
        run.save(1, state).result(60)
        back: dict[str, Any] = {"w": {key: torch.zeros_like(tensor) for key, tensor in state["w"].items()}}
        assert run.restore(back) == 1
    assert all(torch.equal(back["w"][key].to_local(), tensor.to_local()) for key, tensor in state["w"].items())


@pytest.mark.full
@pytest.mark.slow
def test_several_ranks_write_more_files_than_may_be_open(tmp_path):
    run_ranks(2, save_and_load, str(tmp_path))
