"""`holdfast size`: print the memory that the ranks of a run need, and the sizes of its checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import click

from holdfast.cli.render import clean, count, print_json, print_table, size_text
from holdfast.cli.steps import CheckpointPath, step_option

if TYPE_CHECKING:
    from holdfast.sizes.memory_plan import MemoryPlan
    from holdfast.sizes.rank_memory import RankMemory

_UNCOUNTED = (
    "not counted: activations, buffers of communication, the parameters that FSDP gathers for a layer, and what CUDA "
    "itself takes"
)
_MOST_ROWS, _MOST_RUNS = 24, 3


@click.command("size", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("source", metavar="DIR_OR_CONFIG", type=CheckpointPath())
@step_option
@click.option("--dp", default=1, show_default=True, help="Data-parallel ranks.")
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel ranks.")
@click.option("--pp", default=1, show_default=True, help="Pipeline stages.")
@click.option("--ep", default=1, show_default=True, help="Data-parallel ranks that share the experts of a layer.")
@click.option(
    "--zero",
    default=0,
    show_default=True,
    help="0: replicas. 1: shard the optimizer. 2: and gradients. 3: and parameters (FSDP2).",
)
@click.option("--param", metavar="FORMAT", help="Parameters: fp32, bf16, fp16. Default: as they are stored.")
@click.option(
    "--compute", metavar="FORMAT", help="Copies to compute with: fp8, fp8-row, fp8-block128, mxfp8, mxfp4, nvfp4."
)
@click.option("--grads", metavar="FORMAT", help="Gradients: fp32, bf16, fp16. Default: as the parameters.")
@click.option(
    "--optim",
    default="none",
    show_default=True,
    metavar="NAME",
    help="adamw, adam, sgd, sgd-momentum, lion, ...; none: no training.",
)
@click.option(
    "--masters", metavar="FORMAT", help="Masters of the optimizer, or none. Default: fp32 for parameters below fp32."
)
@click.option(
    "--model-dtype", metavar="DTYPE", help="As of Checkpointer: the model is saved rounded, with fp32 masters."
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="The maximum size of a file.")
@click.option("--ranks-per-host", default=8, show_default=True, help="Ranks that share a host's memory and processors.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(source: str, as_json: bool, **options: Any) -> None:
    """Print what a run of the model at DIR_OR_CONFIG needs, before any of it is started.

    \b
    holdfast size runs/llama
    holdfast size Llama-8B/config.json --dp 8 --tp 2 --zero 3 --param bf16 --grads fp32 --optim adamw
    holdfast size DeepSeek-V3 --dp 64 --pp 16 --ep 64 --zero 1 --param bf16 --compute fp8-block128 --optim adamw

    DIR_OR_CONFIG is a checkpoint in any format that Holdfast reads, a run's root, or a Hugging
    Face config.json, for which transformers builds the model without memory. No tensor is read.

    For every rank: parameters, the copies that it computes with and their scales, gradients,
    masters and optimizer state on the device; the arena of a save in host memory (page-locked
    for a GPU); what a restore reads, and its page-locked buffers. Then the files of a checkpoint,
    as a save of this run would write them, to the byte. Activations are not estimated.
    """
    from holdfast.sizes.memory_plan import plan_memory

    plan = plan_memory(source, **options)
    if as_json:
        print_json(_fields(plan))
        return
    _print_model(plan)
    _print_ranks(plan)
    _print_checkpoint(plan)
    for note in plan.notes:
        click.echo(clean(f"note: {note}"))
    click.echo(_UNCOUNTED)


def _fields(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "source": plan.model.origin,
        "parameters": plan.model.parameters,
        "tensors": len(plan.model.tensors),
        "run": asdict(plan.shape) | {"world": plan.shape.world},
        "ranks": [asdict(rank) | {"device_bytes": rank.device_bytes} for rank in plan.ranks],
        "checkpoint": {"bytes": plan.checkpoint.bytes, "groups": [asdict(group) for group in plan.checkpoint.groups]},
        "stored": dict(plan.stored),
        "notes": list(plan.notes),
    }


def _print_model(plan: MemoryPlan) -> None:
    model, shape = plan.model, plan.shape
    click.echo(
        clean(f"{model.origin}: {_number(model.parameters)} parameters in {count(len(model.tensors), 'tensor')}")
    )
    for group, size in plan.stored.items():
        click.echo(clean(f"stored: {group}, {size_text(size)}"))
    click.echo(f"{count(shape.world, 'rank')} on {count(len(set(shape.hosts)), 'host')}: {shape}\n")


def _number(parameters: int) -> str:
    for unit, size in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if parameters >= size:
            return f"{parameters / size:.2f} {unit}"
    return str(parameters)


def _print_ranks(plan: MemoryPlan) -> None:
    """Print a row for each set of ranks with equal device memory, and the largest of their other figures."""
    compute = plan.precision.compute
    parts = ("parameters", "copies", "gradients", "masters", "optimizer", "device_bytes")
    alike: dict[tuple[str, ...], list[RankMemory]] = {}
    for memory in plan.ranks:
        alike.setdefault(tuple(size_text(getattr(memory, part)) for part in parts), []).append(memory)
    rows = []
    for texts, members in alike.items():
        arenas = [member.arena_bytes for member in members if member.arena_bytes is not None]
        others = (
            size_text(max(arenas)) if arenas else "-",
            size_text(max(member.restore.bytes for member in members)),
            size_text(max(member.restore.pinned_bytes for member in members)),
        )
        rows.append([_ranges([member.rank for member in members]), *texts, *others])
    copies = f"{compute.name} copies" if compute else "copies"
    headers = ["ranks", "parameters", copies, "gradients", "masters", "optimizer", "on device"]
    headers += ["arena of a save", "restore reads", "through"]
    print_table(headers, rows[:_MOST_ROWS], right=range(1, len(headers)))
    if len(rows) > _MOST_ROWS:
        click.echo(f"... and {len(rows) - _MOST_ROWS} more kinds of ranks; --json has every rank")
    most = plan.most
    click.echo(f"rank {most.rank} needs the most on its device: {size_text(most.device_bytes)}")


def _ranges(ranks: list[int]) -> str:
    """Format rank numbers in order, with runs of neighbors as ranges: "0-3, 8"; of many runs only the first."""
    ends = [at for at, (a, b) in enumerate(pairwise(ranks), 1) if b != a + 1]
    runs = [ranks[begin:end] for begin, end in pairwise([0, *ends, len(ranks)])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(texts) > _MOST_RUNS:
        return f"{', '.join(texts[:_MOST_RUNS])}, ... ({len(ranks)} ranks)"
    return ", ".join(texts)


def _print_checkpoint(plan: MemoryPlan) -> None:
    click.echo()
    rows = [
        [group.name, str(group.tensors), str(group.files), size_text(group.tensor_bytes), f"{group.file_bytes:,}"]
        for group in plan.checkpoint.groups
    ]
    print_table(("checkpoint", "tensors", "files", "tensor bytes", "bytes on disk"), rows, right=(1, 2, 3, 4))
    click.echo(f"a checkpoint takes {size_text(plan.checkpoint.bytes)}\n")
