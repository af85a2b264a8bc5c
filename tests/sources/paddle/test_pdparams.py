"""`.pdparams` and `.pdopt`: model, masters and moments by the model's keys, bit for bit."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.core.errors import Damaged, NotFound, Unsupported
from holdfast.sources import open_stored
from tests.sources.paddle.folders import GOLDEN, check_truth, random_matrix


@pytest.mark.parametrize(("name", "count"), [("fp32", 25), ("bf16", 30)])
def test_a_folder_of_both_has_its_true_values(name: str, count: int) -> None:
    assert check_truth(GOLDEN / f"params_{name}", GOLDEN / f"truth_params_{name}.npz") == count


def test_the_scheduler_is_a_value() -> None:
    checkpoint = open_stored(GOLDEN / "params_fp32")
    assert checkpoint.value("LR_Scheduler") == {"last_epoch": 3, "last_lr": pytest.approx(0.001)}


@pytest.mark.parametrize("name", ["protocol2.pdparams", "params_fp32/model_state.pdparams"])
def test_one_file_by_its_path(name: str) -> None:
    truth = np.load(GOLDEN / "truth_params_fp32.npz")
    checkpoint = open_stored(GOLDEN / name)
    assert checkpoint.groups == ("model",)
    for key in checkpoint.keys("model"):
        assert checkpoint.read(key).tobytes() == truth[f"model::{key}"].tobytes()


def test_one_file_with_model_and_optimizer_in_it() -> None:
    assert check_truth(GOLDEN / "nested.pdparams", GOLDEN / "truth_params_fp32.npz") == 25


def test_an_optimizer_alone_keeps_the_names_that_paddle_numbers() -> None:
    checkpoint = open_stored(GOLDEN / "params_fp32" / "optimizer.pdopt")
    assert "linear_0.w_0/moment1_0" in set(checkpoint.keys("optimizer"))


def pickled(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_arrays_of_every_protocol_and_order(tmp_path: Path, protocol: int) -> None:
    arrays = {
        "large": random_matrix(1, 700, 900),
        "fortran": np.asfortranarray(random_matrix(2, 3, 5)),
        "scalar": np.array(2.5, dtype=np.float32),
        "empty": np.zeros((0, 4), dtype=np.float32),
        "numbers": np.arange(7),
    }
    checkpoint = open_stored(pickled(tmp_path / "m.pdparams", arrays, protocol))
    for key, array in arrays.items():
        got = checkpoint.read(key)
        assert got.dtype == array.dtype and np.array_equal(got, array), key


def test_a_tensor_that_was_cut_for_an_old_protocol_is_whole_again(tmp_path: Path) -> None:
    whole = random_matrix(1, 5, 4)
    cut = {"OriginShape": (5, 4), "slices": ["w@@.0", "w@@.1", "w@@.2"]}
    value: dict[str, Any] = {"UnpackBigParamInfor@@": {"w": cut}}
    value |= {f"w@@.{n}": whole.ravel()[n * 7 : n * 7 + 7] for n in range(3)}
    assert np.array_equal(open_stored(pickled(tmp_path / "m.pdparams", value)).read("w"), whole)
    value["w@@.2"] = whole.ravel()[14:19]
    with pytest.raises(Damaged, match=r"'w': its parts have 19 elements"):
        open_stored(pickled(tmp_path / "m.pdparams", value))


def test_the_same_array_under_two_keys(tmp_path: Path) -> None:
    array = random_matrix(1, 40, 40)
    checkpoint = open_stored(pickled(tmp_path / "m.pdparams", {"a": array, "b": array, "c": array[0]}))
    assert np.array_equal(checkpoint.read("a"), array) and np.array_equal(checkpoint.read("b"), array)


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("1", {})


def test_what_is_no_array_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"builtins\.eval"):
        open_stored(pickled(tmp_path / "m.pdparams", {"w": Evil()}))
    with pytest.raises(Unsupported, match="only arrays of numbers"):
        open_stored(pickled(tmp_path / "m.pdparams", {"w": np.array([{}], dtype=object)}))
    with pytest.raises(Damaged, match="a list, expected a dict"):
        open_stored(pickled(tmp_path / "m.pdparams", [1]))


def test_parts_of_tensor_parallel_ranks_are_refused(tmp_path: Path) -> None:
    pickled(tmp_path / "model_state.tp00.pdparams", {"w": random_matrix(1, 2)})
    with pytest.raises(Unsupported, match="tensor-parallel"):
        open_stored(tmp_path)


def test_several_models_in_a_folder_are_not_guessed_between(tmp_path: Path) -> None:
    for name in ("a", "b"):
        pickled(tmp_path / f"{name}.pdparams", {"w": random_matrix(1, 2)})
    with pytest.raises(Unsupported, match=r"a, b\.pdparams"):
        open_stored(tmp_path)


def test_a_scheduler_alone_is_no_checkpoint(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "protocol2.pdparams", tmp_path / "scheduler.pdparams")
    with pytest.raises(NotFound):
        open_stored(tmp_path)


NESTED = GOLDEN / "nested"
PARTS = {"model": "model", "opt": "optimizer", "ema": "ema"}


def read_all(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of a checkpoint by group and key."""
    checkpoint = open_stored(path)
    return {
        f"{group}::{key}": checkpoint.read(key, group) for group in checkpoint.groups for key in checkpoint.keys(group)
    }


