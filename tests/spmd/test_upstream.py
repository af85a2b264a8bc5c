"""docs/upstream.md says what torch does: each program prints, with torch alone, what stands below it.

A program that prints something else has been mended by torch, or never was right: the page has to follow.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

PAGE = Path(__file__).parents[2] / "docs" / "upstream.md"
VERSION = ".".join(torch.__version__.split(".")[:2])
DEADLINE_S = 90.0
AT_ONCE = ("Scans along a negative dim", "Writes through a slice")  # the others with --full: a rank takes seconds


@dataclass(frozen=True, slots=True)
class Repro:
    """A section of the page: a program, what it prints, and the versions of torch that print it."""

    title: str
    program: str
    printed: str
    versions: tuple[str, ...]


def _repros() -> list[Repro]:
    repros = []
    for section in PAGE.read_text().split("\n## ")[1:]:
        blocks = re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        kinds = [kind for kind, _ in blocks]
        if "text" not in kinds:
            continue
        assert kinds[:2] == ["python", "text"], f"a program and then what it prints: {section[:60]}"
        versions = re.search(r"^On torch (.+?)[.:]$", section, re.MULTILINE)
        assert versions is not None, f"the versions that print it: {section[:60]}"
        title = section.partition("\n")[0]
        repros.append(Repro(title, blocks[0][1], blocks[1][1], tuple(re.findall(r"\d+\.\d+", versions[1]))))
    return repros


REPROS = _repros()


def _cases() -> list[object]:
    return [pytest.param(one, id=one.title, marks=() if one.title in AT_ONCE else pytest.mark.full) for one in REPROS]


@pytest.fixture(scope="module")
def ranks() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("torch_alone.py"))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


@pytest.mark.parametrize("repro", _cases())
@pytest.mark.timeout(DEADLINE_S * 2)
def test_torch_prints_what_the_page_says(repro: Repro, ranks: subprocess.Popen[str], tmp_path: Path) -> None:
    if VERSION not in repro.versions:
        pytest.skip(f"the page says nothing of torch {VERSION} here")
    file = tmp_path / "repro.py"
    file.write_text(repro.program)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.stdin is not None and ranks.stdout is not None
    print(json.dumps({"path": str(file), "port": store.port, "deadline_s": DEADLINE_S}), file=ranks.stdin, flush=True)
    answer = json.loads(ranks.stdout.readline())
    assert answer == {"output": repro.printed, "killed": 0}


def test_every_program_is_short_and_of_torch_alone() -> None:
    assert len(REPROS) >= 12
    assert set(AT_ONCE) <= {repro.title for repro in REPROS}
    for repro in REPROS:
        assert len(repro.program.splitlines()) <= 25, repro.title
        assert "holdfast" not in repro.program, repro.title


@pytest.mark.raises_nothing
def test_what_is_left_out_is_said(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--full"):
        rest = len(REPROS) - len(AT_ONCE)
        pytest.skip(f"{rest} of the {len(REPROS)} programs of docs/upstream.md run with --full only, in half a minute")
