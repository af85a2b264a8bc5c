"""Folders whose tokenizer, configs and embeddings contradict each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.core.errors import Damaged, NotFound
from tests.cli.calls import call
from tests.tokens.vocabularies import causal_model, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "model"
    model, words = causal_model("qwen2", rows=32), tokenizer()
    holdfast.tokens.add(model, words, ["<tool>"], special=True, roles={"pad_token": "<pad>"})
    model.save_pretrained(path)
    words.save_pretrained(path)
    return path


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    for file in original.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    return made


def change(folder: Path, name: str, edit: Callable[[Fields], Any]) -> None:
    fields = json.loads((folder / name).read_text())
    edit(fields)
    (folder / name).write_text(json.dumps(fields))


def problems(folder: Path) -> dict[str, list[str]]:
    out: dict[str, list[str]] = {}
    for finding in holdfast.tokens.check(folder).findings:
        out.setdefault(finding.kind, []).append(finding.problem)
    return out


def test_a_good_folder(folder: Path) -> None:
    result = holdfast.tokens.check(folder)
    assert result.good
    assert (result.tokens, dict(result.rows), result.unchecked) == (17, {"model.embed_tokens.weight": 32}, ())
    found = call("check-tokens", folder)
    assert found.exit_code == 0
    assert "17 tokens, model.embed_tokens.weight has 32 rows: good" in found.output


def test_ids_beyond_the_rows(folder: Path) -> None:
    def add(fields: Fields) -> None:
        fields["added_tokens"].append({**fields["added_tokens"][-1], "id": 32, "content": "<late>"})

    change(folder, "tokenizer.json", add)
    found = problems(folder)
    assert found == {
        "rows": [
            "model.embed_tokens.weight has rows up to 31: too few for '<late>' (32); holdfast resize-vocab adds rows"
        ],
        "round trip": ["'<late>' is encoded as [17], not as its id 32"],  # the library numbers added tokens itself
    }
    done = call("check-tokens", folder)
    assert done.exit_code == 1
    assert "FOUND rows: model.embed_tokens.weight" in done.output
    assert json.loads(call("check-tokens", folder, "--json").output)["good"] is False


def test_rows_that_the_config_does_not_state(folder: Path) -> None:
    change(folder, "config.json", lambda fields: fields.update(vocab_size=30))
    assert problems(folder) == {"rows": ["model.embed_tokens.weight has 32 rows, but config.json states vocab_size 30"]}


def test_tokens_with_several_ids(folder: Path) -> None:
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 16, "<other>": 3}))
    found = problems(folder)
    assert "'<tool>' has several ids: 15 in tokenizer.json, 16 in added_tokens.json" in found["ids"]
    assert "3 is the id of 'the' in tokenizer.json and '<other>' in added_tokens.json" in found["ids"]


def test_special_tokens_that_do_not_come_back(folder: Path) -> None:
    def lower(fields: Fields) -> None:
        for token in fields["added_tokens"]:
            token["normalized"] = token["content"] == "<tool>"
        fields["normalizer"] = {"type": "Replace", "pattern": {"String": "<tool>"}, "content": "cat"}

    change(folder, "tokenizer.json", lower)
    assert problems(folder) == {"round trip": ["15, the id of '<tool>', is decoded as 'cat'"]}


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        (
            "config.json",
            {"eos_token_id": 4},
            [
                "config.json: eos_token_id is 4, but the tokenizer's eos_token '</s>' is 1",
                "eos_token_id is 4 in config.json, but 1 in generation_config.json",
            ],
        ),
        (
            "generation_config.json",
            {"pad_token_id": 3},
            [
                "generation_config.json: pad_token_id is 3, but the tokenizer's pad_token '<pad>' is 16",
                "pad_token_id is 16 in config.json, but 3 in generation_config.json",
            ],
        ),
        ("generation_config.json", {"eos_token_id": [1, 4]}, []),
        ("config.json", {"pad_token_id": None}, []),
        (
            "config.json",
            {"pad_token_id": -1},
            [
                "config.json: pad_token_id -1 is no token",
                "config.json: pad_token_id is -1, but the tokenizer's pad_token '<pad>' is 16",
                "pad_token_id is -1 in config.json, but 16 in generation_config.json",
            ],
        ),
        (
            "tokenizer_config.json",
            {"eos_token": "<|end|>"},
            ["tokenizer_config.json names eos_token '<|end|>', which is no token of the tokenizer"],
        ),
        (
            "tokenizer_config.json",
            {"eos_token": {"content": "cat", "special": True}},
            [
                "config.json: eos_token_id is 1, but the tokenizer's eos_token 'cat' is 4",
                "generation_config.json: eos_token_id is 1, but the tokenizer's eos_token 'cat' is 4",
            ],
        ),
    ],
)
def test_roles(folder: Path, name: str, fields: Fields, expected: list[str]) -> None:
    change(folder, name, lambda own: own.update(fields))
    assert problems(folder) == ({"roles": expected} if expected else {})


def test_a_step_with_its_tokenizer(tmp_path: Path) -> None:
    model, words = causal_model(), tokenizer()
    words.add_tokens(["<late>"])
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, {"model": model}, files=words.save_pretrained).result()
    assert problems(tmp_path / "run") == {
        "rows": [
            "model.embed_tokens.weight has rows up to 14: too few for '<late>' (15); holdfast resize-vocab adds rows"
        ]
    }


def test_a_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    result = holdfast.tokens.check(folder)
    assert result.good
    assert result.unchecked == ("rows: the folder has no embeddings, only the config's vocab_size",)
    change(folder, "config.json", lambda fields: fields.update(vocab_size=16))
    assert problems(folder) == {
        "rows": [
            "config.json's vocab_size has rows up to 15: too few for '<pad>' (16); holdfast resize-vocab adds rows"
        ]
    }


def test_folders_that_cannot_be_checked(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such file or folder"):
        holdfast.tokens.check(tmp_path / "missing")
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 1}}}')
    with pytest.raises(Damaged, match=r"tokenizer.json cannot be read by the library tokenizers"):
        holdfast.tokens.check(folder)
    assert call("check-tokens", folder).exit_code == 1
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(NotFound, match="has no tokenizer that can be read"):
        holdfast.tokens.check(folder)


def test_without_the_library_the_rest_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = holdfast.tokens.check(folder)
    assert result.good
    assert result.unchecked == ("round trip of special tokens: the library tokenizers is not installed",)


def test_a_scalar_that_has_the_name_of_an_embedding_has_no_rows(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    save_file({"output.bias": torch.tensor(1.0), "wte.weight": torch.ones(15, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"vocab_size": 15}')
    assert dict(holdfast.tokens.check(tmp_path).rows) == {"wte.weight": 15}
