"""The Hugging Face sink: one model's weight files and index, tied tensors written once, config and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from holdfast.checkpoint.commit import BlockReport
from holdfast.convert.sinks.adapters import plan_adapters
from holdfast.convert.sinks.base import Output, SinkRequest, omitted_names, tensor_files
from holdfast.core import names
from holdfast.core.errors import NotFound, Unsupported
from holdfast.format import strictjson
from holdfast.format.safetensors import encode_index
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import FilePlan, Place, TensorSpec, split_group
from holdfast.plan.recipe import Recipe

NO_CONFIG = "the source has no config.json: from_pretrained needs it; give it with --config FILE"
_SINGLE = "model.safetensors"


def plan(contents: Contents, request: SinkRequest) -> Output:
    """Plan the files that `from_pretrained` expects: the model's weights, and an index for several files."""
    if any(group.kind == names.ADAPTER for group in contents.groups.values()):
        return plan_adapters(contents, request)
    name, group = _model(contents)
    if group.logical:
        raise Unsupported(
            f"{name}: a Hugging Face folder cannot store {sorted(group.logical)[0]!r} with the dtype "
            f"{group.logical[sorted(group.logical)[0]]}; exclude it with --remove"
        )
    tensors, notes = _with_ties(group, request.side_files.get(f"{names.group_folder(name)}config.json"))
    specs = [TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in tensors.items()]
    planned: Sequence[FilePlan] = split_group("model", specs, request.max_shard_bytes)
    folder = names.group_folder(name)
    small = {file.removeprefix(folder): data for file, data in request.side_files.items() if file.startswith(folder)}
    small = {file: data for file, data in small.items() if "/" not in file}
    if len(planned) == 1:
        planned = [_renamed(planned[0], _SINGLE)]
    else:
        weight_map = {place.spec.key: file.name for file in planned for place in file.places}
        small[names.index_file("model")] = encode_index(weight_map, sum(spec.bytes for spec in specs))

    def small_files(attempt: str, reports: Sequence[BlockReport]) -> Mapping[str, bytes]:
        return small

    others = omitted_names(contents, [name])
    if others:
        notes.insert(0, f"a Hugging Face folder stores only the model: omitted {', '.join(others)}")
    if f"{names.group_folder(name)}config.json" not in request.side_files:
        notes.append(NO_CONFIG)
    return Output(tuple(tensor_files(name, planned, tensors)), small_files, tuple(notes))


def _with_ties(group: Group, config: bytes | None) -> tuple[dict[str, Recipe[Place]], list[str]]:
    """Return the tensors to write, and a note about tied tensors that are written once.

    transformers ties weights only by the config. Without ties in the config, it needs every key in the files.
    """
    tensors = dict(group.tensors)
    fields = strictjson.loads(config, "config.json") if config is not None and group.aliases else {}
    tied = fields.get("tie_word_embeddings") if isinstance(fields, dict) else None
    if tied is False:
        return {**tensors, **{alias: tensors[key] for alias, key in group.aliases.items()}}, []
    if tied is None and group.aliases:
        alias, key = next(iter(group.aliases.items()))
        return tensors, [f"{alias} is tied to {key} and written once, but no config.json sets tie_word_embeddings"]
    return tensors, []


def _model(contents: Contents) -> tuple[str, Group]:
    """Return the module to write: "model", or the only module."""
    if "model" in contents.groups:
        return "model", contents.groups["model"]
    modules = {name: group for name, group in contents.groups.items() if group.kind == "module"}
    if len(modules) != 1:
        actual = f"several modules: {', '.join(sorted(modules))}" if modules else "no module"
        raise NotFound(
            f"a Hugging Face folder stores one model, but the source has {actual}; choose one with --only GROUP"
        )
    return next(iter(modules.items()))


def _renamed(file: FilePlan, name: str) -> FilePlan:
    return replace(file, name=name, places=tuple(replace(place, file=name) for place in file.places))
