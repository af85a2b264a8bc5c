import json

import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.differences import _compare_values, _ordered
from tests.cli.calls import call


@pytest.fixture
def saved(tmp_path):
    def save(name, model, **others):
        holdfast.save(tmp_path / name, {"model": model, **others})
        return tmp_path / name

    return save


def differences(first, second):
    done = call("diff", first, second, "--json")
    fields = json.loads(done.output)
    assert done.exit_code == (0 if fields["same"] else 1)
    return fields["differences"]


def test_a_checkpoint_is_the_same_as_itself(step):
    done = call("diff", step, step)
    lines = [f"first:  {step}", f"second: {step}", "note: both are the same folder", "the same"]
    assert (done.exit_code, done.output.splitlines()) == (0, lines)
    found = json.loads(call("diff", step, step, "--json").output)
    assert found == {"first": str(step), "second": str(step), "same": True, "differences": []}
    step.with_name("link").symlink_to(step)
    assert "note: both are the same folder" in call("diff", step, step.with_name("link")).output


def test_the_folders_that_are_compared_are_named(run):
    done = call("diff", run, run / "step-2")
    assert done.output.splitlines()[:2] == [f"first:  {run}/step-000000000100", f"second: {run}/step-000000000002"]
    assert "the same folder" not in done.output


def test_equal_tensors_in_other_files_are_the_same(saved, tmp_path):
    tensors = {"a": torch.arange(10.0), "b": torch.ones(3)}
    first = saved("first", tensors)
    holdfast.save(tmp_path / "second", {"model": tensors}, max_shard_size=40)
    assert len(holdfast.open(tmp_path / "second").manifest.groups["model"].files) == 2
    assert call("diff", first, tmp_path / "second").exit_code == 0


def test_a_value_of_state_json_that_differs_is_named(run, step):
    done = call("diff", run / "step-000000000010", step)
    assert done.exit_code == 1
    assert done.output.endswith("\nstate.json: note.value.epoch: the value differs: 10 against 100\n1 difference\n")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8]
)
def test_the_differences_of_values_are_those_numpy_finds(saved, dtype):
    rng = np.random.default_rng(3)
    a = torch.from_numpy(rng.uniform(0, 100, (7, 5))).to(dtype)
    b = a.clone()
    b[2:4] = torch.from_numpy(rng.uniform(0, 100, (2, 5))).to(dtype)
    first, second = saved("first", {"w": a, "same": a}), saved("second", {"w": b, "same": a})
    gap = np.abs(a.double().numpy() - b.double().numpy())
    (found,) = differences(first, second)
    assert (found["group"], found["key"], found["what"]) == ("model", "w", "values differ")
    assert found["max_abs"] == gap.max()
    assert found["mean_abs"] == pytest.approx(gap.mean(), rel=1e-12)
    assert found["elements"] == np.count_nonzero(gap)


def test_the_difference_is_said_in_one_line(saved):
    first, second = (
        saved("first", {"w": torch.tensor([1.0, 2.0, 3.0])}),
        saved("second", {"w": torch.tensor([1.0, 2.5, 3.0])}),
    )
    output = call("diff", first, second).output.splitlines()
    assert output[2:] == [
        "model: w: values differ: 1 element, max |difference| 0.5, mean 0.166667",
        "1 difference",
    ]


def test_a_difference_of_one_in_a_large_integer_is_found(saved):
    first = saved("first", {"w": torch.tensor([2**62, 5])})
    second = saved("second", {"w": torch.tensor([2**62 + 1, 5])})
    (found,) = differences(first, second)
    assert (found["elements"], found["max_abs"], found["mean_abs"]) == (1, 1.0, 0.5)


def test_complex_values_differ_by_their_distance(saved):
    first = saved("first", {"w": torch.tensor([0j, 1j], dtype=torch.complex128)})
    second = saved("second", {"w": torch.tensor([3 + 4j, 1j], dtype=torch.complex128)})
    (found,) = differences(first, second)
    assert (found["elements"], found["max_abs"], found["mean_abs"]) == (1, 5.0, 2.5)


def test_values_that_are_not_finite_count_but_have_no_distance(saved):
    first = saved("first", {"w": torch.tensor([float("inf"), 1.0])})
    second = saved("second", {"w": torch.tensor([float("nan"), 3.0])})
    (found,) = differences(first, second)
    assert (found["elements"], found["max_abs"], found["mean_abs"]) == (2, 2.0, 2.0)


def test_equal_nans_are_the_same(saved):
    nan = torch.tensor([float("nan"), float("inf")])
    first, second = saved("first", {"w": nan, "x": torch.zeros(1)}), saved("second", {"w": nan, "x": torch.ones(1)})
    assert [found["key"] for found in differences(first, second)] == ["x"]


