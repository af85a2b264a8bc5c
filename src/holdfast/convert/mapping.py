"""The mapping of a conversion: programs per module applied to the source or explained, equal scalars, notes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.convert.megatron_config import check_config, check_given, check_values
from holdfast.convert.megatron_extras import leads_to_hub, padding_note, without_extras
from holdfast.convert.megatron_names import has_hub_names, has_megatron_names, mapping_hint
from holdfast.convert.select import is_model
from holdfast.core.errors import Damaged, InvalidArgument, Mismatch, Unsupported
from holdfast.format import strictjson
from holdfast.mapping import families
from holdfast.mapping.apply import EqualScalars, map_contents
from holdfast.mapping.per_module import ModelInfo, programs
from holdfast.mapping.program import Mapping as Program
from holdfast.plan.contents import Contents
from holdfast.plan.files import TensorSpec

_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class MappingOptions:
    """The user's mapping, its direction, and the TP degree of fused weights.

    `config` replaces the source's config.json, and `config_name` is the file that it was read from. With
    `config_from_args` it is made of Megatron's args in the source (see config_from_args.py).
    """

    written: Any = None
    reverse: bool = False
    tp_degree: int | None = None
    config: Mapping[str, Any] | None = None
    config_name: str = _CONFIG
    config_from_args: bool = False


@dataclass(frozen=True, slots=True)
class MappedSource:
    """The mapped contents, the scalars that must be equal for the mapping to be valid, and what was dropped."""

    contents: Contents
    equal_scalars: tuple[EqualScalars, ...]
    notes: tuple[str, ...]


def map_source(contents: Contents, options: MappingOptions, side_files: Mapping[str, bytes]) -> MappedSource:
    """Apply the mapping of each module."""
    if options.tp_degree is not None:
        contents = replace(contents, tp_degree=options.tp_degree)
    same: list[EqualScalars] = []
    found, notes = _programs(contents, options, side_files)
    for module, program in found.items():
        try:
            result = map_contents(contents, module, program, target_tp=contents.tp_degree)
        except Mismatch as error:
            hint = _other_mapping(contents.groups[module].tensors, options, side_files)
            what, line, excerpt = str(error).partition("\n")  # the statement with carets ends the message
            raise Mismatch(f"{what}{hint}{line}{excerpt}") from None
        if result.kept:
            kept = ", ".join(sorted(result.kept)[:5])
            raise Unsupported(f"{kept}: the mapping keeps the initial value, but a conversion has none; remove `_ ->`")
        contents = result.contents
        same += result.equal_scalars
        note = padding_note(contents.groups[module].tensors) if _leads_to_megatron(options) else None
        notes = notes if note is None else (*notes, note)
    return MappedSource(contents, tuple(same), notes)


def _leads_to_megatron(options: MappingOptions) -> bool:
    return leads_to_hub(options.written, reverse=options.reverse) is False and "megatron" in options.written


def _other_mapping(keys: Collection[str], options: MappingOptions, side_files: Mapping[str, bytes]) -> str:
    """Return a hint for a built-in mapping that has the names of the source, where the given one does not."""
    to_hub = leads_to_hub(options.written, reverse=options.reverse)
    if to_hub is None:
        return ""
    omit = " (without --reverse)" if options.reverse else ""
    if has_megatron_names(keys):
        hint = mapping_hint(keys, config_of(side_files) if options.config is None else options.config)
        given = families.opposite(options.written) if options.reverse else options.written
        return "" if to_hub and (f"-{given}?" in hint or f" {given}?" in hint) else f"; {hint}{omit}"
    if to_hub and has_hub_names(keys):
        name = options.written if options.reverse else families.opposite(options.written)
        return f"; the names are already the hub's: did you mean --map {name}?{omit}"
    return ""


def makes_hub_names(contents: Contents, options: MappingOptions) -> bool:
    """Return True for a built-in mapping to the hub's names, and for the user's own one of a Megatron model."""
    known = leads_to_hub(options.written, reverse=options.reverse)
    keys = [key for group in contents.groups.values() for key in group.tensors]
    return known if known is not None else options.written is not None and has_megatron_names(keys)


def explain_mapping(contents: Contents, options: MappingOptions, side_files: Mapping[str, bytes]) -> tuple[str, ...]:
    """Return a line for every target of the mapping with its sources, and for every removed or unused key."""
    degree = options.tp_degree or contents.tp_degree
    lines: list[str] = []
    found, _ = _programs(contents, options, side_files)
    for module, program in found.items():
        group = contents.groups[module]
        keys = [TensorSpec(key, recipe.dtype, recipe.shape) for key, recipe in group.tensors.items()]
        aliases = [TensorSpec(a, group.tensors[k].dtype, group.tensors[k].shape) for a, k in group.aliases.items()]
        lines += program.explain([*keys, *aliases], source_tp=degree, target_tp=degree).splitlines()
    return tuple(lines)


def _programs(
    contents: Contents, options: MappingOptions, side_files: Mapping[str, bytes]
) -> tuple[dict[str, Program], tuple[str, ...]]:
    """Return the programs by module, and notes about what they drop."""
    if options.written is None:
        return {}, ()
    modules = [name for name, group in contents.groups.items() if is_model(name, group) and "/" not in name]

    def config(module: str) -> Mapping[str, Any] | None:
        if options.config is not None:
            return options.config
        return config_of(side_files) if module == "model" else None

    def model_info(module: str) -> ModelInfo:
        stored = contents.groups[module].tensors
        return ModelInfo(config(module), targets=stored) if options.reverse else ModelInfo(config(module), stored)

    own = config_of(side_files)
    if leads_to_hub(options.written, reverse=options.reverse) is not None and options.config and own is not None:
        check_given(options.config, own)
    try:
        found = programs(options.written, modules, model_info, reverse=options.reverse)
    except InvalidArgument as error:
        keys = [key for group in contents.groups.values() for key in group.tensors]
        if own is not None or options.config is not None or not (has_args(contents) and has_megatron_names(keys)):
            raise
        raise InvalidArgument(f"{error}; --config from-args makes one of the run's args") from None
    notes: list[str] = []
    to_hub = leads_to_hub(options.written, reverse=options.reverse)
    for module, program in found.items() if to_hub is not False else ():
        group = contents.groups[module]
        stored = {**group.tensors, **{alias: group.tensors[key] for alias, key in group.aliases.items()}}
        fields, args = config(module), contents.state.get("args", {}).get("value")
        if to_hub is None:
            if fields is not None and has_megatron_names(stored):
                notes += check_values(stored, args, fields, options.config_name)
            continue
        if fields is not None:
            notes += check_config(stored, args, fields, options.config_name)
            notes += _other_family(options.written, fields)
        result = config_of(side_files) if module == "model" else None  # it goes along, and not the one given
        found[module], dropped = without_extras(program, stored, config(module) if result is None else result)
        notes += dropped
    return found, tuple(notes)


def _other_family(name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a note for a config.json of another family than that of the mapping, such as Mistral's for Llama's."""
    family, model_type = families.named_family(name), config.get("model_type")
    if family is not None and model_type is not None and model_type not in family.model_types:
        yield (
            f"config.json has model_type {model_type!r}, and the mapping {name} gives {family.name}'s names: right "
            "where both models have the same weights"
        )


def has_args(contents: Contents) -> bool:
    """Return True if a checkpoint has Megatron's args."""
    args = contents.state.get("args", {}).get("value")
    return isinstance(args, Mapping) and "num_attention_heads" in args


def config_of(side_files: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    """Return the model's config.json; None if it is missing."""
    if _CONFIG not in side_files:
        return None
    config = strictjson.loads(side_files[_CONFIG], _CONFIG)
    if not isinstance(config, dict):
        raise Damaged(f"{_CONFIG}: not a JSON object")
    return config
