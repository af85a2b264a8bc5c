"""Held-out files, and what is wrong with them, with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.train.embedding.data import RowFields
from holdfast.train.embedding.evaluation import RetrievalSet, SimilaritySet
from tests.train.embedding.data.rows import pair, write

QUERIES = [{"id": 7, "text": "q7"}, {"id": "b", "text": "qb"}, {"id": "none", "text": "left out"}]
DOCUMENTS = [{"id": each, "text": f"text of {each}"} for each in ("z", 10, "a", 9)]
RELEVANT = [
    {"query": "b", "document": "a"},
    {"query": 7, "document": "z", "grade": 3},
    {"query": 7, "document": "9", "grade": 0.5},
    {"query": "none", "document": "a", "grade": 0},
]


def read(folder: Path, **files: Any) -> RetrievalSet:
    files = {"queries": QUERIES, "documents": DOCUMENTS, "relevant": RELEVANT, **files}
    queries, documents, relevant = (write(folder / f"{name}.jsonl", records) for name, records in files.items())
    return RetrievalSet.read(queries, documents, relevant)


def test_three_files(tmp_path: Path):
    found = read(tmp_path)
    assert found.queries == ["q7", "qb"]
    assert found.documents == ["text of 10", "text of 9", "text of a", "text of z"]
    assert found.relevant == [{3: 3.0, 1: 0.5}, {2: 1.0}]


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("queries", {"id": "b", "text": "again"}, r"queries\.jsonl:4: the id 'b' was used before"),
        ("queries", {"id": "7", "text": "again"}, r"queries\.jsonl:4: the id '7' was used before"),
        ("queries", {"id": True, "text": "x"}, r"queries\.jsonl:4: 'id' needs an id"),
        ("documents", {"text": "x"}, r"documents\.jsonl:5: 'id' needs an id.* 'text'"),
        ("documents", {"id": "x", "text": " "}, r"documents\.jsonl:5: 'text' is an empty text"),
        ("documents", {"id": "x"}, r"documents\.jsonl:5: 'text' needs a text, found null"),
        ("relevant", {"query": "x", "document": "a"}, r"relevant\.jsonl:5: the query 'x' is not in .*queries"),
        ("relevant", {"query": 7, "document": "x"}, r"relevant\.jsonl:5: the document 'x' is not in .*documents"),
        ("relevant", {"query": 7, "document": "z"}, r"relevant\.jsonl:5: the document 'z' was given"),
        ("relevant", {"query": 7, "document": "a", "grade": -1}, r"relevant\.jsonl:5: 'grade' is -1"),
        ("relevant", {"query": 7, "document": "a", "grade": float("nan")}, r"relevant\.jsonl:5: 'grade' has nan"),
        ("relevant", {"query": 7, "document": "a", "grade": "high"}, r"relevant\.jsonl:5: 'grade' needs numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, name: str, record, message: str):
    files: dict[str, list[Any]] = {"queries": QUERIES, "documents": DOCUMENTS, "relevant": RELEVANT}
    with pytest.raises(holdfast.InvalidArgument, match=message):
        read(tmp_path, **{name: [*files[name], record]})


@pytest.mark.parametrize("name", ["queries", "documents", "relevant"])
def test_files_of_nothing(tmp_path: Path, name: str):
    with pytest.raises(holdfast.InvalidArgument, match=rf"{name}\.jsonl: (the file has no rows|no query has)"):
        read(tmp_path, **{name: []})


def test_rows_as_for_training(tmp_path: Path):
    rows = [
        {"query": "a", "positive": "A", "negatives": ["B", "C"]},
        {"query": "b", "positive": "B", "negatives": ["A"]},
        {"query": "a", "positive": "D"},
    ]
    found = RetrievalSet.from_rows(write(tmp_path / "x.jsonl", rows))
    assert (found.queries, found.documents) == (["a", "b"], ["A", "B", "C", "D"])
    assert found.relevant == [{0: 1.0, 3: 1.0}, {1: 1.0}]
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.jsonl:2: the row has no 'positive'"):
        RetrievalSet.from_rows(write(tmp_path / "x.jsonl", [rows[0], {"query": "b"}]))
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.jsonl: the file has no rows"):
        RetrievalSet.from_rows(write(tmp_path / "x.jsonl", []))


def test_pairs_with_labels(tmp_path: Path):
    rows = [{"s1": f"a{number}", "s2": f"b{number}", "score": number} for number in range(3)]
    fields = RowFields(query="s1", positive="s2", label="score")
    found = SimilaritySet.read(write(tmp_path / "x.jsonl", rows), fields)
    assert found == SimilaritySet(("a0", "a1", "a2"), ("b0", "b1", "b2"), (0.0, 1.0, 2.0))
    for rows, message in (
        ([{**pair(0), "label": 1}, pair(1)], r"x\.jsonl:2: the row has no 'label'"),
        ([{**pair(0), "label": float("nan")}], r"x\.jsonl:1: 'label' has nan"),
        ([{**pair(0), "label": 1}], r"x\.jsonl: 1 rows"),
    ):
        with pytest.raises(holdfast.InvalidArgument, match=message):
            SimilaritySet.read(write(tmp_path / "x.jsonl", rows))


@pytest.mark.parametrize("relevant", [[{}], [{1: 1.0}], [{0: 0.0}], [{0: float("nan")}], [], [{0: 1.0}] * 2], ids=str)
def test_sets_that_make_no_sense(relevant):
    with pytest.raises(holdfast.InvalidArgument):
        RetrievalSet(["q"], ["d"], relevant)
    with pytest.raises(holdfast.InvalidArgument):
        SimilaritySet(["a"], ["b"], [1.0])
