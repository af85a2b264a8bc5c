"""Columns are divided by rows or by tokens, in their order or by length, and cut where no row of a part has a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.errors import InvalidArgument
from holdfast.train.embedding.micro_batches import Division, row_count

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
TOKENS = {"input_ids": torch.arange(20).reshape(5, 4), "attention_mask": MASK, "task": "query"}


def ids(column: Any, **options: Any) -> list[list[int]]:
    """The first tokens of the rows of each part."""
    return [part["input_ids"][:, 0].tolist() for part in Division(**options).divide(column).inputs]


def test_rows_are_divided_in_their_order():
    assert Division(2).divide(list("abcde")).inputs == [["a", "b"], ["c", "d"], ["e"]]
    assert [part.shape for part in Division(9).divide(torch.zeros(4, 3)).inputs] == [(4, 3)]
    assert ids(TOKENS, micro_batch=2) == [[0, 4], [8, 12], [16]]


@pytest.mark.parametrize(
    ("most", "parts"),
    [(6, [[0, 4], [8], [12], [16]]), (3, [[0], [4], [8], [12], [16]]), (100, [[0, 4, 8, 12, 16]])],
)
def test_tokens_are_counted_with_padding(most, parts):
    assert ids(TOKENS, micro_tokens=most) == parts  # a row of four tokens has a part of its own where three are allowed
    shapes = [part["input_ids"].shape for part in Division(micro_tokens=most).divide(TOKENS).inputs]
    assert all(rows == 1 or rows * length <= most for rows, length in shapes)


def test_without_trim_every_row_is_as_long_as_the_mask():
    assert ids(TOKENS, micro_tokens=8, trim=False) == [[0, 4], [8, 12], [16]]


@pytest.mark.parametrize(
    ("options", "parts"),
    [({"micro_batch": 2}, [[12, 4], [0, 8], [16]]), ({"micro_tokens": 5}, [[12], [4], [0, 8], [16]])],
)
def test_rows_of_similar_length_share_a_part(options, parts):
    assert ids(TOKENS, sort=True, **options) == parts
    divided = Division(sort=True, **options).divide(TOKENS)
    assert [part["input_ids"].shape[1] for part in divided.inputs][-1] == 1  # the rows of one token are not padded
    joined = divided.join([part["input_ids"][:, :1] for part in divided.inputs])
    assert joined.flatten().tolist() == TOKENS["input_ids"][:, 0].tolist()
    assert Division(2, sort=True).divide(["b", "a"]).inputs == [["b", "a"]]  # nothing says how long these are


def test_padding_after_the_longest_row_is_cut():
    part = Division(3).divide(TOKENS).inputs[0]
    assert part["input_ids"].tolist() == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert part["attention_mask"].shape == (3, 3) and part["task"] == "query"
    left = {"attention_mask": MASK.flip(1), "input_ids": TOKENS["input_ids"]}
    assert Division(3).divide(left).inputs[0]["input_ids"].shape == (3, 4)  # before the text nothing is cut
    assert Division(3, trim=False).divide(TOKENS).inputs[0]["input_ids"].shape == (3, 4)
    nothing = {"attention_mask": MASK * 0, "input_ids": TOKENS["input_ids"]}
    assert Division(3).divide(nothing).inputs[0]["input_ids"].shape == (3, 1)


def test_what_cannot_be_divided_is_said():
    with pytest.raises(InvalidArgument, match="different numbers of rows"):
        row_count({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(InvalidArgument, match="attention_mask"):
        Division(micro_tokens=10).divide(torch.zeros(3, 2))
