"""Malicious pickles are refused in every file that may hold one; nothing is run, and little is used."""

import io
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.filesystem  # before anybody listens

from holdfast.core.errors import HoldfastError, Unsupported
from holdfast.sources import open_stored
from holdfast.sources.foreign import InMemoryReader
from holdfast.sources.pickles import read_pickle
from holdfast.sources.torch_save.torch_names import TORCH_NAMES
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.forge import examine
from tests.attacks.unpickling import PROOF, bombs, carried, commands, metadata, zipped
from tests.effort import at_most

MEMORY_BYTES = 200 << 20
SECONDS = 2.0
COMMANDS = tuple(commands(Path("x")))
BOMBS = bombs()
RUN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "ctypes.dlopen")

LISTENERS = []  # a hook cannot be taken away again


def _hear(event, arguments):
    if event == "ctypes.dlopen" and arguments[0] is None:
        return  # the storage asks for the C library that this process has, whatever it opens
    if event in RUN or (event == "import" and arguments[0] in ("antigravity", "runpy")):
        for listener in LISTENERS:
            listener.append(event)


sys.addaudithook(_hear)


@pytest.fixture
def heard():
    """What the interpreter was made to do."""
    events = []
    LISTENERS.append(events)
    yield events
    LISTENERS.remove(events)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_is_run_from_any_file(tmp_path, heard, name):
    proof = tmp_path / PROOF
    payload = commands(proof)[name]
    with pytest.raises(HoldfastError):
        value = read_pickle(InMemoryReader(payload), "raw", TORCH_NAMES).value
        raise Unsupported(str(value)) if name == "an object array" else AssertionError(value)
    for number, attack in enumerate(carried(name, payload)):
        place = tmp_path / str(number)
        place.mkdir()
        assert problem_of(attack, lay_out(attack, tmp_path, place)) == ""
    assert heard == [] and not proof.exists()


def test_the_refusal_names_what_was_refused(tmp_path):
    with pytest.raises(Unsupported, match=r"names 'os\.system' at byte 13"):
        read_pickle(InMemoryReader(commands(tmp_path)["os.system"]), "raw", TORCH_NAMES)


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_little_time_and_memory(name):
    with at_most(SECONDS):
        refused(name)
    tracemalloc.start()
    try:
        refused(name)
        assert tracemalloc.get_traced_memory()[1] < MEMORY_BYTES
    finally:
        tracemalloc.stop()


def refused(name):
    if name == "a huge array":  # a dtype alone is harmless
        assert read_pickle(InMemoryReader(BOMBS[name]), "raw", TORCH_NAMES).value is not None
        return
    with pytest.raises(HoldfastError):
        read_pickle(InMemoryReader(BOMBS[name]), "raw", TORCH_NAMES)


@pytest.mark.sliced(3)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_every_file(tmp_path, name):
    for number, attack in enumerate(carried(name, BOMBS[name])):
        place = tmp_path / str(number)
        place.mkdir()
        assert problem_of(attack, lay_out(attack, tmp_path, place)) == ""


@pytest.fixture
def honest():
    """A tensor as torch.save writes it."""
    packed = io.BytesIO()
    torch.save(torch.arange(4.0), packed)
    return packed.getvalue()


def lay(folder, item, value):
    folder.mkdir()
    (folder / "__0_0.distcp").write_bytes(item + value)
    (folder / ".metadata").write_bytes(metadata(item, value))
    return open_stored(folder)


def test_a_value_of_a_checkpoint_that_names_a_command_is_left_out_and_said(tmp_path, heard, honest):
    found = lay(tmp_path / "c", honest, zipped(commands(tmp_path / PROOF)["os.system"]))
    assert "note" not in found.state and "os.system" in found.notes[0]
    assert found.read("w").tolist() == [0, 1, 2, 3]
    assert heard == [] and not (tmp_path / PROOF).exists()


def test_honest_items_in_the_same_places_are_read(tmp_path, honest):
    found = lay(tmp_path / "c", honest, zipped(b"K\x07."))
    examine(tmp_path / "c")
    assert found.read("w").tolist() == [0, 1, 2, 3] and found.value("note") == 7
