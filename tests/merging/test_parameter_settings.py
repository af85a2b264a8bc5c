import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.merging.parameter_settings import Setting, number


def test_one_value_is_that_of_all_keys():
    assert Setting.of(0.5, "weight").at("any.key", 0.3) == 0.5


def test_the_first_pattern_that_matches_decides():
    setting = Setting.of({"*.mlp.*": 1, "layers.*": 2}, "weight")
    assert setting.at("layers.0.mlp.up", 0) == 1
    assert setting.at("layers.0.norm", 0) == 2
    assert setting.at("embed", 0) is None


def test_a_gradient_is_interpolated_over_the_layers():
    setting = Setting.of([0.0, 1.0, 0.5], "t")
    assert [setting.at("k", depth) for depth in (0, 0.25, 0.5, 0.75, 1)] == [0.0, 0.5, 1.0, 0.75, 0.5]


def test_truth_values_are_not_interpolated():
    assert [Setting.of([True, False], "normalize").at("k", depth) for depth in (0, 0.9, 1)] == [True, True, False]


def test_text_of_a_command_line_becomes_numbers():
    assert number("1e-2", "weight") == 0.01
    assert number(" False ", "normalize") is False


@pytest.mark.parametrize("value", ["much", "nan", float("inf"), None, [], {"*": "x"}, [[1]]])
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(InvalidArgument, match="weight: expected a"):
        Setting.of(value, "weight")


@pytest.mark.parametrize("value", [0.25, [0.0, 1.0], {"*.mlp.*": 1.0, "*": [0.5, 0.25]}])
def test_written_is_what_was_read(value):
    assert Setting.of(value, "weight").written() == value
