"""The checks of the house find what they look for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house import assertions, lengths, mirror, modules, nouns, phrases, proofs, sources


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
    (package / "a.py").write_text('"""Fine."""\n# A folder that is none.\nfine = x is None\n# Take away this.\n')
    first, second = phrases.find()
    assert first.startswith("a.py:2: 'is none'") and second.startswith("a.py:4: 'Take away'")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty repository: tests, src, docs and a Makefile."""
    monkeypatch.setattr(sources, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sources, "PACKAGE", tmp_path / "src" / "holdfast")
    for folder in ("tests/faults", "tests/plan", "src/holdfast/plan", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "Makefile").write_text("bench:\n")
    return tmp_path


TESTS = """
CASES = {"ranks": 1}

class TestLocal(Base):
    pass

class Base:
    def test_inherited(self): ...

def test_there(): ...
"""


@pytest.mark.parametrize(
    ("proof", "problem"),
    [
        ("`tests/plan/test_save_plan.py::test_there`", ""),
        ("`tests/plan/test_save_plan.py::test_there[ranks]`, `rows_disk`, `make bench`", ""),
        ("`tests/plan/test_save_plan.py::TestLocal::test_inherited`", ""),
        ("`tests/plan/test_save_plan.py::TestLocal::test_there`", "no such test"),
        ("`tests/plan/test_save_plan.py::test_gone`", "no such test"),
        ("`tests/plan/test_save_plan.py::test_there[hosts]`", "no such case"),
        ("`tests/plan/test_load_plan.py::test_there`", "no such file"),
        ("`tests/plan/test_save_plan.py`", "neither a pytest id"),
        ("`rows_gone`", "no such module"),
        ("`make coffee`", "no such target"),
        ("somewhere", "a guarantee without a proof"),
    ],
)
def test_a_guarantee_names_a_test_that_exists(repository: Path, proof: str, problem: str) -> None:
    (repository / "tests/faults/rows_disk.py").write_text("")
    (repository / "tests/plan/test_save_plan.py").write_text(TESTS)
    lines = ["| word | `not` a guarantee |", "", "| guarantee | test |", "|---|---|", f"| It holds | {proof} |", ""]
    (repository / "docs/guarantees.md").write_text("\n".join(lines))
    findings = list(proofs.find())
    assert len(findings) == bool(problem)
    assert not problem or (findings[0].startswith("docs/guarantees.md:5: ") and problem in findings[0])


def test_a_test_that_mirrors_nothing_is_found(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "SEVERAL", {"plan/test_both.py": "two modules", "plan/test_gone.py": "no more"})
    for place in ("src/holdfast/plan/save_plan.py", "src/holdfast/core/box.py", "tests/plan/test_save_plan.py"):
        (repository / place).parent.mkdir(exist_ok=True)
        (repository / place).write_text("")
    for place in (
        "tests/plan/test_both.py",
        "tests/plan/test_odd.py",
        "tests/other/test_it.py",
        "tests/dist/test_x.py",
    ):
        (repository / place).parent.mkdir(exist_ok=True)
        (repository / place).write_text("")
    assert [finding.partition(":")[0] for finding in mirror.find()] == [
        "src/holdfast/core has no folder tests/core",
        "tests/other mirrors no package",
        "tests/other/test_it.py mirrors no module",
        "tests/plan/test_odd.py mirrors no module",
        "tests/plan/test_gone.py is gone",
    ]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("assert call() == 1", ""),
        ("with pytest.raises(ValueError): call()", ""),
        ("check(1)", ""),
        ("deep(1)", ""),
        ("subprocess.run(['x'], check=True)", ""),
        ("torch.testing.assert_close(a, b)", ""),
        ("call()", "it asserts nothing"),
        ("subprocess.run(['x'], check=False)", "it asserts nothing"),
        ("assert True", "it asserts a constant"),
        ("assert (call() == 1, 'text')", "it asserts a constant"),
        ("assert a == a", "it compares a thing with itself"),
        ("assert next(a) == next(a)", ""),
        ("try: assert a\n    except Exception: pass", "it catches its own assertion"),
        ("try: assert a\n    except ValueError: pass", ""),
    ],
)
def test_a_test_that_cannot_fail_is_found(repository: Path, body: str, problem: str) -> None:
    (repository / "tests/helpers.py").write_text("def check(x): assert x\ndef deep(x): check(x)\n")
    file = repository / "tests/plan/test_save_plan.py"
    file.write_text(f"from tests.helpers import check, deep\ndef call(): ...\ndef test_it():\n    {body}\n")
    assert [finding.rpartition(": ")[2] for finding in assertions.find()] == ([problem] if problem else [])


def test_a_test_may_claim_that_nothing_is_raised(repository: Path) -> None:
    text = "@pytest.mark.raises_nothing\ndef test_it(): call()\n"
    (repository / "tests/plan/test_save_plan.py").write_text(text)
    assert list(assertions.find()) == []


def test_a_page_that_lists_other_modules_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "architecture.md"
    monkeypatch.setattr(modules, "PAGE", page)
    page.write_text("# Architecture\n\n" + modules.section())
    assert list(modules.find()) == []
    page.write_text(page.read_text().replace("| `api.py` | The public functions", "| `api.py` | The functions"))
    assert len(list(modules.find())) == 1


def test_a_phrase_of_a_page_is_found_with_its_place(repository: Path) -> None:
    (repository / "README.md").write_text("# Title\n\nIt is lost without a word.\n")
    (repository / "docs/adr").mkdir()
    (repository / "docs/adr/0001.md").write_text("Or the other way round.\nWhich way round?\n")
    sources.files.cache_clear()
    places = [finding.partition(": ")[0] for finding in phrases.find()]
    sources.files.cache_clear()
    assert places == ["README.md:3", "docs/adr/0001.md:2"]
