"""The entry point of the command line: commands imported when called, Holdfast's errors printed in one line."""

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
    "show": "Show the contents of a checkpoint.",
    "verify": "Read every byte of a checkpoint and check every digest.",
    "diff": "Compare two checkpoints: keys, shapes, dtypes and values.",
    "convert": "Convert a checkpoint to other names, shapes, dtypes or formats.",
    "resize-vocab": "Resize the vocabulary of a checkpoint, its optimizer included.",
    "check-tokens": "Check that a tokenizer, configs and embeddings fit each other.",
    "size": "Print the memory that a run needs, and the size of its checkpoints.",
    "merge": "Merge models into one: linear, slerp, ties, dare, della and others; or LoRA adapters.",
    "extract-lora": "Extract a LoRA adapter from a tuned model and its base.",
    "gc": "Delete checkpoints that no policy keeps, and leftovers of dead saves.",
    "arenas": "List what runs hold in this host's memory; free what crashed runs left.",
    "tag": "Tag a step, so that retention never deletes it.",
    "top": "Monitor a run: the save in flight and the committed steps.",
    "doctor": "Check this machine and a root before a run: what to change, and how.",
    "train": "Train on any layout from a config; resumes automatically.",
    "demo": "Train, kill, resume on another layout, open with transformers.",
}


class _LazyGroup(click.Group):
    """Commands that are imported only when called, so that `ls` starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        command = getattr(importlib.import_module(f"holdfast.cli.{name.replace('-', '_')}"), "command")  # noqa: B009
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast")
def cli() -> None:
    """Holdfast checkpoints the state of distributed training runs.

    A root holds checkpoints named step-N. Each is plain safetensors with a manifest. A path may
    name a checkpoint, or a root for its newest step. Every command accepts --json.

    \b
    holdfast ls runs/llama                 list the steps
    holdfast show runs/llama               keys, shapes and sizes of the newest step
    holdfast verify runs/llama/step-...    check every byte against its digest
    holdfast diff A B                      show the differences and their magnitude
    holdfast convert A B --to hf           change the format, key names or dtype
    holdfast resize-vocab A B --size N     more rows for tokens, streamed
    holdfast check-tokens A                do tokenizer, configs and rows fit
    holdfast size runs/llama --dp 8        memory of a run, before it is started
    holdfast merge A B C --weight 2 --weight 1 average two models
    holdfast top runs/llama                watch the run save
    holdfast tag runs/llama best           keep the newest step permanently
    holdfast gc runs/llama --dry-run       show what retention would delete
    holdfast doctor runs/llama             check the machine and the file system before a run

    Exit code 0: success. 1: negative result (damaged, different). 2: usage error.
    """


def main() -> None:
    """Run the command line. A HoldfastError is printed in one line, without a traceback."""
    try:
        # Not cli(): it exits with 1 on a closed pipe, which here means a negative result.
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
        # The reader has closed the pipe; the interpreter must not report an error on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
