import numpy as np
import pytest
import safetensors.numpy
import torch

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import InvalidArgument, StorageError
from tests.convert.states import save

FORCE = ConvertOptions(force=True)


def tree(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def weights(folder, name="model.safetensors"):
    folder.mkdir(exist_ok=True)
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, folder / name)


def source_code(folder):
    folder.mkdir()
    for name in ("train.py", "README.md", "config.json", "requirements.txt"):
        (folder / name).write_text("{}")


def code_and_weights(folder):
    source_code(folder)
    torch.save({"w": torch.ones(2)}, folder / "best.pt")


def run_root(folder):
    for step in (1, 2):
        holdfast.save(folder / f"step-{step:012d}", {"x": {"w": torch.ones(2)}}, step=step)


def run_root_with_weights(folder):
    run_root(folder)
    weights(folder)


def many_models(folder):
    weights(folder / "one" if folder.mkdir() is None else folder)
    weights(folder / "two")


@pytest.mark.parametrize("make", [source_code, code_and_weights, run_root, run_root_with_weights, many_models])
def test_force_leaves_what_is_not_one_checkpoint(tmp_path, make):
    save(tmp_path / "a")
    make(tmp_path / "b")
    before = tree(tmp_path / "b")
    with pytest.raises(StorageError, match="choose another folder, or move it away"):
        convert(tmp_path / "a", tmp_path / "b", FORCE)
    assert tree(tmp_path / "b") == before


def test_force_replaces_a_checkpoint_of_another_format(tmp_path):
    save(tmp_path / "a")
    weights(tmp_path / "b")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "merges.txt"):
        (tmp_path / "b" / name).write_text("{}")
    convert(tmp_path / "a", tmp_path / "b", FORCE)
    assert holdfast.open(tmp_path / "b").verify().good and not (tmp_path / "b" / "config.json").exists()
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="dcp", force=True))
    convert(tmp_path / "a", tmp_path / "b", FORCE)
    assert holdfast.open(tmp_path / "b").verify().good


def test_the_source_and_what_is_around_and_in_it_is_no_destination(tmp_path):
    root = tmp_path / "run"
    run_root(root)
    (root / "link").symlink_to(root / "step-000000000002")
    weights(tmp_path / "hub")
    hub = tmp_path / "hub"
    before = tree(tmp_path)
    step = root / "step-000000000002"
    pairs = [(step, root), (step, step), (step, step / "sub"), (root, step), (root, root / "link" / "sub")]
    for source, destination in [*pairs, (hub / "model.safetensors", hub), (hub, hub / "deeper" / "sub")]:
        for options in (FORCE, ConvertOptions()):
            with pytest.raises(InvalidArgument, match="contains it or is inside it"):
                convert(source, destination, options)
    assert tree(tmp_path) == before
