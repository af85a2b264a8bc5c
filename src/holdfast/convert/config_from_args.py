"""A config.json made of Megatron's args, for a model that has none on the hub: `convert --config from-args`.

Only for the families of the built-in mappings, whose fields and args are both known. Nothing is guessed: an arg
that is missing is an error that names it, and the result is compared with the args as a config.json of the hub is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.effective_config import as_int, as_number
from holdfast.convert.mapping import MappingOptions, config_of
from holdfast.convert.megatron_extras import leads_to_hub
from holdfast.core.errors import InvalidArgument
from holdfast.mapping import families

FROM_ARGS = "from-args"
_NAME = "the config.json of --config from-args"
_EMBEDDING = "embedding.word_embeddings.weight"

Field = tuple[str, Any, str]  # of config.json: name, value, the args that it is from


def with_config_from_args(
    source: Checkpoint, files: Mapping[str, bytes], options: MappingOptions
) -> tuple[MappingOptions, tuple[str, ...]]:
    """Return the options with a config made of the source's args, and a note with every field and its arg.

    Returns the options as they are if they do not ask for it. Raises InvalidArgument if the args do not suffice.
    """
    if not options.config_from_args:
        return options, ()
    family = _family(options)
    if config_of(files) is not None:
        raise InvalidArgument(f"--config {FROM_ARGS}: {source.path} has a config.json; omit --config")
    args = source.contents.state.get("args", {}).get("value")
    if not isinstance(args, Mapping) or as_int(args.get("num_attention_heads")) is None:
        raise InvalidArgument(
            f"--config {FROM_ARGS}: {source.path} has no args of Megatron (common.pt of torch_dist, or "
            "model_optim_rng.pt); write a config.json, and give it with --config FILE"
        )
    fields = [*_fields(family, args, source)]
    missing = [f"{argument} (for {name})" for name, value, argument in fields if value is None]
    if missing:
        raise InvalidArgument(
            f"--config {FROM_ARGS}: the args of {source.path} do not have, or have otherwise than {family.name}, "
            f"{', '.join(missing)}; write a config.json, and give it with --config FILE"
        )
    config = {"architectures": [family.architectures[0]], "model_type": family.model_types[0]}
    config |= {name: value for name, value, _ in fields}
    listed = ", ".join(f"{name} {_shown(value)} ({argument})" for name, value, argument in fields)
    note = (
        f"config.json is made of the run's args: model_type {family.model_types[0]} (the mapping), {listed}; add what "
        "args do not have, such as bos_token_id and eos_token_id"
    )
    return replace(options, config=config, config_name=_NAME, config_from_args=False), (note,)


def _family(options: MappingOptions) -> families.ModelFamily:
    """Return the family of a built-in mapping from Megatron's names to the hub's."""
    written = options.written
    family = families.named_family(written) if isinstance(written, str) else None
    from_megatron = (
        isinstance(written, str) and "megatron" in written and leads_to_hub(written, reverse=options.reverse)
    )
    if family is None or not from_megatron:
        raise InvalidArgument(
            f"--config {FROM_ARGS} needs a built-in mapping from Megatron's names, with its family: --map "
            "llama-from-megatron-dist, for example"
        )
    if family.name not in _FIELDS:
        raise InvalidArgument(f"--config {FROM_ARGS} knows {', '.join(_FIELDS)}, not {family.name}; give a config.json")
    return family


def _fields(family: families.ModelFamily, args: Mapping[str, Any], source: Checkpoint) -> Iterator[Field]:
    grouped = args.get("group_query_attention") is True
    key_value = "num_query_groups" if grouped else "num_attention_heads"
    untied = args.get("untie_embeddings_and_output_weights")
    yield "hidden_size", as_int(args.get("hidden_size")), "hidden_size"
    yield "num_hidden_layers", as_int(args.get("num_layers")), "num_layers"
    yield "num_attention_heads", as_int(args.get("num_attention_heads")), "num_attention_heads"
    yield "num_key_value_heads", as_int(args.get(key_value)), key_value
    yield "head_dim", as_int(args.get("kv_channels")), "kv_channels"
    yield "vocab_size", *_first(args, "vocab_size", "padded_vocab_size")
    yield "max_position_embeddings", *_first(args, "max_position_embeddings", "seq_length")
    yield "rms_norm_eps", as_number(args.get("norm_epsilon")), "norm_epsilon"
    yield "rope_theta", as_number(args.get("rotary_base")), "rotary_base"
    tied = None if not isinstance(untied, bool) else not untied
    yield "tie_word_embeddings", tied, "untie_embeddings_and_output_weights"
    yield "hidden_act", "silu" if args.get("swiglu") is True else None, "swiglu"
    yield from _scaling(args)
    yield from _FIELDS[family.name](args, source)
    dtype = _dtype(source)
    if dtype is not None:
        yield "torch_dtype", dtype, "the stored weights"


def _scaling(args: Mapping[str, Any]) -> Iterator[Field]:
    """Yield rope_scaling as Megatron trains with it: llama3, whose further numbers it has in its code, or linear."""
    factor = as_number(args.get("rotary_seq_len_interpolation_factor"))
    if args.get("use_rope_scaling") is True:
        kind = {"rope_type": "llama3", "factor": as_number(args.get("rope_scaling_factor")) or 8.0}
        kind |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        yield "rope_scaling", kind, "use_rope_scaling"
    elif factor is not None and factor != 1:
        yield "rope_scaling", {"rope_type": "linear", "factor": factor}, "rotary_seq_len_interpolation_factor"


def _dense(args: Mapping[str, Any], source: Checkpoint) -> Iterator[Field]:
    yield "intermediate_size", as_int(args.get("ffn_hidden_size")), "ffn_hidden_size"


def _llama(args: Mapping[str, Any], source: Checkpoint) -> Iterator[Field]:
    yield from _dense(args, source)
    yield "attention_bias", _stored(source, "self_attention.linear_qkv.bias"), "the stored weights"
    yield "mlp_bias", _stored(source, "mlp.linear_fc1.bias"), "the stored weights"


def _qwen3(args: Mapping[str, Any], source: Checkpoint) -> Iterator[Field]:
    yield from _dense(args, source)
    yield "attention_bias", _stored(source, "self_attention.linear_qkv.bias"), "the stored weights"


def _mixtral(args: Mapping[str, Any], source: Checkpoint) -> Iterator[Field]:
    yield "intermediate_size", *_first(args, "moe_ffn_hidden_size", "ffn_hidden_size")
    yield "num_local_experts", as_int(args.get("num_experts")), "num_experts"
    yield "num_experts_per_tok", as_int(args.get("moe_router_topk")), "moe_router_topk"


def _qwen3_moe(args: Mapping[str, Any], source: Checkpoint) -> Iterator[Field]:
    pre = args.get("moe_router_pre_softmax")
    yield "moe_intermediate_size", *_first(args, "moe_ffn_hidden_size", "ffn_hidden_size")
    yield "intermediate_size", as_int(args.get("ffn_hidden_size")), "ffn_hidden_size"
    yield "num_experts", as_int(args.get("num_experts")), "num_experts"
    yield "num_experts_per_tok", as_int(args.get("moe_router_topk")), "moe_router_topk"
    yield "norm_topk_prob", not pre if isinstance(pre, bool) else None, "moe_router_pre_softmax"
    yield "attention_bias", _stored(source, "self_attention.linear_qkv.bias"), "the stored weights"


_FIELDS: dict[str, Callable[[Mapping[str, Any], Checkpoint], Iterator[Field]]] = {
    "llama": _llama,
    "qwen2": _dense,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3-moe": _qwen3_moe,
}


def _first(args: Mapping[str, Any], *names: str) -> tuple[int | None, str]:
    """Return the first of several args that is there, and its name."""
    return next(((value, name) for name in names if (value := as_int(args.get(name))) is not None), (None, names[0]))


def _stored(source: Checkpoint, end: str) -> bool:
    return any(key.endswith(f".{end}") for group in source.contents.groups.values() for key in group.tensors)


def _dtype(source: Checkpoint) -> str | None:
    for group in source.contents.groups.values():
        if group.kind == "module" and _EMBEDDING in group.tensors:
            return group.tensors[_EMBEDDING].dtype.name
    return None


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
