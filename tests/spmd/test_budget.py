"""How many bytes a case may cost, for cases that can be counted by hand."""

from __future__ import annotations

import pytest

from holdfast.spmd.base.torch_versions import AT_LEAST_2_13
from tests.spmd.budget import budget
from tests.spmd.cases import Case
from tests.spmd.compare import failures, grown, spoilt, why_grown
from tests.spmd.ops import all_operations
from tests.spmd.team import Finding

OPERATIONS = all_operations()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("abs", "even", "4", ("0",), "follow"), 0),
        (Case("abs", "even", "2x2", ("0", "1"), "follow"), 0),
        (Case("mse_loss_mean", "uneven", "4", ("0",), "whole"), 0),
        # 8 x 4 numbers, 3 of 4 shards of them, forward and for the gradient
        (Case("softmax_0", "even", "4", ("0",), "follow"), 2 * 3 * 8 * 8),
        # reduced once forward and twice for the gradient, each time twice 3/4 of it
        (Case("abs", "even", "4", ("P",), "follow"), 3 * 2 * 3 * 8 * 8),
        # two sums for each of 8 channels each way
        (Case("batch_norm_train", "even", "4", ("0",), "follow"), 4 * 8 * 8 * 3 // 2),
        # no gradient: once
        (Case("argsort_0", "even", "4", ("0",), "follow"), 3 * 8 * 8),
    ],
)
def test_what_a_case_may_cost(case, expected):
    assert budget(case, OPERATIONS[case.operation]) == expected


def _finding(outcome, moved=0, operation="abs"):
    return Finding(Case(operation, "even", "4", ("0",), "follow"), outcome, "", moved)


def test_what_was_right_must_stay_right_for_no_more_bytes():
    assert spoilt([_finding("right")], [_finding("raise")])
    assert spoilt([_finding("talk")], [_finding("wrong")])
    assert not spoilt([_finding("wrong")], [_finding("raise")])
    assert grown([_finding("right", 8)], [_finding("right", 9)])
    assert not grown([_finding("right", 8)], [_finding("talk", 8)])
    assert not grown([_finding("wrong", 8)], [_finding("right", 9)])


def test_more_bytes_are_excused_for_named_cases_and_up_to_a_bound():
    def pair(operation, theirs, ours, first=("1",)):
        case = Case(operation, "even", "4", first, "whole")
        return Finding(case, "right", "", theirs), Finding(case, "right", "", ours)

    assert why_grown(*pair("batch_norm_running_grad", 0, 128))
    assert why_grown(*pair("batch_norm_running_grad", 0, 129)) is None
    assert why_grown(*pair("batch_norm_running_grad", 0, 8, ("P",))) is None
    assert why_grown(*pair("abs", 0, 8, ("P",))) is None


def test_what_the_matrix_does_not_allow():
    right = [_finding("right")] * 99
    assert failures(right) == []
    assert failures([*right, _finding("wrong")])
    assert failures([*right, _finding("hang")])
    assert failures([*right, _finding("raise")])  # without a reason
    assert failures([*right, _finding("raise", operation="where_plain")]) == []
    assert failures([*right, *[_finding("raise", operation="where_plain")] * 8])  # more than 2%, and than chance allows
    assert failures([*right * 101, *[_finding("raise", operation="where_plain")] * 205])  # no slice: more than 2%
    assert failures([*right, _finding("talk")]) == []
    many = failures([*right, *[_finding("talk")] * 6])  # more than 1%, and than chance allows
    assert bool(many) is AT_LEAST_2_13  # before, torch gathers more
