"""Rows of files as they are written, and each kind of bad input with its file and line."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.train.embedding.data import RowFields, TextSet
from holdfast.train.embedding.data.text_set import IndexedSet
from tests.train.embedding.data.rows import pair, write

GOOD = json.dumps(pair(0))


def read(settings: TextSet, count: int):
    rows = IndexedSet(settings)
    assert len(rows) == count
    return rows.read(np.arange(count), np.zeros(count, np.int64))


def test_several_files_other_names_and_empty_lines(tmp_path: Path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    line = '{"q": "ä %d", "p": "b", "n1": "c", "n2": "d", "s": [1, 2.5], "more": 1}'
    first.write_text(f"\n{line % 0}\n  \n{line % 1}\r\n\n")
    second.write_text(line % 2)  # without an end of line
    fields = RowFields(query="q", positive="p", negatives=("n1", "n2"), scores="s")
    rows = read(TextSet([first, second], fields=fields), 3)
    assert [row.texts for row in rows] == [(f"ä {number}", "b", "c", "d") for number in range(3)]
    assert [row.scores for row in rows] == [(1.0, 2.5)] * 3


def test_one_negative_is_a_list_of_one(tmp_path: Path):
    rows = read(
        TextSet(write(tmp_path / "x.jsonl", [{**pair(0), "negatives": "n"}, {**pair(1), "negatives": ["m"]}])), 2
    )
    assert [row.texts[2:] for row in rows] == [("n",), ("m",)]


BAD = {  # a line of a file, and its error
    "no JSON": ('{"query": "a", "positive"', "not a line of JSON in UTF-8"),
    "no object": ('["a", "b"]', "expected an object"),
    "deep": ("[" * 100_000, "not a line of JSON in UTF-8"),
    "no positive": ('{"query": "a"}', "the row has no 'positive'; its fields are 'query'"),
    "null": ('{"query": "a", "positive": null}', "the row has no 'positive'"),
    "no fields": ("{}", "the row has no 'query'; its fields are none"),
    "empty query": ('{"query": "", "positive": "b"}', "'query' is an empty text"),
    "blank positive": ('{"query": "a", "positive": " \\n"}', "'positive' is an empty text"),
    "empty negative": ('{"query": "a", "positive": "b", "negatives": ["c", ""]}', r"'negatives'\[1\] is an empty text"),
    "a number": ('{"query": 3, "positive": "b"}', "'query' needs a text, found a number"),
    "a list": ('{"query": "a", "positive": ["b"]}', "'positive' needs a text, found a list"),
    "surrogate": ('{"query": "a\\ud800", "positive": "b"}', "half a surrogate pair at character 1"),
    "NaN label": ('{"query": "a", "positive": "b", "label": NaN}', "'label' has nan"),
    "infinite label": ('{"query": "a", "positive": "b", "label": -1e999}', "'label' has -inf"),
    "long label": (f'{{"query": "a", "positive": "b", "label": 1{"0" * 400}}}', "'label' has inf"),
    "true": ('{"query": "a", "positive": "b", "label": true}', "'label' needs numbers, found true or false"),
    "NaN score": ('{"query": "a", "positive": "b", "negatives": ["c"], "scores": [1, NaN]}', "'scores' has nan"),
    "text score": ('{"query": "a", "positive": "b", "scores": ["1"]}', "'scores' needs numbers, found a text"),
    "one score": ('{"query": "a", "positive": "b", "scores": 1}', "'scores' needs a list of 1 numbers"),
    "few scores": ('{"query": "a", "positive": "b", "negatives": ["c", "d"], "scores": [1]}', "list of 3 .*: found 1"),
    "no scores": ('{"query": "a", "positive": "b", "scores": []}', "list of 1 numbers .*: found 0"),
    "more negatives": (
        '{"query": "a", "positive": "b", "negatives": ["c"]}',
        "has 1 negative, and the first one .*1.* 0",
    ),
    "a label": ('{"query": "a", "positive": "b", "label": 1}', r"has a 'label', unlike the first one .*x\.jsonl:1"),
    "a score": ('{"query": "a", "positive": "b", "scores": [1]}', "has 'scores', unlike the first one"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_line_is_named(tmp_path: Path, kind: str):
    line, message = BAD[kind]
    file = tmp_path / "x.jsonl"
    file.write_text(f"{GOOD}\n\n{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(holdfast.InvalidArgument, match=message) as error:
        IndexedSet(TextSet(file))
    assert str(error.value).startswith(f"{file}:4: ")


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"label": 1}, {}, "has no 'label', unlike"),
        ({"negatives": ["c"], "scores": [1]}, {"negatives": ["c"]}, "has no 'scores', unlike"),
        ({"negatives": ["c"], "scores": [1]}, {"negatives": ["c"], "scores": [1, 2]}, "one for each negative only"),
        ({"negatives": ["c", "d"]}, {"negatives": ["c"]}, "negatives=N to use N"),
    ],
)
def test_rows_that_differ(tmp_path: Path, first, second, message: str):
    file = write(tmp_path / "x.jsonl", [{**pair(0), **first}, {**pair(1), **second}])
    with pytest.raises(holdfast.InvalidArgument, match=rf"x\.jsonl:2: .*{message}"):
        IndexedSet(TextSet(file))


def test_a_row_with_fewer_negatives_than_are_used(tmp_path: Path):
    file = write(tmp_path / "x.jsonl", [{**pair(0), "negatives": list("abc")}, {**pair(1), "negatives": ["a"]}])
    assert [len(row.texts) for row in read(TextSet(file, negatives=1), 2)] == [3, 3]
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.jsonl:2: the row has 1 negative, and negatives=2"):
        IndexedSet(TextSet(file, negatives=2))


def test_bytes_that_are_no_text(tmp_path: Path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(GOOD.encode() + b'\n{"query": "\xff", "positive": "b"}\n')
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.jsonl:2: not a line of JSON in UTF-8"):
        IndexedSet(TextSet(file))


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_of_nothing(tmp_path: Path, content: str):
    good, empty = write(tmp_path / "a.jsonl", [pair(0)]), tmp_path / "b.jsonl"
    empty.write_text(content)
    with pytest.raises(holdfast.InvalidArgument, match=r"b\.jsonl: the file has no rows"):
        IndexedSet(TextSet([good, empty]))


def test_files_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "folder.jsonl").mkdir()
    for name in ("missing.jsonl", "folder.jsonl"):
        with pytest.raises(holdfast.NotFound, match=f"{name}: cannot read"):
            IndexedSet(TextSet(tmp_path / name))
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.csv: rows are read from \.jsonl and \.parquet"):
        IndexedSet(TextSet(tmp_path / "x.csv"))


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbf%s\n%s\n",
        b"%s\r\n%s\r\n",
        b"\n\n%s\n \n%s",
        b"\xef\xbb\xbf\n%s\n\xef\xbb\xbf%s\n\n",
    ],
    ids=["mark", "crlf", "empty lines", "joined files with marks"],
)
def test_marks_ends_of_lines_and_empty_lines(tmp_path: Path, content: bytes):
    texts = ["n\u00e9e \u6f22 \U0001f600\u2028\x85", "b" * 300_000]
    written = [json.dumps({"query": text, "positive": "p"}, ensure_ascii=False).encode() for text in texts]
    (tmp_path / "x.JSONL").write_bytes(content % tuple(written))
    assert [row.texts[0] for row in read(TextSet(tmp_path / "x.JSONL"), 2)] == texts
    (tmp_path / "x.JSONL").write_bytes(content % (written[0], b'{"query": "a"}'))
    line = 1 + (content % (written[0], b"<here>")).partition(b"<here>")[0].count(b"\n")
    with pytest.raises(holdfast.InvalidArgument, match=rf"x\.JSONL:{line}: the row has no 'positive'.*RowFields"):
        IndexedSet(TextSet(tmp_path / "x.JSONL"))


def test_compressed_files_are_told_from_damaged_ones(tmp_path: Path):
    for name, message in (("x.jsonl", "is compressed, .*: gunzip it first"), ("x.jsonl.gz", "decompress it first")):
        (tmp_path / name).write_bytes(gzip.compress(GOOD.encode()))
        with pytest.raises(holdfast.InvalidArgument, match=message):
            IndexedSet(TextSet(tmp_path / name))


def test_settings_that_make_no_sense():
    for wrong in ({"paths": []}, {"paths": "x", "negatives": -1}, {"paths": "x", "duplicates": "drop"}):
        with pytest.raises(holdfast.InvalidArgument):
            TextSet(**wrong)
    with pytest.raises(holdfast.InvalidArgument, match="a name of its own"):
        RowFields(query="text", positive="text")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_texts_are_never_all_in_memory(tmp_path: Path, kind: str):
    """A file of 20 MB: opening it, and reading a batch from all over it, takes less than a fifth of that."""
    records = [{"query": f"{number} " * 900, "positive": f"p{number} " * 900} for number in range(2000)]
    file = write(tmp_path / "x.jsonl", records)
    if kind == "parquet":
        pyarrow, file = pytest.importorskip("pyarrow"), tmp_path / "x.parquet"
        pytest.importorskip("pyarrow.parquet").write_table(
            pyarrow.Table.from_pylist(records), file, row_group_size=100, compression="none"
        )
    del records
    tracemalloc.start()
    try:
        rows = IndexedSet(TextSet(file))
        assert tracemalloc.get_traced_memory()[1] < 4e6
        batch = rows.read(np.arange(0, 2000, 100), np.zeros(20, np.int64))
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()
    assert [row.texts[0].split()[0] for row in batch] == [str(number) for number in range(0, 2000, 100)]