def expected_of(name: str) -> dict[str, np.ndarray[Any, Any]]:
    """What Paddle had in memory, under the group and key where Holdfast has it."""
    out = {}
    for full, value in np.load(GOLDEN / "truth_nested.npz").items():
        file, _, path = full.partition("::")
        head, _, rest = path.partition(".")
        if file == name:
            out[f"{PARTS[head]}::{rest}" if name == "parts" else f"model::{path}"] = value
    return out


@pytest.mark.parametrize(("name", "count"), [("list", 2), ("deep", 1), ("mixed", 4), ("parts", 4), ("top", 3)])
def test_nested_values_that_paddle_saved_are_all_there(name: str, count: int) -> None:
    found, expected = read_all(NESTED / f"{name}.pdparams"), expected_of(name)
    assert found.keys() == expected.keys() and len(found) == count
    for key, value in expected.items():
        assert found[key].astype(value.dtype).tobytes() == value.tobytes() and found[key].shape == value.shape, key


def test_plain_values_between_nested_tensors_are_kept() -> None:
    assert open_stored(NESTED / "list.pdparams").value("l.1") == 5
    mixed = open_stored(NESTED / "mixed.pdparams")
    assert mixed.value("epoch") == 3 and mixed.value("config") == {"name": "net", "sizes": [1, 2]}
    assert open_stored(NESTED / "parts.pdparams").value("epoch") == 4


def test_a_nested_optimizer_that_paddle_saved_is_all_there() -> None:
    truth = {key: value for key, value in np.load(GOLDEN / "truth_nested.npz").items() if key.startswith("optimizer::")}
    found = read_all(NESTED / "optimizer.pdopt")
    assert len(found) == len(truth) == 20
    for key, value in truth.items():
        owner, _, state = key.rpartition("_0_")
        assert found[f"{owner}_0/{state}"].tobytes() == value.tobytes()


def test_two_nested_tensors_under_one_dotted_key_are_refused(tmp_path: Path) -> None:
    value = {"a.b": random_matrix(1, 2, 2), "a": {"b": random_matrix(2, 3)}}
    with pytest.raises(Damaged, match=r"two nested values have the key 'a\.b'"):
        open_stored(pickled(tmp_path / "m.pdparams", value))
    with pytest.raises(Damaged, match="'3' and 3 are a string and an integer"):
        open_stored(pickled(tmp_path / "m.pdparams", {"3": random_matrix(1, 2), 3: random_matrix(2, 2)}))


def test_a_tensor_by_itself_and_a_file_without_any(tmp_path: Path) -> None:
    lone = random_matrix(1, 2, 3)
    assert np.array_equal(open_stored(pickled(tmp_path / "m.pdparams", ("name", lone))).read("value"), lone)
    with pytest.raises(Unsupported, match="contains no tensors"):
        open_stored(pickled(tmp_path / "m.pdparams", {"epoch": 3}))


def test_values_that_json_cannot_hold_are_named(tmp_path: Path) -> None:
    value = {"w": random_matrix(1, 2), "kind": np.dtype("float32"), "epoch": 3}
    checkpoint = open_stored(pickled(tmp_path / "m.pdparams", value))
    assert checkpoint.value("epoch") == 3
    assert any("left out: kind: a value of type" in note for note in checkpoint.notes)


def test_an_average_beside_its_model_is_a_group_of_its_own(tmp_path: Path) -> None:
    pickled(tmp_path / "net.pdparams", {"w": random_matrix(1, 2)})
    pickled(tmp_path / "net.pdema", {"w": random_matrix(2, 2)})
    assert read_all(tmp_path).keys() == {"model::w", "ema::w"}
