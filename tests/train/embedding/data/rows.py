"""Files of rows for tests, and what a run over them trains on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.train.embedding.data import EmbeddingData, TextSet


def write(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def pair(number: int, positive: int | None = None) -> dict[str, Any]:
    return {"query": f"query {number}", "positive": f"document {number if positive is None else positive}"}


def mixed(folder: Path, batch: int = 6, seed: int = 3) -> EmbeddingData:
    """Three sets of different lengths and weights: equal positives, more negatives than are used, and labels."""
    draw = np.random.default_rng(0)
    shared = [pair(number, int(draw.integers(20))) for number in range(47)]
    lists = [
        {**pair(number), "negatives": [f"negative {each}" for each in draw.permutation(30)[: 2 + number % 3]]}
        for number in range(23)
    ]
    labels = [{**pair(number), "label": number / 7} for number in range(31)]
    sets = [
        TextSet(write(folder / "shared.jsonl", shared), weight=3),
        TextSet(write(folder / "lists.jsonl", lists), weight=1, negatives=2),
        TextSet(write(folder / "labels.jsonl", labels), weight=0.5, duplicates="keep"),
    ]
    return EmbeddingData(sets, global_batch=batch, seed=seed)


def trained(data: EmbeddingData, batches: int, ranks: int = 1) -> list[Any]:
    """Return name, texts, numbers and labels of the next batches, each put together from its ranks' shares."""
    found = []
    for _ in range(batches):
        parts = [data.batch(rank, ranks) for rank in range(ranks)]
        columns = [
            [text for part in column for text in part] for column in zip(*(part.columns for part in parts), strict=True)
        ]
        numbers = [row for part in parts for row in part.texts.tolist()]
        labels = [label for part in parts if part.labels is not None for label in part.labels.tolist()]
        assert len({part.name for part in parts}) == 1
        found.append((parts[0].name, columns, [int(row) for part in parts for row in part.rows], numbers, labels))
        data.advance()
    return found
