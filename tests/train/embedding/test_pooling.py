"""Pooling by hand, row by row, on inputs padded on either side and in the middle."""

from __future__ import annotations

import pytest
import torch

from holdfast.train.embedding.pooling import pad_right, pool

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]],
    "between": [[1, 0, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]],
}


@pytest.mark.parametrize("side", MASKS)
def test_padding_moves_behind_the_tokens(side: str) -> None:
    mask = torch.tensor(MASKS[side])
    ids = torch.arange(1, 16).reshape(3, 5) * mask
    moved = pad_right({"input_ids": ids, "attention_mask": mask, "prompt_length": torch.ones(3), "kind": "text"})
    assert moved["attention_mask"].tolist() == MASKS["right"]
    for row in range(3):
        tokens = ids[row][mask[row].bool()].tolist()
        assert moved["input_ids"][row].tolist() == tokens + [0] * (5 - len(tokens))
    assert moved["prompt_length"].tolist() == [1.0, 1.0, 1.0] and moved["kind"] == "text"


@pytest.mark.parametrize("pooling", ["lasttoken", "mean", "cls"])
@pytest.mark.parametrize("excluded", [None, 1, torch.tensor([2, 1, 1])], ids=["whole", "number", "by row"])
def test_each_pooling_by_hand(pooling: str, excluded: torch.Tensor | int | None) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 4, dtype=torch.float64)
    found = pool(hidden, torch.tensor(MASKS["right"]).bool(), pooling, excluded)
    begins = [0, 0, 0] if excluded is None else torch.as_tensor(excluded).expand(3).tolist()
    for row, (begin, length) in enumerate(zip(begins, [3, 5, 1], strict=True)):
        tokens = hidden[row, begin:length]
        if len(tokens):
            expected = {"lasttoken": tokens[-1], "mean": tokens.mean(0), "cls": tokens[0]}[pooling]
        else:  # as sentence-transformers
            expected = hidden[row, 0] if pooling == "cls" else torch.zeros(4, dtype=torch.float64)
        torch.testing.assert_close(found[row], expected)


def test_the_mean_of_many_rounded_numbers_is_exact() -> None:
    hidden = torch.full((1, 3000, 1), 1.0078125, dtype=torch.bfloat16)
    assert pool(hidden, torch.ones(1, 3000, dtype=torch.bool), "mean").item() == 1.0078125
