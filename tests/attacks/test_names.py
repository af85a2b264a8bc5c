import os
import time

import pytest
import torch

import holdfast
from attacks.forge import INDEX, MODEL, examine, forge_file, forge_manifest, index, tensor, tensor_file
from holdfast.core.errors import Damaged, HoldfastError

OUTSIDE = "outside.safetensors"
NAMES = [
    "",
    ".",
    "..",
    "/",
    f"../{OUTSIDE}",
    f"./{OUTSIDE}",
    f"sub/../../{OUTSIDE}",
    f"..//{OUTSIDE}",
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "//etc/passwd",
    "/dev/zero",
    "/proc/self/mem",
    "a/b/c.safetensors",
    "a.safetensors/",
    "a\0.safetensors",
    f"{MODEL}\0.txt",
    "a\nb.safetensors",
    "a\rb",
    "a\tb",
    "\x1b[2Ja",
    "a\x7f",
    "a\x9b",
    "n" * 201,
    "n" * 300,
    "n" * 100_000,
    "a\\b.safetensors",
    f"..\\{OUTSIDE}",
    "C:\\x",
    "C:x",
    "\\\\host\\share",
    f"%2e%2e/{OUTSIDE}",
    f"%2e%2e%2f{OUTSIDE}",
    "..%00",
    f"\uff0e\uff0e/{OUTSIDE}",
    f"\u2024\u2024/{OUTSIDE}",
    "a\u202eb",
    "a\ud800",
    "mod\u00e8le",
    ".hidden",
    "sub/.hidden",
    "-rf",
    "~/x",
    "$HOME",
    "a b",
    "a;b",
    "file:///etc/passwd",
    "https://host/x",
    "con",
    "NUL",
    "aux.safetensors",
    "COM1",
    "lpt9.safetensors",
]

WRITABLE = [name for name in NAMES if name != "a\ud800"]  # a manifest is UTF-8


@pytest.fixture
def outside(tmp_path):
    """A good tensor file beside the checkpoint, that a name must not lead to."""
    (tmp_path / OUTSIDE).write_bytes(tensor_file({"key": tensor(0, 6)}, b"secret"))


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_in_the_weight_map_of_a_foreign_folder(foreign, outside, name):
    (foreign / INDEX).write_bytes(index({"key": name}))
    started = time.process_time()
    with pytest.raises(HoldfastError) as caught:
        examine(foreign)
    assert time.process_time() - started < 1
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_in_the_weight_map_of_a_checkpoint(checkpoint, outside, name):
    forge_file(checkpoint, INDEX, index({"weight": name, "bias": MODEL}))
    started = time.process_time()
    with pytest.raises(HoldfastError) as caught:
        examine(checkpoint)
    assert time.process_time() - started < 1
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", WRITABLE)
def test_a_hostile_name_among_the_files_of_the_manifest(checkpoint, outside, name):
    def change(fields):
        fields["files"][name] = fields["files"].pop(MODEL)
        fields["groups"]["model"]["files"] = [name]

    forge_manifest(checkpoint, change)
    started = time.process_time()
    with pytest.raises(HoldfastError) as caught:
        examine(checkpoint)
    assert time.process_time() - started < 1
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", WRITABLE)
def test_a_hostile_name_among_the_files_of_a_group(checkpoint, outside, name):
    forge_manifest(checkpoint, lambda fields: fields["groups"]["model"].update(files=[MODEL, name]))
    with pytest.raises(Damaged, match=r"names the file .* which is not recorded") as caught:
        holdfast.open(checkpoint)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "aux." not in name and "lpt9." not in name and name != "a\ud800"]
)
def test_a_hostile_group_name(checkpoint, name):
    forge_manifest(checkpoint, lambda fields: fields["groups"].update({name: fields["groups"]["model"]}))
    with pytest.raises(HoldfastError, match="cannot name a group") as caught:
        holdfast.open(checkpoint)
    assert str(caught.value).isprintable()


KEYS = ["", "a\0", "a\nb", "\x1b[2J", "a\x7f", "a\x9b", "a\u2028", "a\ud800", "k" * 1025, "k" * 100_000, "__metadata__"]


@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_key_in_a_header(foreign, key):
    (foreign / "model.safetensors").write_bytes(tensor_file({key: tensor(0, 4)}, b"data"))
    with pytest.raises(Damaged) as caught:
        examine(foreign)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("key", KEYS)
def test_a_hostile_key_in_a_weight_map(foreign, key):
    (foreign / "a.safetensors").write_bytes(tensor_file({"key": tensor(0, 4)}, b"data"))
    (foreign / INDEX).write_bytes(index({key: "a.safetensors"}))
    with pytest.raises(Damaged) as caught:
        examine(foreign)
    assert str(caught.value).isprintable()


def test_keys_that_look_like_paths_never_become_paths(tmp_path):
    keys = ["../../etc/x", "/etc/x", "..", "C:\\x", "con", "%2e%2e", "a/b/c/d", "A", "a", "é" * 500]
    tensors = {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}
    holdfast.save(tmp_path / "c", {"model": dict(tensors)})
    found = holdfast.open(tmp_path / "c")
    assert {key: found.read(key).tolist() for key in found.keys("model")} == {k: t.tolist() for k, t in tensors.items()}
    assert os.listdir(tmp_path) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == ["holdfast.json", MODEL, INDEX, "state.json"]
