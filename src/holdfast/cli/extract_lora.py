"""`holdfast extract-lora`: a LoRA adapter from a tuned model and its base, with the error of every layer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from holdfast.cli.render import clean, count, print_json, print_table, size_text
from holdfast.cli.steps import CheckpointPath
from holdfast.core.terminal import progress_bar


@click.command("extract-lora", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("base", metavar="BASE", type=CheckpointPath())
@click.argument("tuned", metavar="TUNED", type=CheckpointPath())
@click.argument("destination", metavar="DST")
@click.option("--rank", type=int, default=16, show_default=True, help="The rank of the adapter.")
@click.option("--force", is_flag=True, help="Replace an existing adapter at DST atomically.")
@click.option("--no-verify", is_flag=True, help="Do not check the digests of the models.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(base: str, tuned: str, destination: str, rank: int, force: bool, no_verify: bool, as_json: bool) -> None:
    """Extract a LoRA adapter: what TUNED changed in BASE, as matrices of a small rank.

    \b
    holdfast extract-lora llama llama-tuned adapter --rank 32
    holdfast merge llama again --lora adapter

    Every changed weight of a linear layer becomes two matrices, by truncated singular value
    decomposition. The table shows what they lose: the relative error of the change, 0 if the rank
    suffices. Other changed tensors (embeddings, norms, biases) are stored whole.
    Takes the memory of the largest changed matrix. PeftModel.from_pretrained opens DST.
    """
    from holdfast.merging.lora.extract_adapter import Extracted, ExtractOptions, extract_adapter

    def show_progress(total: int) -> Any:
        return progress_bar("extracting", total)

    options = ExtractOptions(base, tuned, rank, force=force, verify=not no_verify)
    done: Extracted = extract_adapter(options, destination, show_progress)
    if as_json:
        print_json(asdict(done))
        return
    print_table(("weight", "error"), [[clean(key), f"{error:.4f}"] for key, error in done.errors.items()], right=(1,))
    if done.saved:
        click.echo(clean(f"stored whole: {', '.join(done.saved)}"))
    click.echo(clean(f"wrote {done.path}: {count(len(done.errors), 'layer')}, {size_text(done.bytes)}"))
