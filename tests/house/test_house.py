"""The checks of the house find what they look for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import lengths, nouns, phrases, sources


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    sources.files.cache_clear()
    yield tmp_path
    sources.files.cache_clear()


def test_two_classes_and_two_files_of_one_name_are_found(package: Path) -> None:
    for folder in ("a", "b", "cli"):
        (package / folder).mkdir()
        (package / folder / "block.py").write_text("class Block: ...\n" if folder != "cli" else "")
    assert list(nouns.find()) == [
        "the file name block is used 2 times: a/block.py, b/block.py",
        "the class name Block is used 2 times: a/block.py, b/block.py",
    ]


def test_a_private_class_counts_by_its_noun(package: Path) -> None:
    (package / "a.py").write_text("class _Block: ...\n")
    (package / "b.py").write_text("class Block: ...\n")
    assert list(nouns.find()) == ["the class name Block is used 2 times: a.py, b.py"]


def test_a_long_file_is_found(package: Path) -> None:
    (package / "long.py").write_text("x = 1\n" * 401)
    assert list(lengths.find()) == ["long.py: 401 lines, at most 400: split it by idea"]


def test_a_phrase_is_found_with_its_place(package: Path) -> None:
    (package / "a.py").write_text('"""Fine."""\n# A folder that is none.\n')
    (finding,) = phrases.find()
    assert finding.startswith("a.py:2: 'is none'")
