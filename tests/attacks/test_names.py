"""Hostile names: refused wherever they stand, for the name and not for want of a file; keys never become paths."""

import os
import shutil

import pytest
import torch

import holdfast
from holdfast.core.errors import Damaged, HoldfastError
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.forge import INDEX, MODEL, forge_manifest
from tests.attacks.names import IN_FILES, IN_KEYS, IN_WEIGHT_MAP, NAMES, WRITABLE


@pytest.mark.parametrize("attack", [*IN_KEYS, *IN_FILES, *IN_WEIGHT_MAP], ids=lambda attack: attack.name)
def test_a_hostile_name_comes_to_nothing(original, tmp_path, attack):
    assert problem_of(attack, lay_out(attack, original, tmp_path)) == ""


@pytest.mark.parametrize("name", WRITABLE)
def test_a_hostile_name_among_the_files_of_a_group(checkpoint, name):
    forge_manifest(checkpoint, lambda fields: fields["groups"]["model"].update(files=[MODEL, name]))
    with pytest.raises(Damaged, match=r"names the file .* which is not recorded") as caught:
        holdfast.open(checkpoint)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "a\ud800"])
def test_a_hostile_group_name(checkpoint, name):
    forge_manifest(checkpoint, lambda fields: fields["groups"].update({name: fields["groups"]["model"]}))
    with pytest.raises(HoldfastError, match="cannot name a group") as caught:
        holdfast.open(checkpoint)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("twins", [("EMA", "ema"), ("model", "Model"), ("a.b", "A.b")])
def test_groups_that_differ_only_by_case_are_never_saved(tmp_path, twins):
    state = {name: {"x": torch.ones(2)} for name in twins}
    with pytest.raises(holdfast.Unsupported, match="differ only by case; rename one"):
        holdfast.save(tmp_path / "c", state)
    with (
        holdfast.Checkpointer(tmp_path / "run") as checkpointer,
        pytest.warns(holdfast.HoldfastWarning, match="step 1 was not saved"),
        pytest.raises(holdfast.Unsupported, match="differ only by case; rename one"),
    ):
        checkpointer.save(1, state).result()
    assert not (tmp_path / "c").exists()
    assert not list(tmp_path.glob("run/step-*"))


def test_a_name_that_is_a_twin_of_the_masters_group_is_never_saved(tmp_path):
    state = {"model": torch.nn.Linear(2, 2), "Master_Weights": {"x": torch.ones(2)}}
    with pytest.raises(HoldfastError, match="differ only by case"):
        holdfast.save(tmp_path / "c", state, model_dtype="bfloat16")
    shutil.rmtree(tmp_path / "c", ignore_errors=True)
    holdfast.save(tmp_path / "c", state)


def test_keys_that_look_like_paths_never_become_paths(tmp_path):
    keys = ["../../etc/x", "/etc/x", "..", "C:\\x", "con", "%2e%2e", "a/b/c/d", "A", "a", "é" * 500]
    tensors = {key: torch.full((2,), float(number)) for number, key in enumerate(keys)}
    holdfast.save(tmp_path / "c", {"model": dict(tensors)})
    found = holdfast.open(tmp_path / "c")
    assert {key: found.read(key).tolist() for key in found.keys("model")} == {k: t.tolist() for k, t in tensors.items()}
    assert os.listdir(tmp_path) == ["c"]
    assert sorted(os.listdir(tmp_path / "c")) == ["holdfast.json", MODEL, INDEX, "state.json"]
