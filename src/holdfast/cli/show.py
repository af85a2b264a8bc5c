"""`holdfast show`: print the tree of keys with shapes, dtypes and sizes, the writer and plan, or one key's values."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from holdfast.checkpoint.base_reference import references
from holdfast.cli.render import clean, count, open_path, print_json, size_text
from holdfast.cli.show_program import show_program
from holdfast.cli.shown_scales import ShownScales
from holdfast.cli.source_program import source_program_fields, source_program_text
from holdfast.cli.steps import CheckpointPath, step_option
from holdfast.cli.tensor_tree import TreeRow, state_rows, tree_lines
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.core.names import natural_key
from holdfast.format import strictjson
from holdfast.sources.foreign import Foreign

if TYPE_CHECKING:
    from holdfast.checkpoint.checkpoint import Checkpoint
    from holdfast.format.manifest import Manifest

_SHOWN = 80  # characters of a value


@click.command("show", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("path", type=CheckpointPath())
@click.argument("key", required=False)
@step_option
@click.option("--group", help="Show this group only.")
@click.option("--all", "unfold", is_flag=True, help="Print every layer, also those that are alike.")
@click.option("--program", "as_program", is_flag=True, help="Show the model's program instead.")
@click.option("--origin", metavar="OP", help="With --program: where the calls of an operator come from.")
@click.option("--svg", metavar="FILE", help="With --program: draw the graph, folded by module, into FILE.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=N", help="With --program: count FLOPs at this size.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    path: str,
    key: str | None,
    group: str | None,
    unfold: bool,
    as_program: bool,
    origin: str | None,
    svg: str | None,
    sizes: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show the contents of the checkpoint at PATH, or one KEY with its values.

    KEY is the key of a tensor, or the name of a value in state.json. Layers that are alike are
    printed once, as 0-31; --all prints each.

    PATH is a checkpoint, a root (its newest step is shown), or a checkpoint of another tool: a
    Hugging Face folder, torch DCP, a .pt or .bin file, a Paddle checkpoint or program (.json).

    \b
    holdfast show runs/llama                            the newest step
    holdfast show runs/llama --step 40                  step 40; also runs/llama/step-40
    holdfast show runs/llama model.embed_tokens.weight  one tensor, with its values
    holdfast show runs/llama --program                  the program, by module, with counts
    holdfast show runs/llama --program --origin aten.addmm
    """
    checkpoint: Checkpoint = open_path(path)
    if as_program:
        show_program(checkpoint, origin, svg, sizes, as_json=as_json)
        return
    if origin is not None or svg is not None or sizes:
        raise InvalidArgument("--origin, --svg and --size are about the program: add --program")
    if key is not None and key in checkpoint.state and key not in set(checkpoint.keys()):
        print_json(checkpoint.state[key])
        return
    if key is not None:
        _show_key(checkpoint, key, group, as_json)
        return
    if group is not None and group not in checkpoint.groups and group in checkpoint.state:
        raise NotFound(f"{group!r} has no tensors, it is a value: holdfast show {path} {group}")
    if group is not None:
        checkpoint.keys(group)  # raises an error that lists the groups if this one does not exist
    chosen = [name for name in checkpoint.groups if group in (None, name)]
    if as_json:
        print_json(_fields(checkpoint, chosen))
        return
    _print_head(checkpoint)
    for name in chosen:
        _print_group(checkpoint, name, unfold=unfold)
    if group is None:
        _print_values(checkpoint)
        for index, line in enumerate(source_program_text(checkpoint)):
            click.echo(("\n" if index == 0 else "") + clean(line))


def _tensor(checkpoint: Checkpoint, group: str, key: str) -> tuple[str, list[int], int]:
    """Return the dtype, shape and size in bytes of a tensor."""
    tensor = checkpoint.find(key, group)
    return tensor.logical, list(tensor.logical_shape), tensor.bytes


def _fields(checkpoint: Checkpoint, groups: list[str]) -> dict[str, Any]:
    manifest = checkpoint.manifest
    out: dict[str, Any] = {
        "path": checkpoint.path,
        "step": manifest.step,
        "parent": manifest.parent,
        "metrics": dict(manifest.metrics),
        "created": manifest.created,
        "bytes": manifest.total_bytes,
        "writer": dict(manifest.writer),
        "plans": dict(manifest.plans),
        "bases": dict(manifest.bases),
        "notes": list(checkpoint.notes),
        "extra_files": _extra_files(manifest),
        "groups": {},
        "values": {name: entry["kind"] for name, entry in checkpoint.state.items()},
        **source_program_fields(checkpoint),
    }
    for group in groups:
        tensors = {}
        scales = ShownScales.of(checkpoint, group)
        for key in checkpoint.keys(group):
            dtype, shape, size = _tensor(checkpoint, group, key)
            tensors[key] = {"dtype": dtype, "shape": shape, "bytes": size, **scales.fields(key)}
        record = manifest.groups[group]
        out["groups"][group] = {
            "kind": record.kind,
            "files": list(record.files),
            "bytes": record.total_bytes,
            "aliases": dict(record.aliases),
            "tensors": tensors,
        }
    return out


