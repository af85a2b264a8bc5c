"""`holdfast convert`: options, dry run, explained mapping, progress and the printed result of a conversion."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from holdfast.cli.launched import report_on_first_rank
from holdfast.cli.render import clean, count, print_json, print_table, size_text, written_text
from holdfast.cli.steps import CheckpointPath, is_step_folder, step_option
from holdfast.convert.config_from_args import FROM_ARGS
from holdfast.convert.destination import DestinationFolder
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.plan_summary import ConversionSummary, summary_of
from holdfast.convert.quantize import FORMATS as FP8_FORMATS
from holdfast.convert.quantize import QuantizeOptions
from holdfast.convert.run import Conversion, Converted, ConvertOptions, convert
from holdfast.convert.sinks import FORMATS
from holdfast.convert.torchrun_ranks import launched_rank, launched_ranks
from holdfast.core import limits
from holdfast.core.errors import (
    InvalidArgument,
    Mismatch,
    NotFound,
    StorageError,
    Unsupported,
)
from holdfast.core.ranks import Ranks
from holdfast.core.terminal import progress_bar
from holdfast.format import strictjson
from holdfast.mapping import families
from holdfast.sources import open_source
from holdfast.storage import locate

_SPECIAL_LINES = 20
_HINTS = {
    "holdfast": "holdfast show {path}",
    "hf": 'AutoModelForCausalLM.from_pretrained("{path}")',
    "dcp": 'torch.distributed.checkpoint.load(state, checkpoint_id="{path}")',
    "paddle": "PaddleFormers, with resume_from_checkpoint={path}",
}


@click.command("convert", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="SRC", type=CheckpointPath())
@click.argument("destination", metavar="DST")
@step_option
@click.option("--map", "mapping", metavar="FILE|NAME", help="A mapping file, or the name of a built-in mapping.")
@click.option("--reverse", is_flag=True, help="Apply the mapping in reverse.")
@click.option(
    "--to",
    "form",
    default="holdfast",
    show_default=True,
    metavar="FORMAT",
    help=f"One of {', '.join(FORMATS)}.",
)
@click.option(
    "--dtype", help="Cast the model to bfloat16, float16, float32 or float64, but not the optimizer or master weights."
)
@click.option(
    "--dequantize", metavar="DTYPE", help="Weights stored with scales (fp8, int8) become bfloat16, float16, float32."
)
@click.option("--quantize", metavar="FORMAT", help=f"Weights of linear layers become {', '.join(FP8_FORMATS)}.")
@click.option(
    "--unquantized",
    multiple=True,
    metavar="PATTERN",
    help="With --quantize: matching keys stay, as embeddings, output heads, norms and routers do. Repeatable.",
)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Convert only matching keys, groups or group/key. Repeatable."
)
@click.option(
    "--remove", multiple=True, metavar="PATTERN", help="Skip matching keys and their optimizer state. Repeatable."
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="The maximum size of a file.")
@click.option("--tp-degree", type=click.IntRange(1), help="The TP degree of fused weights, if it affects their order.")
@click.option(
    "--config",
    metavar="PATH",
    help="The model's config.json, or the folder with it, if SRC has none: for built-in mappings and DST. "
    "from-args makes it of a Megatron run's args.",
)
@click.option(
    "--linear-weights",
    metavar="ORDER",
    help="Order of linear weights in a Paddle SRC, if the shapes are ambiguous: in-out, out-in.",
)
@click.option("--keep-names", is_flag=True, help="With --to hf: write names that transformers does not know, too.")
@click.option("--uint16", metavar="DTYPE", help="Dtype of weights stored as uint16: bfloat16 (raw bits) or uint16.")
@click.option("--dry-run", is_flag=True, help="Only print what would be written; reads headers, no tensors.")
@click.option("--explain", is_flag=True, help="With --dry-run: print the sources of every mapped tensor.")
@click.option("--force", is_flag=True, help="Replace an existing checkpoint at DST atomically.")
@click.option("--no-verify", is_flag=True, help="Do not check the digests of SRC.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    source: str,
    destination: str,
    mapping: str | None,
    reverse: bool,
    form: str,
    dtype: str | None,
    dequantize: str | None,
    quantize: str | None,
    unquantized: tuple[str, ...],
    only: tuple[str, ...],
    remove: tuple[str, ...],
    max_shard_size: str,
    tp_degree: int | None,
    config: str | None,
    linear_weights: str | None,
    keep_names: bool,
    uint16: str | None,
    dry_run: bool,
    explain: bool,
    force: bool,
    no_verify: bool,
    as_json: bool,
) -> None:
    """Convert the checkpoint SRC, in any format that Holdfast reads, to DST.

    \b
    holdfast convert runs/llama exported --to hf --dtype bfloat16
    holdfast convert runs/llama fused --map fused.aoa
    holdfast convert fused separate --map fused.aoa --reverse
    holdfast convert dcp-folder run/step-000000000100
    holdfast convert runs/llama small --only model --remove "*.rotary_emb.inv_freq"
    holdfast convert deepseek-fp8 deepseek --to hf --dequantize bfloat16
    holdfast convert llama llama-fp8 --to hf --quantize fp8-block128
    holdfast convert megatron-run llama --to hf --map llama-from-megatron-dist --config hub-folder
    holdfast convert megatron-run llama --to hf --map llama-from-megatron-dist --config from-args
    torchrun --nproc-per-node 8 -m holdfast convert SRC DST

    If SRC is a run's root, Megatron's too, its newest step is converted, or --step. Tensors are
    streamed a few blocks at a time, and DST appears atomically. A mapping renames and reshapes
    tensors; the optimizer state follows its parameters. --dry-run shows what would be written and
    all problems. Exit code 0: success. 1: SRC is damaged, or a dry run found problems. 2: usage
    error.
    """
    rank, _ = launched_rank()
    with report_on_first_rank(rank):
        options = ConvertOptions(
            to=form,
            dtype=dtype,
            only=only,
            remove=remove,
            max_shard_size=max_shard_size,
            verify=not no_verify,
            force=force,
            mapping=_mapping_options(mapping, reverse, tp_degree, config),
            linear_weights=linear_weights,
            keep_names=keep_names,
            uint16=uint16,
            dequantize=dequantize,
            quantize=_quantize_options(quantize, unquantized),
            on_wait=_show_wait if rank == 0 else lambda text: None,
        )
        if dry_run:
            if rank == 0:
                _dry_run(source, destination, options, as_json=as_json, explain=explain)
            return
        with launched_ranks() as ranks:
            done = _convert(source, destination, options, ranks)
        if rank == 0:
            _print_result(done, as_json=as_json, loadable=_is_loadable(done, options))


def _quantize_options(form: str | None, unquantized: tuple[str, ...]) -> QuantizeOptions | None:
    if form is not None:
        return QuantizeOptions(form, unquantized)
    if unquantized:
        raise InvalidArgument("--unquantized needs --quantize")
    return None


def _mapping_options(mapping: str | None, reverse: bool, tp_degree: int | None, config: str | None) -> MappingOptions:
    if mapping is None and reverse:
        raise InvalidArgument("--reverse needs a mapping; give one with --map")
    if config is None:
        return MappingOptions(mapping, reverse, tp_degree)
    if config == FROM_ARGS:
        return MappingOptions(mapping, reverse, tp_degree, config_from_args=True)
    path = Path(config).expanduser()
    name = str(path / "config.json" if path.is_dir() else path)
    return MappingOptions(mapping, reverse, tp_degree, _read_config(config), name)


def _read_config(path: str) -> dict[str, Any]:
    file_path = Path(path).expanduser()
    if file_path.is_dir():
        file_path /= "config.json"
        if not file_path.is_file():
            raise NotFound(f"--config {path}: the folder has no config.json")
    try:
        with file_path.open("rb") as file:
            data = file.read(limits.JSON_BYTES)
    except OSError as error:
        raise NotFound(f"--config {path}: {error.strerror}") from None
    fields = strictjson.loads(data, str(file_path))
    if not isinstance(fields, dict):
        raise InvalidArgument(f"--config {path}: expected a JSON object, as in a config.json")
    return fields


def _is_loadable(done: Converted, options: ConvertOptions) -> bool:
    """Return True if the format's library can load the result: it needs a config and its own key names."""
    if done.format not in ("hf", "paddle"):
        return True
    mapping = options.mapping.written
    hub_names = mapping is None or families.is_reverse(mapping) != options.mapping.reverse
    storage, folder = locate(done.path)
    return done.ready and hub_names and "config.json" in storage.files(folder)


