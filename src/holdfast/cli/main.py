"""The commands, each in a file of its own that is imported when the command is called."""

from __future__ import annotations

import importlib
import os
import sys

import click

from holdfast.cli.render import clean
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.version import __version__

_COMMANDS = {
    "ls": "List the checkpoints under a root.",
    "show": "Show what a checkpoint holds.",
    "verify": "Read every byte of a checkpoint and check every digest.",
    "diff": "Compare two checkpoints: keys, shapes, dtypes and values.",
    "convert": "Convert a checkpoint to other names, shapes, dtypes or formats.",
    "gc": "Take away what no policy keeps, and what dead saves left behind.",
    "tag": "Name a step, so that retention never removes it.",
    "top": "Follow a run live: the save in flight, the steps committed.",
    "train": "Train on any layout from a config; resumes by itself.",
    "demo": "Train, kill, resume on another layout, open with transformers.",
}


class _Lazy(click.Group):
    """Commands that are imported only when they are called, so that `ls` starts at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"holdfast.cli.{name}"), "command")  # noqa: B009
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast")
def cli() -> None:
    """Holdfast keeps the state of distributed training runs.

    A root holds checkpoints named step-N; each is plain safetensors with a manifest. Paths may
    name a checkpoint, or a root for its newest step. Every command takes --json.

    \b
    holdfast ls runs/llama                 which steps are there
    holdfast show runs/llama               keys, shapes and sizes of the newest one
    holdfast verify runs/llama/step-...    is every byte as it was written
    holdfast diff A B                      what differs, and by how much
    holdfast convert A B --to hf            another format, naming or dtype
    holdfast top runs/llama                watch the run save
    holdfast tag runs/llama best           keep the newest step for good
    holdfast gc runs/llama --dry-run       what retention would take away

    Exit code 0: good. 1: the answer is no (damaged, different). 2: the call was wrong.
    """


def main() -> None:
    """Run the command line; a HoldfastError is one line, never a traceback."""
    try:
        # Not cli(): its own handling of a closed pipe would exit with 1, which here means "no".
        with cli.make_context("holdfast", sys.argv[1:]) as context:
            cli.invoke(context)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("holdfast: interrupted", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except HoldfastError as error:
        click.echo(clean(f"holdfast: {error}", keep="\n"), err=True)
        sys.exit(1 if isinstance(error, Damaged) else 2)
    except BrokenPipeError:
        # Whoever read the output has enough; the interpreter must not complain while it closes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
