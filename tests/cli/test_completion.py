"""Completion in a real shell: the printed code, evaluated, completes commands and options."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.cli.calls import call


def test_bash_completes_commands_and_options(tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    program = tmp_path / "holdfast"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m holdfast "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(holdfast completion bash)"\n'
        'for typed in "holdfast ver" "holdfast verify --st" "holdfast doctor --js"; do\n'
        "  COMP_WORDS=($typed); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()\n"
        '  _holdfast_completion holdfast "${COMP_WORDS[$COMP_CWORD]}"; echo "${COMPREPLY[@]}"\n'
        "done\n"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.split() == ["verify", "--step", "--json"]


@pytest.mark.parametrize(("shell", "text"), [("zsh", "compdef _holdfast"), ("fish", "complete --no-files --command")])
def test_code_for_other_shells_is_printed(shell, text):
    assert text in call("completion", shell).output


def test_an_unknown_shell_is_refused():
    assert call("completion", "tcsh").exit_code == 2
