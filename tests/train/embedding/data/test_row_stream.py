"""Which rows a batch takes, beside a plain implementation of the rule; sets that cannot fill one are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast.train.embedding.data import EmbeddingData, TextSet
from holdfast.train.embedding.data.row_order import RowOrder
from holdfast.train.embedding.data.row_stream import RowStream
from holdfast.train.embedding.data.text_set import IndexedSet
from tests.train.embedding.data.rows import pair, write


def plain(records, order, batch, batches):
    """The rule in few words: first those who wait, then those who come; who does not fit waits, nobody twice."""
    found, line, position = [], [], 0
    for _ in range(batches):
        asked, line = line[: 8 * batch], line[8 * batch :]
        texts, taken, put_off = set(), [], []
        while len(taken) < batch:
            if asked:
                row = asked.pop(0)
            else:
                row, position = int(order.rows(position, 1)[0]), position + 1
                if row in line or row in put_off:
                    continue
            own = set(records[row].values())
            (put_off if own & texts else taken).append(row)
            texts |= own if row in taken else set()
        line = [*asked, *line, *put_off]
        found.append(taken)
    return found


@pytest.mark.parametrize("shared", [2, 4, 9, 30])
@pytest.mark.parametrize("seed", range(3))
def test_the_rule(tmp_path: Path, shared: int, seed: int):
    """A batch of 2 to 8 rows, and up to 15 rows of one text: many wait, and some when their next epoch comes."""
    draw = np.random.default_rng(seed)
    records = [pair(number, int(draw.integers(shared))) for number in range(31)]
    distinct = len({record["positive"] for record in records})
    batch = min(8, distinct)
    rows = IndexedSet(TextSet(write(tmp_path / "x.jsonl", records)))
    order = RowOrder(len(rows), seed)
    stream = RowStream(rows, order, batch)
    found = []
    for _ in range(40):
        found.append(stream.draw().rows.tolist())
        stream.commit(stream.draw())
    assert found == plain(records, order, batch, 40)


def test_a_set_without_enough_different_texts_is_refused_at_once(tmp_path: Path):
    file = write(tmp_path / "x.jsonl", [pair(number, number % 3) for number in range(30)])
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.jsonl: after 3 rows .* of the 30 .* a batch needs 4"):
        EmbeddingData([TextSet(file)], global_batch=4)
    data = EmbeddingData([TextSet(file)], global_batch=3)
    for _ in range(50):
        assert len(set(data.batch().columns[1])) == 3
        data.advance()
    assert data.waiting <= 30


def test_too_many_rows_that_wait_are_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """One positive has half of the rows: nearly all of these wait. A checkpoint has no list of them, and resumes."""
    monkeypatch.setattr("holdfast.train.embedding.data.row_stream._MOST_STORED", 10)
    file = write(tmp_path / "x.jsonl", [pair(number, number if number % 2 else 0) for number in range(60)])

    def data() -> EmbeddingData:
        return EmbeddingData([TextSet(file)], global_batch=5)

    first, resumed = data(), data()
    for _ in range(25):
        first.advance()
    assert first.waiting > 10
    assert first.state_dict()["streams"] == ""
    resumed.load_state_dict(first.state_dict())
    for _ in range(25):
        assert resumed.batch().columns == first.batch().columns
        resumed.advance()
        first.advance()
