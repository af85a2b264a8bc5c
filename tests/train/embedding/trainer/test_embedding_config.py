"""The config of an embedding run: sections, what is missing, what contradicts itself, and back to TOML."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.train.config import RunConfig
from holdfast.train.embedding.trainer import EmbeddingConfig
from holdfast.train.open_run import open_run
from holdfast.train.settings import apply_sets, read_toml
from tests.dist.embedding_cases import config, write_data

EXAMPLES = Path(__file__).parents[4] / "examples"


def test_the_section_embedding_makes_it_an_embedding_model(tmp_path: Path) -> None:
    found = open_run(EXAMPLES / "embedding-tiny.toml", ["train.steps=7"])
    assert isinstance(found, EmbeddingConfig) and found.train.steps == 7
    assert isinstance(open_run(EXAMPLES / "dense-tiny.toml"), RunConfig)
    (tmp_path / "again.toml").write_text(found.to_toml())
    assert open_run(tmp_path / "again.toml") == found
    assert found.evaluation.sets[1].kind == "similarity" and found.embedding.dims == (16, 32, 64)


def test_the_example_has_data_that_its_script_writes(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("embedding_tiny_data", EXAMPLES / "embedding_tiny_data.py")
    assert spec is not None and spec.loader is not None
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write_data(tmp_path / "data")
    text = (EXAMPLES / "embedding-tiny.toml").read_text().replace(script.FOLDER, str(tmp_path / "data"))
    (tmp_path / "example.toml").write_text(text)
    found: Any = open_run(tmp_path / "example.toml")
    assert found.data.open(found.train.global_batch).batch().columns[0]
    assert {name: len(each.open().queries) for name, each in zip("a", found.evaluation.sets)} == {"a": script.HELD_OUT}


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"loss__kind": "cosent"}, "loss.learned: cosent has no such option"),
        ({"loss__margin_of": "relative"}, "says how loss.margin counts, which is missing"),
        ({"train__accumulation": 2}, "leave accumulation out"),
        ({"train__micro_tokens": 64}, "micro_batch and train.micro_tokens: give one"),
        ({"train__global_batch": 0}, "train.global_batch=0 must be at least 1"),
        ({"embedding__prompts": "find"}, "embedding.prompts = 'find': it must be a table"),
        ({"embedding__dims": 8}, "embedding.dims = 8: it must be an array"),
        ({"data__tokenizer": '""'}, "data.tokenizer is missing"),
        ({"data__sets": '[{files = ["a"], fields = {querry = "q"}}]'}, "did you mean query"),
        ({"evaluation__sets": '[{name = "a"}]'}, "evaluation.sets a: give rows, or queries"),
        ({"evaluation__sets": '[{name = "a", rows = "b", kind = "sts"}]'}, "choose retrieval or similarity"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, sets: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        found = config(tmp_path, tmp_path, **sets)
        found.check(1)


@pytest.mark.parametrize(
    ("layout", "sets", "message"),
    [
        ({"dp_shard": 2}, {"train__global_batch": 1}, "global_batch=1 leaves some of 2 ranks without a row"),
        ({"tp": 3}, {}, "Nearest valid"),
        ({}, {"train__evaluate_every": 1, "evaluation__sets": "[]"}, "there are no evaluation.sets"),
        ({}, {"loss__dim_weights": "[1.0]"}, "1 weights for 2 dims"),
    ],
)
def test_a_layout_that_cannot_run_is_refused(
    tmp_path: Path, layout: dict[str, Any], sets: dict[str, Any], message: str
) -> None:
    found = config(tmp_path, tmp_path, layout, **sets)
    with pytest.raises(InvalidArgument, match=message):
        found.check(found.layout.world)


def test_missing_files_are_named_with_the_command_that_makes_them(tmp_path: Path) -> None:
    found = config(tmp_path / "run", tmp_path / "data", data__made_by="python make.py")
    with pytest.raises(NotFound, match=r"data/pairs.jsonl is missing, and 4 more .*: make them with: python make.py"):
        found.check(1)
    (write_data(tmp_path / "data") / "graded.jsonl").unlink()
    with pytest.raises(NotFound, match=r"data/graded.jsonl is missing, looked for from /"):
        found.check(1)
    shutil.rmtree(tmp_path / "data" / "tokenizer")
    (tmp_path / "data" / "graded.jsonl").touch()
    with pytest.raises(NotFound, match=r"data/tokenizer \(the folder of the tokenizer\) is missing"):
        config(tmp_path / "run", tmp_path / "data").check(1)


def test_decoders_with_experts_are_refused(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    sets: dict[str, Any] = {f"model__{name}": value for name, value in experts.items()}
    with pytest.raises(Unsupported, match="experts"):
        config(tmp_path, tmp_path, model__family="qwen3_moe", **sets).check(1)


def test_a_batch_is_described(tmp_path: Path) -> None:
    described = config(tmp_path, tmp_path, {"dp_shard": 2}).describe()
    assert described == "global batch 11 = 5 or 6 rows x data parallel 2, encoded 6 texts at a time"


def test_assignments_reach_the_sections() -> None:
    assert apply_sets(read_toml("[embedding]\n", "x"), ["embedding.pooling=cls"]) == {"embedding": {"pooling": "cls"}}
