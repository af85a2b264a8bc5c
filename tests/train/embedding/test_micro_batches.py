"""Columns are divided in their order, by rows or by tokens, and cut where no row of a part has a token."""

from __future__ import annotations

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.micro_batches import row_count, row_ranges, take_rows

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
TOKENS = {"input_ids": torch.arange(20).reshape(5, 4), "attention_mask": MASK, "task": "query"}


def test_rows_are_divided_in_their_order():
    assert row_ranges(list("abcde"), 2, None) == [(0, 2), (2, 4), (4, 5)]
    assert row_ranges(torch.zeros(4, 3), 9, None) == [(0, 4)]
    assert take_rows(list("abcde"), 2, 4) == ["c", "d"]


@pytest.mark.parametrize(
    ("most", "ranges"),
    [(5, [(0, 2), (2, 4), (4, 5)]), (3, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]), (100, [(0, 5)])],
)
def test_tokens_are_counted_by_the_mask(most, ranges):
    assert row_ranges(TOKENS, 1, most) == ranges  # a row of four tokens has a part of its own where three are allowed


def test_padding_after_the_longest_row_is_cut():
    part = take_rows(TOKENS, 0, 3, trim=True)
    assert part["input_ids"].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert part["attention_mask"].shape == (3, 3) and part["task"] == "query"
    left = {"attention_mask": MASK.flip(1), "input_ids": TOKENS["input_ids"]}
    assert take_rows(left, 0, 3, trim=True)["input_ids"].shape == (3, 4)  # before the text nothing is cut


def test_what_cannot_be_divided_is_said():
    with pytest.raises(InvalidArgument, match="different numbers of rows"):
        row_count({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(InvalidArgument, match="attention_mask"):
        row_ranges(torch.zeros(3, 2), 1, 10)
