"""The same batches whatever the number of ranks, and after a resume at any of them; nothing is read to find them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import holdfast
from holdfast.train.embedding.data import EmbeddingData, TextSet
from holdfast.train.embedding.data.json_lines import JsonLines
from tests.train.embedding.data.rows import mixed, pair, trained, write

BATCHES = 40


def test_the_batches_are_the_same_whatever_the_number_of_ranks(tmp_path: Path):
    whole = trained(mixed(tmp_path), BATCHES)
    for ranks in (2, 3, 4, 6):
        assert trained(mixed(tmp_path), BATCHES, ranks) == whole
    assert {len(queries) for _, (queries, *_), *_ in whole} == {6}
    assert [len(mixed(tmp_path).batch(rank, 4).rows) for rank in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize(("way", "every"), [("state", 1), ("count", 4)])
def test_a_resume_at_any_batch_goes_on_with_the_same_rows(tmp_path: Path, way: str, every: int):
    """From the stored streams, and from `consumed_samples` alone; on another number of ranks each time."""
    whole = trained(mixed(tmp_path), BATCHES)
    first, resumed = mixed(tmp_path), mixed(tmp_path)
    waiting = 0
    for done in range(BATCHES - 3):
        if done % every:
            first.advance()
            continue
        state = json.loads(json.dumps(first.state_dict()))
        resumed.load_state_dict(state if way == "state" else {**state, "streams": ""})
        assert resumed.consumed_samples == 6 * done
        assert resumed.state_dict() == state
        assert trained(resumed, 3, ranks=1 + done % 6) == whole[done : done + 3]
        waiting = max(waiting, first.waiting)
        first.batch()
        assert first.state_dict() == state, "a batch was read, and not yet trained on"
        first.advance()
    assert waiting > 5, "rows were put off across the resumes"


def test_a_seek_reads_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = trained(mixed(tmp_path), 40)
    data = mixed(tmp_path)
    rows_read: list[int] = []
    read = JsonLines.read

    def noted(file, rows):
        rows_read.extend(rows)
        return read(file, rows)

    monkeypatch.setattr(JsonLines, "read", noted)
    data.seek(39 * 6)
    assert rows_read == []
    assert trained(data, 1) == whole[39:]
    assert len(rows_read) == 6


def test_a_checkpoint_holds_the_position(tmp_path: Path):
    whole = trained(mixed(tmp_path), 30)
    data = mixed(tmp_path)
    trained(data, 17)
    holdfast.save(tmp_path / "saved", {"data": data})
    resumed = mixed(tmp_path)
    holdfast.load(tmp_path / "saved", {"data": resumed})
    assert trained(resumed, 13) == whole[17:]


def test_no_text_is_twice_in_a_batch(tmp_path: Path):
    """Each text of a row is unlike all texts of the other rows; where duplicates are kept, some are not."""
    for name, columns, *_ in trained(mixed(tmp_path), 120):
        texts = [text for column in columns for text in column]
        assert len(set(texts)) == len(texts) or name == "labels"
    records = [pair(number, number % 5) for number in range(20)]
    data = EmbeddingData([TextSet(write(tmp_path / "x.jsonl", records), duplicates="keep")], global_batch=10)
    assert len(set(data.batch().columns[1])) < 10


def test_every_row_comes_once_per_epoch(tmp_path: Path):
    """Rows trained on and rows that wait are those of the positions so far: none is lost, none repeated."""
    records = [pair(number, number if number % 30 else 0) for number in range(100)]
    data = EmbeddingData([TextSet(write(tmp_path / "x.jsonl", records))], global_batch=9, seed=5)
    found: Counter[int] = Counter()
    for _ in range(60):
        found.update(data.batch().rows.tolist())
        data.advance()
    drawn, *waiting = map(int, data.state_dict()["streams"].split(","))
    assert drawn == 540 + len(waiting)
    assert max(found.values()) - min(found.values()) <= 1 + len(waiting)
    assert set(found) == set(range(100))
    assert data.epochs() == {"x": drawn / 100}


def test_weights_are_shares_of_the_batches(tmp_path: Path):
    counts = Counter(name for name, *_ in trained(mixed(tmp_path), 225))
    assert all(abs(counts[name] - share) <= 2 for name, share in (("shared", 150), ("lists", 50), ("labels", 25)))


def test_without_weights_sets_count_by_their_rows(tmp_path: Path):
    sets = [
        TextSet(write(tmp_path / f"{rows}.jsonl", [pair(number) for number in range(rows)])) for rows in (40, 80, 120)
    ]
    counts = Counter(name for name, *_ in trained(EmbeddingData(sets, global_batch=4), 60))
    assert all(abs(counts[name] - share) <= 2 for name, share in (("40", 10), ("80", 20), ("120", 30)))


def test_what_a_loss_is_given(tmp_path: Path):
    rows = [{**pair(number), "negatives": ["a", f"b{number}"], "scores": [number, 0.5, -1]} for number in range(2)]
    file = write(tmp_path / "x.jsonl", rows)
    batch = EmbeddingData([TextSet(file, duplicates="keep")], global_batch=2).batch()
    assert sorted(batch.columns[0]) == ["query 0", "query 1"]
    assert batch.columns[2] == ["a", "a"]
    assert batch.labels is None
    assert batch.scores is not None
    assert batch.scores.tolist() == [[row, 0.5, -1] for row in batch.rows.tolist()]
    assert batch.texts.shape == (2, 4)
    assert len(batch.texts.unique()) == 7
    assert batch.texts[0, 2] == batch.texts[1, 2]


def test_the_next_negatives_in_each_epoch_with_their_scores(tmp_path: Path):
    rows = [{**pair(0), "negatives": list("abcde"), "scores": [1, 2, 3, 4, 5]}]
    data = EmbeddingData([TextSet(write(tmp_path / "x.jsonl", rows), negatives=2)], global_batch=1)
    found = []
    for _ in range(4):
        batch = data.batch()
        assert batch.scores is not None
        found.append("".join(text for column in batch.columns[2:] for text in column))
        assert ["abcde"[int(score) - 1] for score in batch.scores[0].tolist()] == list(found[-1])
        data.advance()
    assert found == ["ab", "cd", "ea", "bc"]


@pytest.mark.parametrize("other", ["seed", "batch", "rows", "weight"])
def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path, other: str):
    def data(*, seed=1, batch=4, rows=12, weight=1.0) -> EmbeddingData:
        file = write(tmp_path / "x.jsonl", [pair(number) for number in range(rows)])
        return EmbeddingData([TextSet(file, weight=weight)], global_batch=batch, seed=seed)

    state = data().state_dict()
    data().load_state_dict(state)
    changed = {"seed": 2, "batch": 3, "rows": 13, "weight": 2.0}
    with pytest.raises(holdfast.Mismatch, match="repeated or skipped"):
        data(**{other: changed[other]}).load_state_dict(state)


@pytest.mark.parametrize("consumed", [-6, 5, True, "6", None])
def test_a_position_between_batches_is_refused(tmp_path: Path, consumed):
    data = mixed(tmp_path)
    for streams in ("", "0;0;0"):
        with pytest.raises(holdfast.Mismatch, match="multiple of global_batch=6"):
            data.load_state_dict({**data.state_dict(), "consumed_samples": consumed, "streams": streams})


def test_a_row_that_changed_during_the_run_is_named(tmp_path: Path):
    file = write(tmp_path / "x.jsonl", [pair(number) for number in range(4)])
    data = EmbeddingData([TextSet(file)], global_batch=4)
    file.write_text(file.read_text().replace("query 2", "query 7"))
    with pytest.raises(holdfast.InvalidArgument, match=r"x\.jsonl:3: the row has changed"):
        data.batch()


def test_arguments_that_make_no_sense(tmp_path: Path):
    file = write(tmp_path / "x.jsonl", [pair(number) for number in range(4)])
    for sets, batch, message in (
        ([], 2, "at least one"),
        ([TextSet(file), TextSet(file)], 2, "a name of its own"),
        ([TextSet(file), TextSet(file, name="y", weight=1)], 2, "give each one, or none"),
        ([TextSet(file, weight=0.0)], 2, "above 0"),
        ([TextSet(file)], 0, "global_batch=0"),
        ([TextSet(file)], 5, r"x\.jsonl: 4 rows do not fill a batch of 5"),
        ([TextSet(file)], 1, r"x\.jsonl:1: the rows have no negatives"),
    ):
        with pytest.raises(holdfast.InvalidArgument, match=message):
            EmbeddingData(sets, global_batch=batch)
    data = EmbeddingData([TextSet(file)], global_batch=2)
    for rank, ranks in ((2, 2), (-1, 2), (0, 3)):
        with pytest.raises(holdfast.InvalidArgument, match="rank"):
            data.batch(rank, ranks)
