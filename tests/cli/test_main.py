import os
import re
import shlex
import subprocess
import sys

import click
import pytest
import torch

import holdfast
from holdfast.cli.main import _COMMANDS, cli
from tests.cli.calls import call, process

COMMANDS = ["ls", "show", "verify", "diff"]


def test_help_names_every_command():
    done = call("--help")
    assert done.exit_code == 0
    for name in COMMANDS:
        assert re.search(rf"^  {name} +\w", done.output, re.MULTILINE)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_every_command_has_help_and_json(name, option):
    done = call(name, option)
    assert done.exit_code == 0
    assert "--json" in done.output


def example_lines(help_text):
    """The examples in a command's help: lines that begin with holdfast, without what is said of them."""
    lines = [line.strip() for line in help_text.splitlines()]
    return [re.split(r"  +", line)[0] for line in lines if re.match(r"(torchrun .* -m )?holdfast [a-z]", line)]


@pytest.mark.parametrize("name", sorted(_COMMANDS))
def test_every_command_has_an_example_whose_options_exist(name):
    """Also runs the parser over every example, so that a renamed option cannot stay in a help text."""
    command = cli.get_command(click.Context(cli), name)
    examples = [line for line in example_lines(call(name, "--help").output) if f"holdfast {name}" in line]
    assert examples, f"holdfast {name} --help has no example"
    for line in examples:
        arguments = shlex.split(line.partition(f"holdfast {name}")[2].removesuffix("| source"))
        context = command.make_context(name, list(arguments), resilient_parsing=True)
        assert not context.args, f"{line}: too many arguments"


def test_the_examples_of_the_first_page_are_commands():
    lines = example_lines(call("--help").output)
    assert len(lines) > 8
    assert {line.split()[1] for line in lines} <= set(_COMMANDS)


@pytest.mark.parametrize(
    ("typed", "suggestion"),
    [
        ("shwo", "Did you mean show?"),
        ("list", "Did you mean ls?"),
        ("Verify", "Did you mean verify?"),
        ("chek", "Did you mean verify?"),
        ("qqqq", "See holdfast --help."),
    ],
)
def test_a_mistyped_command_gets_a_suggestion(typed, suggestion):
    done = call(typed)
    assert done.exit_code == 2
    assert f"No such command {typed!r}. {suggestion}" in done.output


def test_the_version_is_printed():
    assert call("--version").output == f"holdfast, version {holdfast.__version__}\n"


def test_a_good_answer_exits_with_0(step):
    done = process("verify", step)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(": good\n")


def test_a_damaged_manifest_exits_with_1_and_one_line(step):
    (step / "holdfast.json").write_bytes(b"{}")
    done = process("show", step)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"holdfast: {step}/holdfast.json: not a Holdfast manifest\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ls", "none"], "holdfast: none: no such folder\n"),
        (["ls", __file__], f"holdfast: {__file__} is a file; give a folder\n"),
        (["show", "none"], "holdfast: none: no such file or folder\n"),
        (["ls"], "Missing argument 'ROOT'"),
        (["ls", ".", "--nope"], "No such option"),
        (["nope"], "No such command 'nope'"),
    ],
)
def test_a_wrong_call_exits_with_2_and_says_why(arguments, message):
    done = process(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_key_exits_with_2(step):
    done = process("show", step, "no\x1bkey")
    assert done.returncode == 2
    assert done.stderr == f"holdfast: {step} has no key 'no\\x1bkey'\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_imports_torch(name, step):
    arguments = [step, step] if name == "diff" else [step.parent]
    done = process(name, *arguments, python=("-X", "importtime"))
    modules = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0
    assert "holdfast.checkpoint.catalog" in modules
    assert not {module for module in modules if module.split(".")[0] == "torch"}


def test_a_closed_pipe_ends_in_silence(run):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "holdfast", "show", str(run)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    os.close(writing)
    assert done.stderr == ""


def test_the_answer_no_is_exit_code_1_of_a_real_process(tmp_path):
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        holdfast.save(tmp_path / name, {"model": torch.nn.Linear(4, 3)})
    assert process("diff", tmp_path / "a", tmp_path / "b").returncode == 1
    assert process("diff", tmp_path / "a", tmp_path / "a").returncode == 0
    assert process("diff", tmp_path / "a", tmp_path / "a", "--group", "zork").returncode == 2
    (tmp_path / "a" / "model-00001-of-00001.safetensors").unlink()
    assert process("verify", tmp_path / "a").returncode == 1
    assert process("verify", tmp_path / "b").returncode == 0


def test_a_closed_pipe_is_no_answer(tmp_path):
    holdfast.save(tmp_path / "a", {"model": torch.nn.Linear(4, 3)})
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "holdfast", "show", str(tmp_path / "a")]
    assert subprocess.run(command, stdout=writing, check=False).returncode == 0
    os.close(writing)


def test_paths_do_not_speak_to_the_terminal(tmp_path):
    for name in ("ls", "show", "verify"):
        assert process(name, tmp_path / "none\x07\x9b").stderr.replace("\n", "").isprintable()
    (tmp_path / "e\x9b").mkdir()
    assert process("ls", tmp_path / "e\x9b").stdout.replace("\n", "").isprintable()
    holdfast.save(tmp_path / "f\x9b", {"model": torch.nn.Linear(1, 1)})
    assert process("show", "--json", tmp_path / "f\x9b").stdout.replace("\n", "").isprintable()
