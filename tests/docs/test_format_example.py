"""The manifest and the state.json of docs/format.md are those that its example writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from tests.docs.pages import REPOSITORY, blocks

PAGE = REPOSITORY / "docs" / "format.md"
BY_SAVE = {"attempt", "created", "digest", "writer"}  # who wrote it and when


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that the first Python block of the page writes."""
    monkeypatch.chdir(tmp_path)
    code = next(block.text for block in blocks(PAGE) if block.language == "python")
    exec(compile(code, str(PAGE), "exec"), {})
    return tmp_path / "step-000000000002"


def shown() -> list[Any]:
    return [json.loads(block.text) for block in blocks(PAGE) if block.language == "json"]


def test_the_manifest_is_the_one_that_is_written(written: Path) -> None:
    manifest, _ = shown()
    real = json.loads((written / "holdfast.json").read_text())
    assert list(manifest) == list(real)
    assert {name: manifest[name] for name in manifest.keys() - BY_SAVE} == {
        name: real[name] for name in real.keys() - BY_SAVE
    }
    assert manifest["writer"].keys() == real["writer"].keys()


def test_the_digest_of_the_manifest_is_its_own() -> None:
    manifest, _ = shown()
    stated = manifest.pop("digest")
    assert digest_hex(strictjson.dumps(manifest)) == stated


def test_the_state_is_the_one_that_is_written(written: Path) -> None:
    _, state = shown()
    text = (written / "state.json").read_text()
    assert state == json.loads(text)
    assert strictjson.dumps(state).decode() == text.rstrip("\n")
