"""Every Python block of README.md and docs/ runs, or its page says why not."""

from __future__ import annotations

import builtins
import gc
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.docs.pages import REPOSITORY, CodeBlock, blocks, pages
from tests.docs.setups import FULL, SETUPS

# Pages whose blocks other tests run.
ELSEWHERE = {"docs/upstream.md": "tests/spmd/test_upstream.py"}


def _name(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def _with_python() -> Iterator[Any]:
    """Yield each page that has blocks to run; those that need a framework are for `make full`."""
    for page in pages():
        to_run = [block for block in blocks(page) if block.language == "python" and block.mark != "not run"]
        if to_run and _name(page) not in ELSEWHERE:
            slow = any(block.mark == "setup" and block.value in FULL for block in to_run)
            yield pytest.param(page, id=_name(page), marks=[pytest.mark.full] if slow else [])


@pytest.mark.parametrize("page", list(_with_python()))
@pytest.mark.raises_nothing
def test_the_blocks_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    left_out = {"not run", "torchrun"} if request.config.getoption("--full") else {"not run", "torchrun", "full"}
    names: dict[str, Any] = {}
    with ExitStack() as setups:
        for block in blocks(page):
            if block.language != "python" or block.mark in left_out:
                continue
            if block.mark == "setup":
                setups.close()
                names = dict(setups.enter_context(SETUPS[block.value]()))
            _run(page, block, names)
    names.clear()
    gc.collect()


def _programs() -> Iterator[Any]:
    for page in pages():
        for block in blocks(page):
            if block.mark == "torchrun":
                yield pytest.param(block, id=f"{_name(page)}:{block.line}")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("block", list(_programs()))
def test_a_program_runs_under_torchrun(block: CodeBlock, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(block.text)
    for ranks in block.value.split():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, "train.py"]
        done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


def _run(page: Path, block: CodeBlock, names: dict[str, Any]) -> None:
    """Run a block. A traceback shows the line of the page."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    names.setdefault("__name__", "__main__")
    if block.mark == "raises":
        error = getattr(holdfast, block.value, None) or getattr(builtins, block.value)
        with pytest.raises(error):
            exec(code, names)
    else:
        exec(code, names)


def test_a_page_that_other_tests_run_is_named_by_them() -> None:
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (REPOSITORY / test).read_text()


def test_the_line_of_an_error_is_that_of_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n<!-- raises: ZeroDivisionError -->\n\n```python\n1 / 0\n```\n\n```python\n1 / 0\n```\n"
    )
    expected, unexpected = blocks(page)
    _run(page, expected, {})
    with pytest.raises(ZeroDivisionError) as caught:
        _run(page, unexpected, {})
    assert caught.traceback[-1].lineno + 1 == 10


@pytest.mark.parametrize("text", ["```python\n1\n", "<!-- not run: no cluster -->\ntext\n```python\n```\n"])
def test_an_open_fence_and_a_lost_mark_are_refused(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match=r"page\.md:1"):
        list(blocks(page))
