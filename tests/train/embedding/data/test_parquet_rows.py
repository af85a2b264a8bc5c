"""Parquet files: the rows of the same JSONL file, a few row groups in memory, errors with the row."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.train.embedding.data import EmbeddingData, TextSet
from holdfast.train.embedding.data.parquet_rows import KeptGroups, ParquetRows
from holdfast.train.embedding.data.row_order import RowOrder
from holdfast.train.embedding.data.text_set import IndexedSet
from tests.train.embedding.data.rows import pair, trained, write

pyarrow = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write_parquet(path: Path, records, group: int = 10) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(records), path, row_group_size=group)
    return path


def records(count: int):
    return [{**pair(number), "negatives": ["a", f"b{number}"], "scores": [number, 2.0, 3.0]} for number in range(count)]


def test_the_rows_are_those_of_the_same_jsonl(tmp_path: Path):
    of_parquet = IndexedSet(TextSet(write_parquet(tmp_path / "x.parquet", records(37))))
    of_lines = IndexedSet(TextSet(write(tmp_path / "x.jsonl", records(37))))
    assert of_parquet.identity == of_lines.identity
    rows = np.random.default_rng(0).permutation(37)
    assert of_parquet.read(rows, rows * 0) == of_lines.read(rows, rows * 0)
    assert of_parquet.groups == [10, 10, 10, 7]


def test_resume_with_parquet_and_jsonl_in_one_set(tmp_path: Path):
    """Rows of both are mixed, each once per epoch, and a resume goes on with the same ones."""
    files = [write(tmp_path / "a.jsonl", records(60)[:23]), write_parquet(tmp_path / "b.parquet", records(60)[23:])]

    def data() -> EmbeddingData:
        return EmbeddingData([TextSet(files, duplicates="keep")], global_batch=6)

    whole = trained(data(), 30)
    for epoch in range(3):
        rows = [row for _, _, numbers, *_ in whole[10 * epoch : 10 * epoch + 10] for row in numbers]
        assert sorted(rows) == list(range(60))
    resumed = data()
    resumed.seek(6 * 17)
    assert trained(resumed, 13, ranks=3) == whole[17:]


def test_an_epoch_reads_each_group_about_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Windows of 3 groups, of which 6 fit into memory: 40 groups are read at most 44 times in an epoch."""
    file = write_parquet(tmp_path / "x.parquet", [pair(number) for number in range(400)])
    reads: list[int] = []
    get = KeptGroups.get

    def counted(kept, key, read):
        def noted():
            reads.append(key[1])
            return read()

        return get(kept, key, noted)

    monkeypatch.setattr(KeptGroups, "get", counted)
    rows = IndexedSet(TextSet(file))
    rows._kept._most_rows = 60
    order = RowOrder(400, 1, rows.groups, 30)
    for begin in range(0, 400, 8):
        rows.read(order.rows(begin, 8), np.zeros(8, np.int64))
        assert sum(table.num_rows for table in rows._kept._tables.values()) <= 60
    assert set(reads) == set(range(40))
    assert len(reads) <= 44


def test_bad_rows_are_named(tmp_path: Path):
    for change, message in (
        ({"positive": None}, "the row has no 'positive'"),
        ({"query": " "}, "'query' is an empty text"),
        ({"scores": [1.0, float("nan"), 0.0]}, "'scores' has nan"),
        ({"negatives": ["a", None]}, r"'negatives'\[1\] needs a text, found null"),
        ({"negatives": ["a"], "scores": [1.0, 2.0]}, "the row has 1 negative"),
    ):
        rows = records(25)
        rows[17].update(change)
        with pytest.raises(holdfast.InvalidArgument, match=rf"x\.parquet, row 18: {message}"):
            IndexedSet(TextSet(write_parquet(tmp_path / "x.parquet", rows)))


def test_bad_files_are_named(tmp_path: Path):
    def opened(name: str) -> IndexedSet:
        return IndexedSet(TextSet(tmp_path / name))

    write_parquet(tmp_path / "columns.parquet", [{"query": "a", "answer": "b"}])
    with pytest.raises(holdfast.InvalidArgument, match="no column 'positive'; the columns are query, answer"):
        opened("columns.parquet")
    parquet.write_table(
        pyarrow.table({"query": pyarrow.array([], "string"), "positive": []}), tmp_path / "none.parquet"
    )
    with pytest.raises(holdfast.InvalidArgument, match=r"none\.parquet: the file has no rows"):
        opened("none.parquet")
    (tmp_path / "text.parquet").write_text("no parquet at all")
    with pytest.raises(holdfast.InvalidArgument, match=r"text\.parquet: cannot be read as parquet"):
        opened("text.parquet")
    with pytest.raises(holdfast.NotFound, match=r"missing\.parquet"):
        opened("missing.parquet")
    whole = write_parquet(tmp_path / "torn.parquet", records(1000)).read_bytes()
    (tmp_path / "torn.parquet").write_bytes(whole[:100] + bytes(200) + whole[300:])
    with pytest.raises(holdfast.InvalidArgument, match=r"torn\.parquet: cannot be read as parquet"):
        opened("torn.parquet")


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(holdfast.Unsupported, match="pip install pyarrow"):
        ParquetRows(tmp_path / "x.parquet", columns=[], required=[], kept=KeptGroups())


def test_texts_of_every_kind_of_column(tmp_path: Path):
    kinds = [pyarrow.large_string(), pyarrow.string_view(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())]
    texts = ["a", "n\u00e9e", "\U0001f600"]
    for number, kind in enumerate(kinds):
        columns = {name: pyarrow.array(texts, pyarrow.string()).cast(kind) for name in ("query", "positive")}
        file = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.table(columns), file, row_group_size=2)
        rows = IndexedSet(TextSet(file, duplicates="keep"))
        found = rows.read(np.array([2, 0, 1]), np.zeros(3, np.int64))
        assert [row.texts for row in found] == [(texts[each],) * 2 for each in (2, 0, 1)]
