"""Scripts on the pages: bash parses, YAML says what it should, and commands have the options that they are given."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
from collections.abc import Iterator
from typing import Any

import click
import pytest
from torch.distributed.run import get_args_parser

from holdfast.cli.main import cli
from tests.docs.pages import REPOSITORY, CodeBlock, blocks, pages

yaml: Any = pytest.importorskip("yaml")

# Those of `sbatch` that the pages use, as its manual names them.
SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "time", "signal", "requeue", "open-mode"}


def _of(*languages: str) -> Iterator[object]:
    for page in pages():
        for block in blocks(page):
            if block.language in languages:
                yield pytest.param(block, id=f"{page.relative_to(REPOSITORY)}:{block.line}")


@pytest.mark.parametrize("block", list(_of("bash")))
def test_bash_parses(block: CodeBlock) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", list(_of("bash")))
def test_options_of_sbatch_are_real(block: CodeBlock) -> None:
    assert set(re.findall(r"^#SBATCH --([\w-]+)", block.text, re.MULTILINE)) <= SBATCH


@pytest.mark.parametrize("block", list(_of("yaml")))
def test_yaml_parses(block: CodeBlock) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


def test_the_pod_has_shared_memory_that_fits_and_time_to_save() -> None:
    (block,) = (block for block in blocks(REPOSITORY / "docs" / "faq.md") if block.language == "yaml")
    pod = yaml.safe_load(block.text)["spec"]
    (container,) = pod["containers"]
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    memory = mounts["/dev/shm"]["emptyDir"]
    assert memory["medium"] == "Memory"
    assert int(memory["sizeLimit"].removesuffix("Gi")) < int(container["resources"]["limits"]["memory"][:-2])
    assert all(isinstance(word, str) for word in container["command"])
    given = get_args_parser().parse_args(container["command"][1:])
    assert given.shutdown_timeout < pod["terminationGracePeriodSeconds"]


def _commands(name: str) -> Iterator[object]:
    """Yield each line of a script that calls this program, its continued lines joined."""
    for page in pages():
        for block in blocks(page):
            if block.language in ("", "bash", "console"):
                for line in re.sub(r"\\\n", " ", block.text).splitlines():
                    if found := re.match(rf"(?:\$ |srun )?{name} (.*)", line):
                        yield pytest.param(found[1], id=f"{page.relative_to(REPOSITORY)}:{line[:60]}")


@functools.cache
def _options(command: str) -> set[str]:
    found = cli.get_command(click.Context(cli), command)
    assert found is not None, f"there is no command {command}"
    return {name for option in found.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}


@pytest.mark.parametrize("line", list(_commands("holdfast")))
def test_options_of_holdfast_are_real(line: str) -> None:
    for part in re.split(r"\s{2,}holdfast ", line):  # two commands beside each other
        words = shlex.split(part.replace("'", ""), comments=True)
        if words[0] != "COMMAND" and not words[0].startswith("-"):
            given = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert given <= _options(words[0])


@pytest.mark.parametrize("line", list(_commands("torchrun")))
def test_options_of_torchrun_are_real(line: str) -> None:
    known = set(get_args_parser()._option_string_actions)
    words = shlex.split(line, comments=True)
    script = next((n for n, word in enumerate(words) if word == "-m" or word.endswith(".py")), len(words))
    assert {word.partition("=")[0] for word in words[:script] if word.startswith("--")} <= known
