"""`holdfast check-tokens`: print contradictions between a folder's tokenizer, its configs and its embeddings."""

from __future__ import annotations

from dataclasses import asdict

import click

from holdfast.cli.render import clean, count, print_json
from holdfast.cli.steps import CheckpointPath, step_option


@click.command("check-tokens", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", metavar="DIR", type=CheckpointPath())
@step_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: str, as_json: bool) -> None:
    """Check that the tokenizer, the configs and the embeddings in DIR fit each other.

    \b
    rows        every id is below the rows of the embeddings, which vocab_size states
    ids         no token has two ids, no id two tokens, in whatever file
    round trip  special tokens are encoded as their one id, and decoded as their text
    roles       bos, eos and pad agree between tokenizer, config.json and generation_config.json

    DIR is a Hugging Face folder, with weights or without, a Holdfast step that was saved with its
    tokenizer, or a run's root. Headers and small files are read, no tensor. Exit code 0: nothing
    was found. 1: something was found. 2: usage error, or no tokenizer.

    \b
    holdfast check-tokens Qwen2.5-7B
    holdfast check-tokens runs/llama --step 40
    """
    from holdfast.tokens.check_folder import check

    result = check(path)
    if as_json:
        print_json(asdict(result) | {"good": result.good})
    else:
        for finding in result.findings:
            click.echo(clean(f"FOUND {finding.kind}: {finding.problem}"))
        for text in result.unchecked:
            click.echo(clean(f"not checked: {text}"))
        rows = ", ".join(f"{key} has {number} rows" for key, number in result.rows.items())
        verdict = "good" if result.good else count(len(result.findings), "finding")
        click.echo(clean(f"{result.path}: {count(result.tokens, 'token')}{f', {rows}' if rows else ''}: {verdict}"))
    raise click.exceptions.Exit(0 if result.good else 1)