def test_negative_zero_is_another_value(saved):
    first, second = saved("first", {"w": torch.tensor([0.0])}), saved("second", {"w": torch.tensor([-0.0])})
    (found,) = differences(first, second)
    assert (found["elements"], found["max_abs"]) == (1, 0.0)


def test_keys_of_only_one_side_are_named_with_the_side(saved):
    one = torch.ones(1)
    first, second = saved("first", {"a": one, "both": one}), saved("second", {"b": one, "both": one})
    found = [(found["key"], found["what"]) for found in differences(first, second) if found["group"] == "model"]
    assert found == [("a", "only in the first"), ("b", "only in the second")]


def test_a_shape_that_differs_is_named_with_both(saved):
    first, second = saved("first", {"w": torch.ones(2, 3)}), saved("second", {"w": torch.ones(3, 2)})
    (found,) = differences(first, second)
    assert (found["what"], found["first"], found["second"]) == ("the shape differs", "[2, 3]", "[3, 2]")


def test_a_dtype_that_differs_is_named_with_both(saved):
    first = saved("first", {"w": torch.ones(2)})
    second = saved("second", {"w": torch.ones(2, dtype=torch.bfloat16)})
    (found,) = differences(first, second)
    assert (found["what"], found["first"], found["second"]) == ("the dtype differs", "float32", "bfloat16")


def test_rounding_to_another_dtype_is_measured(saved):
    values = torch.tensor([1.0, 1.0 + 2**-10])
    first, second = saved("first", {"w": values}), saved("second", {"w": values.bfloat16()})
    what = {found["what"]: found for found in differences(first, second)}
    assert what["values differ"]["max_abs"] == 2**-10
    assert what["values differ"]["elements"] == 1


@pytest.mark.parametrize(("order", "side"), [((0, 1), "second"), ((1, 0), "first")])
def test_a_group_of_only_one_side_is_named_with_the_side(saved, order, side):
    paths = [saved("less", {"w": torch.ones(1)}), saved("more", {"w": torch.ones(1)}, ema={"w": torch.ones(1)})]
    output = call("diff", *(paths[at] for at in order)).output
    assert f"ema: *: the group is only in the {side}\n" in output


def test_one_group_is_compared_alone(saved):
    first = saved("first", {"w": torch.ones(1)}, ema={"w": torch.ones(1)})
    second = saved("second", {"w": torch.ones(1)}, ema={"w": torch.zeros(1)})
    assert call("diff", first, second, "--group", "model").exit_code == 0
    assert call("diff", first, second, "--group", "ema").exit_code == 1
    assert call("diff", first, second, "--group", "ema", "--group", "model").exit_code == 1  # not the last one only
    assert "'other'; the groups are ema, model" in str(call("diff", first, second, "--group", "other").exception)


def test_a_key_that_turns_text_around_is_made_visible(saved):
    first, second = saved("first", {"a\u202eb": torch.ones(1)}), saved("second", {"a\u202eb": torch.zeros(1)})
    output = call("diff", first, second).output
    assert r"model: a\x202eb: values differ" in output
    assert output.replace("\n", "").isprintable()


def test_the_parameters_of_a_group_are_a_set():
    def entry(*params):
        return {"kind": "optimizer", "groups": [{"params": list(params), "options": {}}], "stateless": []}

    assert not [*_compare_values("o", _ordered(entry("a", "b")), _ordered(entry("b", "a")))]
    assert [*_compare_values("o", _ordered(entry("a", "b")), _ordered(entry("c", "a")))]
    assert _ordered({"kind": "json", "value": [2, 1]}) == {"kind": "json", "value": [2, 1]}


def test_a_list_with_many_differences_takes_one_line():
    """The state of a random generator is a list of 625 numbers."""
    (found,) = _compare_values("random", {"numbers": [0, *range(600)]}, {"numbers": [0, *range(1, 601)]})
    assert (found.key, found.what, found.elements) == ("random.numbers", "600 of 601 values differ", 600)
    assert len([*_compare_values("o", [1, 2, 3, 4], [1, 3, 2, 4])]) == 2


def test_entries_of_a_log_that_differ_are_named(saved):
    log = [{"step": 1, "loss": 2.0}, {"step": 2, "eval_runtime": 0.06}]
    other = [log[0], {"step": 2, "eval_runtime": 0.11}]
    first, second = saved("a", {"log": json.dumps(log)}), saved("b", {"log": json.dumps(other)})
    assert ".value.log[1].eval_runtime: the value differs: 0.06 against 0.11" in call("diff", first, second).output
    longer = saved("c", {"log": [*other, {"step": 3}]})
    lines = call("diff", saved("d", {"log": log}), longer).output
    assert "the number of entries differs: 2 against 3" in lines
    assert "[1].eval_runtime" in lines
    assert "differs" in call("diff", saved("e", {"log": "[1, 2"}), saved("f", {"log": "[1, 3"})).output
