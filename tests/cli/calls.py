"""How the tests call the command line: in this process, or as a user does."""

import subprocess
import sys

from click.testing import CliRunner, Result

from holdfast.cli.main import cli


def call(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def process(*arguments: object, python: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *python, "-m", "holdfast", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
