"""`holdfast completion`: print the code that makes a shell complete commands, options and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_HOLDFAST_COMPLETE"


@click.command("completion", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the code that makes SHELL complete commands, options and paths of holdfast.

    \b
    eval "$(holdfast completion bash)"                                  in ~/.bashrc
    eval "$(holdfast completion zsh)"                                   in ~/.zshrc
    holdfast completion fish | source                                   in config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    group = click.get_current_context().find_root().command
    click.echo(kind(group, {}, "holdfast", VARIABLE).source())