def _show_wait(text: str) -> None:
    """Say what takes seconds before anything is written, to somebody who is waiting."""
    if sys.stderr.isatty():
        click.echo(f"{text}, which takes some seconds ...", err=True)


def _convert(source: str, destination: str, options: ConvertOptions, ranks: Ranks) -> Converted:
    def show_progress(total: int) -> Any:
        return progress_bar("converting", total // ranks.world if ranks.rank == 0 else 0)

    return convert(source, destination, options, ranks, show_progress)


def _print_result(done: Converted, *, as_json: bool, loadable: bool) -> None:
    if as_json:
        print_json(asdict(done))
        return
    for note in done.notes:
        click.echo(clean(f"note: {note}"))
    if is_step_folder(done.source):
        click.echo(clean(f"read {done.source}"))
    waits = "".join(f", after {seconds:.1f} s {label}" for label, seconds in done.waits.items())
    click.echo(clean(f"wrote {done.path}: {written_text(done)}{waits}"))
    if loadable and done.format in _HINTS:
        click.echo(clean(f"open it with: {_HINTS[done.format].format(path=done.path)}"))


def _dry_run(source: str, destination: str, options: ConvertOptions, *, as_json: bool, explain: bool) -> None:
    problems: list[str] = []

    def collect_problems(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (Mismatch, Unsupported, StorageError) as error:
            problems.append(str(error))
            return None

    def check_destination() -> None:
        try:
            DestinationFolder.at(destination).check(opened, force=options.force)
        except InvalidArgument as error:
            problems.append(str(error))

    opened = open_source(source)
    collect_problems(check_destination)
    conversion = collect_problems(lambda: Conversion(opened, options))
    summary = None if conversion is None else summary_of(conversion.output)
    notes = () if conversion is None else conversion.notes
    lines = () if conversion is None else conversion.explain()
    if as_json:
        facts = {} if summary is None else asdict(summary) | {"bytes": summary.bytes}
        facts |= {"mapping": list(lines)} if explain else {}
        print_json({"source": opened.path, "to": options.to, **facts, "notes": list(notes), "problems": problems})
    else:
        _print_groups(summary)
        _print_mapping(lines, whole=explain)
        _print_end(opened.path, summary, notes, problems)
    raise click.exceptions.Exit(1 if problems else 0)


def _print_mapping(lines: Sequence[str], *, whole: bool) -> None:
    """Print all lines of a mapping, or only the keys that it removes or does not use."""
    if not lines:
        return
    special = [line for line in lines if line.startswith(("removed: ", "unused: "))]
    for line in lines if whole else special[:_SPECIAL_LINES]:
        click.echo(clean(line))
    if not whole:
        made = sum(not line.startswith(" ") for line in lines) - len(special)
        more = f", {len(special)} keys removed or unused" if len(special) > _SPECIAL_LINES else ""
        click.echo(f"mapping: creates {count(made, 'tensor')}{more}; see --explain for their sources")


def _print_groups(summary: ConversionSummary | None) -> None:
    if summary is not None:
        rows = [
            [group.name, str(group.tensors), str(group.files), size_text(group.bytes), _dtypes(group.dtypes)]
            for group in summary.groups
        ]
        print_table(("group", "tensors", "files", "size", "dtypes"), rows, right=(1, 2, 3))
        for cast in summary.casts:
            click.echo(clean(f"cast: {count(cast.tensors, 'tensor')} of {cast.group}, {cast.source} to {cast.target}"))
        if summary.turned or summary.joined:
            click.echo(f"reshaped: {summary.joined} concatenated, {summary.turned} transposed")


def _print_end(source: str, summary: ConversionSummary | None, notes: tuple[str, ...], problems: list[str]) -> None:
    for note in notes:
        click.echo(clean(f"note: {note}"))
    if summary is not None:
        files = f"{count(len(summary.files), 'tensor file')}, {size_text(summary.bytes)}"
        click.echo(clean(f"from {source}: would write {files}"))
    for problem in problems:
        click.echo(clean(f"would fail: {problem}", keep="\n"))


def _dtypes(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} x{number}" for name, number in counts.items())