def _print_head(checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    click.echo(f"{clean(checkpoint.path)}")
    step = "no step" if manifest.step is None else f"step {manifest.step}"
    click.echo(f"{step}, {size_text(manifest.total_bytes)} in {count(len(manifest.files), 'file')}")
    if manifest.metrics:
        click.echo("metrics: " + clean(", ".join(f"{name} {value}" for name, value in manifest.metrics.items())))
    if extra := _extra_files(manifest):
        click.echo(clean("extra files: " + ", ".join(f"{name} ({size_text(size)})" for name, size in extra.items())))
    writer = manifest.writer
    if writer:
        mesh = " x ".join(f"{axis}={size}" for axis, size in writer.get("mesh", {}).items())
        written = f"written {manifest.created} by holdfast {writer.get('holdfast')}"
        click.echo(clean(f"{written}, world {writer.get('world')}, hosts {writer.get('hosts')}, mesh {mesh}"))
        for name in writer.get("first_replica", []):
            click.echo(f"replicas differed; saved the first one: {clean(name)}")
        for name, plan in manifest.plans.items():
            click.echo(clean(f"{name} was sharded by a plan of {_plan_text(plan)}"))
        for text in references(manifest.bases):
            click.echo(clean(f"by reference: {text}"))
    else:
        click.echo(f"format {checkpoint.format}, without digests" if isinstance(checkpoint, Foreign) else "no digests")
    for note in checkpoint.notes:
        click.echo(clean(f"note: {note}"))


def _extra_files(manifest: Manifest) -> dict[str, int]:
    """Return the sizes of the files that a user published with the step, by name."""
    return {name: record.size for name, record in manifest.files.items() if record.kind == "extra"}


def _plan_text(plan: dict[str, Any]) -> str:
    """Summarize a plan in one line. Its fields are not validated, so any may be missing."""
    parameters, moved = plan.get("parameters"), plan.get("moved_bytes")
    roles = count(len(parameters), "role") if isinstance(parameters, dict) else "no roles"
    return f"holdfast.spmd: {roles}, {size_text(moved) if type(moved) is int else '?'} moved per rank and batch"


def _print_group(checkpoint: Checkpoint, group: str, *, unfold: bool) -> None:
    record = checkpoint.manifest.groups[group]
    keys = sorted(checkpoint.contents.groups[group].tensors, key=natural_key)
    dtypes: Counter[str] = Counter()
    for key in keys:
        dtype, _, size = _tensor(checkpoint, group, key)
        dtypes[dtype] += size
    parts = ", ".join(f"{size_text(size)} {dtype}" for dtype, size in dtypes.most_common())
    total = f"{count(len(keys), 'tensor')}, {size_text(record.total_bytes)}"
    entry = checkpoint.state.get(group, {})
    where = f", by {' x '.join(entry['axes'])}" if "axes" in entry else ""
    values = "; the rest in state.json" if entry and entry["kind"] != "optimizer" else ""
    click.echo("\n" + clean(f"{group} ({record.kind}{where}): {total}" + (f" ({parts})" if parts else "") + values))
    scales = ShownScales.of(checkpoint, group)
    for line in scales.lines():
        click.echo("  " + clean(line))
    rows = [_tree_row(checkpoint, group, key, scales) for key in keys]
    if record.kind == "optimizer" and not unfold:
        rows = state_rows(rows)
    for line in tree_lines(rows, unfold=unfold):
        click.echo(clean(line))
    for alias, key in record.aliases.items():
        click.echo(f"  {clean(alias)} is tied to {clean(key)}")


def _tree_row(checkpoint: Checkpoint, group: str, key: str, scales: ShownScales) -> TreeRow:
    dtype, shape, size = _tensor(checkpoint, group, key)
    return TreeRow(key, f"{dtype}{shape}", size, scales.suffix(key))


def _print_values(checkpoint: Checkpoint) -> None:
    """Print the entries of state.json but for those of the groups: short values whole."""
    names = [name for name in checkpoint.state if name not in checkpoint.groups]
    if names:
        click.echo("\nin state.json (`holdfast show PATH NAME` prints one):")
    for name in names:
        entry = checkpoint.state[name]
        where = f", by {' x '.join(entry['axes'])}" if "axes" in entry else ""
        text = strictjson.dumps(entry["value"]).decode() if entry["kind"] == "json" else ""
        value = f": {text}" if text and len(text) <= _SHOWN else ""
        click.echo(clean(f"  {name} ({entry['kind']}{where}){value}"))


def _number(value: Any) -> Any:
    """Return a value that JSON can represent; NaN, infinity and complex numbers become text."""
    plain = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)


def _show_key(checkpoint: Checkpoint, key: str, group: str | None, as_json: bool) -> None:
    import numpy as np

    tensor = checkpoint.find(key, group)
    places = tensor.recipe.sources()
    array = checkpoint.read(key, tensor.group)
    values = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    finite = values[np.isfinite(values)]
    facts = {
        "group": tensor.group,
        "key": key,
        "dtype": tensor.logical,
        "shape": list(tensor.logical_shape),
        "bytes": tensor.bytes,
        "file": places[0].file if places else None,
        "offset": places[0].begin if places else None,
        "pieces": len(places),
        "mean_abs": float(np.abs(finite).mean()) if finite.size else None,
        "max_abs": float(np.abs(finite).max()) if finite.size else None,
        "not_finite": int(values.size - finite.size),
        "first": [_number(value) for value in array.reshape(-1)[:8].tolist()],
    }
    if as_json:
        print_json(facts)
        return
    for label, value in facts.items():
        click.echo(f"{label:10} {clean(str(value))}")
