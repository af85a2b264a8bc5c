"""docs/cli.md has every command, and what its examples print is what the commands print."""

from __future__ import annotations

import doctest
import re
import shlex
from pathlib import Path

import click
import pytest

from holdfast.cli.main import cli
from holdfast.core.errors import HoldfastError
from tests.cli.calls import call
from tests.docs.pages import REPOSITORY, blocks
from tests.docs.setups import command_line

PAGE = REPOSITORY / "docs" / "cli.md"
COMPARE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Numbers that differ from run to run, and what stands for them.
CHANGING = {
    r"\d{4}-\d\d-\d\dT[\d:]{8}\+00:00": "TIME",
    r"in \d+\.\d+ s( \(.*?/s\))?": "in N s",
    r"\d+\.\d+ ([kM]?B)": r"N \1",
}
COMMANDS = cli.list_commands(click.Context(cli))


def test_every_command_has_its_place() -> None:
    assert re.findall(r"^### ([\w-]+)$", PAGE.read_text(), re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example(name: str) -> None:
    section = PAGE.read_text().partition(f"\n### {name}\n")[2].partition("\n##")[0]
    assert f"$ holdfast {name}" in section


def test_the_examples_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command_line()
    wrong = []
    for block in blocks(PAGE):
        if block.language != "console" or block.mark == "not run":
            continue
        command, _, expected = block.text.removeprefix("$ holdfast ").partition("\n")
        printed = _printed(shlex.split(command)).replace(str(tmp_path), "/home/me")
        if not doctest.OutputChecker().check_output(_settled(expected), _settled(printed), COMPARE):
            wrong.append(f"{PAGE.name}:{block.line}: holdfast {command} prints\n{printed}")
    assert not wrong, "\n".join(wrong)


def _printed(arguments: list[str]) -> str:
    result = call(*arguments)
    return f"holdfast: {result.exception}\n" if isinstance(result.exception, HoldfastError) else result.output


def _settled(text: str) -> str:
    for pattern, stands_for in CHANGING.items():
        text = re.sub(pattern, stands_for, text)
    return text
