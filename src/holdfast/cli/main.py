"""The entry point of the command line: commands imported when called, Holdfast's errors printed in one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

import click

from holdfast.cli.completion import VARIABLE
from holdfast.cli.render import clean
from holdfast.core.errors import Damaged, HoldfastError
from holdfast.core.torch_needed import torch_missing
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
    "serve": "Serve a page about runs and checkpoints, live, for a browser.",
    "report": "Write one HTML file about a run, for a mail or an issue.",
    "doctor": "Check this machine and a root before a run: what to change, and how.",
    "completion": "Print the code that makes a shell complete commands and paths.",
    "train": "Train on any layout from a config; resumes automatically.",
    "demo": "Train, kill, resume on another layout, open with transformers.",
}
# What other tools call it.
_SYNONYMS = {
    "list": "ls",
    "inspect": "show",
    "info": "show",
    "cat": "show",
    "check": "verify",
    "fsck": "verify",
    "compare": "diff",
    "export": "convert",
    "average": "merge",
    "prune": "gc",
    "clean": "gc",
    "rm": "gc",
    "delete": "gc",
    "memory": "arenas",
    "watch": "top",
    "monitor": "top",
    "status": "top",
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

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; for a mistyped one, or the name that another tool has for it, suggest one."""
        name = args[0]
        if name in _COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(name.lower(), [*_COMMANDS, *_SYNONYMS], n=2, cutoff=0.7)
        names = dict.fromkeys(_SYNONYMS.get(match, match) for match in close)
        hint = f" Did you mean {' or '.join(names)}?" if names else " See holdfast --help."
        raise click.UsageError(f"No such command {clean(name)!r}.{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="holdfast")
def cli() -> None:
    """Holdfast checkpoints the state of distributed training runs.

    A root holds checkpoints named step-N. Each is plain safetensors with a manifest. A path may
    name a checkpoint (step-40 means step 40), or a root for its newest step, or with --step N for
    another. Every command that prints data accepts --json.

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
    if VARIABLE in os.environ:  # a shell asks for completions
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "holdfast", VARIABLE, os.environ[VARIABLE]))
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
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        click.echo(f"holdfast: {torch_missing('this command')}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        # The reader has closed the pipe; the interpreter must not report an error on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
