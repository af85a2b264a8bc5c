"""The checks of a release find what is wrong, and the repository of today has nothing of it."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from holdfast.version import __version__
from tests.house.sources import REPOSITORY
from tests.release import archives, pythons, tag

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def requirements(name: str) -> dict[str, str]:
    """Return the pins of a file, with those of the files that it includes."""
    pins: dict[str, str] = {}
    for line in (REPOSITORY / "requirements" / name).read_text().splitlines():
        text = line.partition("#")[0].strip()
        if text.startswith("-r "):
            pins |= requirements(text.removeprefix("-r "))
        elif text:
            package, _, version = text.partition("==")
            pins[package] = version
    return pins


def repository(folder: Path, changelog: str, citation: str = 'version: "1.2.3"\n') -> Path:
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "CITATION.cff").write_text(citation)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "all"]):
        git(folder, *command)
    return folder


def git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *names, *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


def test_a_release_with_a_section_and_a_clean_tree_can_be_tagged(tmp_path: Path) -> None:
    assert tag.find_problems(repository(tmp_path, "# Changelog\n\n## 1.2.3 (2026-11-19)\n"), "1.2.3") == []


@pytest.mark.parametrize(
    ("changelog", "citation", "problem"),
    [
        ("## 1.2.30 (2026-11-19)\n", 'version: "1.2.3"\n', "has no section"),
        ("## 1.2.3 (unreleased)\n", 'version: "1.2.3"\n', "calls 1.2.3 unreleased"),
        ("## 1.2.3 (2026-11-19)\n", 'version: "1.2.2"\n', "CITATION.cff has no line"),
    ],
)
def test_a_version_that_is_not_written_down_is_not_tagged(
    tmp_path: Path, changelog: str, citation: str, problem: str
) -> None:
    (only,) = tag.find_problems(repository(tmp_path, changelog, citation), "1.2.3")
    assert problem in only


def test_a_dirty_tree_and_a_tag_that_exists_are_named(tmp_path: Path) -> None:
    repository(tmp_path, "## 1.2.3 (2026-11-19)\n")
    git(tmp_path, "tag", "v1.2.3")
    (tmp_path / "new").touch()
    assert [problem.partition(":")[0] for problem in tag.find_problems(tmp_path, "1.2.3")] == [
        "the tree is not clean",
        "the tag v1.2.3 exists",
    ]


def test_what_an_archive_lacks_or_has_too_much_is_named() -> None:
    tracked = [".gitignore", ".github/workflows/test.yml", "docs/a.md", "src/holdfast/a.py"]
    good = ["holdfast/a.py", "holdfast-1.dist-info/METADATA"]
    assert list(archives.find_problems(tracked, ["docs/a.md", "src/holdfast/a.py", "PKG-INFO"], good)) == []
    assert list(archives.find_problems(tracked, ["src/holdfast/a.py"], ["tests/a.py"])) == [
        "the sdist lacks docs/a.md: add it to MANIFEST.in",
        "the wheel lacks holdfast/a.py",
        "the wheel has tests/a.py, which is not of the package",
    ]


def test_a_shim_that_stands_for_no_python_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, text in (("shims", "exit 127"), ("versions/3.12.1/bin", "echo 3.12"), ("other", "echo 3.11")):
        (tmp_path / folder).mkdir(parents=True)
        path = tmp_path / folder / "python3.12"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'shims'}:{tmp_path / 'other'}:/bin")
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path))
    assert pythons.find(("3.12",)) == {"3.12": tmp_path / "versions/3.12.1/bin/python3.12"}


def test_the_demo_installs_a_part_of_what_the_tests_install() -> None:
    demo, everything = requirements("demo.txt"), requirements("dev.txt")
    assert demo.items() < everything.items()
    assert not demo.keys() & {"pytest", "accelerate", "mypy"}


def test_every_dependency_of_the_package_is_in_the_demo() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {dependency.partition(">=")[0] for dependency in project["dependencies"]} <= requirements("demo.txt").keys()


def test_the_citation_names_the_version() -> None:
    assert f'version: "{__version__}"' in (REPOSITORY / "CITATION.cff").read_text().splitlines()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_of_the_makefile(workflow: Path) -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    steps = [line.partition("run:")[2].split() for line in workflow.read_text().splitlines() if "run:" in line]
    assert steps
    for words in steps:
        assert words[0] == "make" and f"\n{words[1]}:" in makefile, words
