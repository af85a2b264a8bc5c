"""`holdfast resize-vocab`: options, progress and the printed result of a vocabulary of another size."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from holdfast.cli.launched import report_on_first_rank
from holdfast.cli.render import clean, print_json, written_text
from holdfast.cli.steps import CheckpointPath, step_option
from holdfast.convert.torchrun_ranks import launched_rank, launched_ranks
from holdfast.core.terminal import progress_bar


@click.command("resize-vocab", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="SRC", type=CheckpointPath())
@click.argument("destination", metavar="DST")
@step_option
@click.option("--size", required=True, type=click.IntRange(1), help="Rows of the resized vocabulary.")
@click.option("--pad-to", type=click.IntRange(1), help="Round the rows up to a multiple of this number.")
@click.option("--init", default="mean", show_default=True, help="New rows: the mean of the known tokens, or zero.")
@click.option("--key", "keys", multiple=True, metavar="PATTERN", help="Embeddings without a usual name. Repeatable.")
@click.option("--shrink", is_flag=True, help="Drop padding: allow fewer rows, but never below the tokenizer's ids.")
@click.option("--to", metavar="FORMAT", help="hf or holdfast. [default: that of SRC]")
@click.option("--max-shard-size", default="5GB", show_default=True, help="The maximum size of a file.")
@click.option("--force", is_flag=True, help="Replace an existing checkpoint at DST atomically.")
@click.option("--no-verify", is_flag=True, help="Do not check the digests of SRC.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    source: str,
    destination: str,
    size: int,
    pad_to: int | None,
    init: str,
    keys: tuple[str, ...],
    shrink: bool,
    to: str | None,
    max_shard_size: str,
    force: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Write the checkpoint SRC to DST with another number of rows for its tokens.

    \b
    holdfast resize-vocab Qwen2.5-7B padded --size 151665 --pad-to 512
    holdfast resize-vocab runs/llama runs/larger/step-000000000001 --size 128512
    holdfast resize-vocab Qwen2.5-7B trimmed --size 151680 --shrink
    torchrun --nproc-per-node 8 -m holdfast resize-vocab SRC DST --size 128512

    Every known row keeps its bits. New rows are the mean of the rows of known tokens. Masters,
    averages and the optimizer's state of a Holdfast step follow; new rows of a state are zero.
    vocab_size of config.json is rewritten; tokenizer and other files are copied byte for byte.
    Tensors are streamed, so that memory does not depend on their size, and DST appears
    atomically. Exit code 0: success. 1: SRC is damaged. 2: usage error.
    """
    rank, _ = launched_rank()
    with report_on_first_rank(rank):
        from holdfast.tokens.resize_vocabulary import ResizeOptions, resize_vocab

        options = ResizeOptions(size=size, pad_to=pad_to, init=init, keys=keys, shrink=shrink)
        with launched_ranks() as ranks:

            def show_progress(total: int) -> Any:
                return progress_bar("resizing", total // ranks.world if ranks.rank == 0 else 0)

            done = resize_vocab(
                source,
                destination,
                options,
                to=to,
                max_shard_size=max_shard_size,
                verify=not no_verify,
                force=force,
                ranks=ranks,
                watch=show_progress,
            )
        if rank != 0:
            return
        if as_json:
            print_json(asdict(done))
            return
        for note in done.notes:
            click.echo(clean(f"note: {note}"))
        click.echo(clean(f"wrote {done.path}: {written_text(done)}"))
