"""Values of a config.json beside Megatron's args: norms, activation, rotary embeddings, routing of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.convert import effective_config as effective
from holdfast.convert.effective_config import Config, as_int, as_number, as_text

Args = Mapping[str, Any]

RMS_NORM = ("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral", "deepseek-v3")
LATENT = "multi_latent_attention"
_LLAMA3 = 8.0  # the factor of versions that have no arg for it


@dataclass(frozen=True, slots=True)
class Pair:
    """A value of config.json, with its name there, and that of the args. None is not compared."""

    name: str
    argument: str
    given: Any
    trained: Any

    def differs(self) -> bool:
        if self.given is None or self.trained is None:
            return False
        if isinstance(self.given, str) or isinstance(self.trained, str):
            return bool(self.given != self.trained)
        return not math.isclose(self.given, self.trained, rel_tol=1e-6)


def pairs(args: Args, config: Config) -> Iterator[Pair]:
    """Yield the values of a config.json that no shape shows, each with the arg that decided it in training."""
    yield from _dense_pairs(args, config)
    yield from _rope_pairs(args, config)
    yield from _expert_pairs(args, config)


def _dense_pairs(args: Args, config: Config) -> Iterator[Pair]:
    family = effective.family_name(config)
    yield Pair(
        effective.epsilon_field(config), "norm_epsilon", effective.epsilon(config), _number(args, "norm_epsilon")
    )
    norm = "RMSNorm" if family in RMS_NORM else "LayerNorm" if family == "gpt2" else None
    yield Pair(
        f"the norm of model_type {config.get('model_type')}", "normalization", norm, _text(args, "normalization")
    )
    activation = effective.activation(config)
    if args.get("swiglu") is True:
        yield Pair("hidden_act", "swiglu True:", "silu" if activation == "swish" else activation, "silu")
    elif args.get("swiglu") is False and activation in ("silu", "swish"):
        yield Pair("hidden_act", "swiglu", activation, "False")
    if family in ("llama", "mistral", "qwen2", "qwen3", "deepseek-v3"):
        yield Pair(
            "intermediate_size", "ffn_hidden_size", _int(config, "intermediate_size"), _int(args, "ffn_hidden_size")
        )


def _rope_pairs(args: Args, config: Config) -> Iterator[Pair]:
    family = effective.family_name(config)
    rotates = family in RMS_NORM
    kind, expected = _text(args, "position_embedding_type"), "rope" if rotates else "learned_absolute"
    if kind not in (None, "yarn", expected) and (rotates or family == "gpt2"):
        yield Pair(f"the position embedding of model_type {config.get('model_type')}", "position_embedding_type",
                    expected, kind)  # fmt: skip
        return
    yield Pair("rope_theta", "rotary_base", effective.rope_theta(config), _number(args, "rotary_base"))
    if args.get(LATENT) is True:
        factor = _number(effective.rope_fields(config), "factor") if effective.rope_type(config) == "yarn" else 1.0
        trained = 1.0 if args.get("rope_type") == "rope" else _number(args, "rotary_scaling_factor")
        yield Pair("the factor of yarn in rope_scaling", "rotary_scaling_factor", factor, trained)
        return
    yield Pair("partial_rotary_factor", "rotary_percent", effective.rope_share(config), _number(args, "rotary_percent"))
    yield from _scaling_pairs(args, config) if rotates else ()


def _scaling_pairs(args: Args, config: Config) -> Iterator[Pair]:
    """Yield the kinds of rotary scaling that Megatron trains with, and their factors."""
    kind, factor = effective.rope_type(config), _number(effective.rope_fields(config), "factor")
    linear = _number(args, "rotary_seq_len_interpolation_factor")
    if "use_rope_scaling" in args:
        trained = (_number(args, "rope_scaling_factor") or _LLAMA3) if args["use_rope_scaling"] is True else 1.0
        yield Pair("the factor of llama3 in rope_scaling", f"use_rope_scaling {args['use_rope_scaling']}, factor",
                    factor if kind == "llama3" else 1.0, trained)  # fmt: skip
    if "rotary_seq_len_interpolation_factor" in args:
        yield Pair("the factor of linear in rope_scaling", "rotary_seq_len_interpolation_factor",
                    factor if kind == "linear" else 1.0, 1.0 if linear is None else linear)  # fmt: skip


def _expert_pairs(args: Args, config: Config) -> Iterator[Pair]:
    family, count = effective.family_name(config), _int(args, "num_experts")
    if family not in ("mixtral", "qwen3-moe", "deepseek-v3") or "num_experts" not in args:
        return
    if count is None:  # a dense model, whose other args of experts are the defaults
        yield Pair(effective.experts_field(config), "num_experts", effective.experts(config), "None")
        return
    top_k = _int(args, "moe_router_topk")
    yield Pair(effective.experts_field(config), "num_experts", effective.experts(config), count)
    yield Pair("num_experts_per_tok", "moe_router_topk", effective.experts_per_token(config), top_k)
    width = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    trained = _int(args, "moe_ffn_hidden_size") or _int(args, "ffn_hidden_size")
    yield Pair(width, "moe_ffn_hidden_size", _int(config, width), trained)
    score = "sigmoid" if family == "deepseek-v3" else "softmax"
    yield Pair(f"the scores of model_type {config.get('model_type')}", "moe_router_score_function", score,
                _text(args, "moe_router_score_function"))  # fmt: skip
    if isinstance(args.get("moe_router_pre_softmax"), bool) and top_k != 1:
        yield Pair("norm_topk_prob", f"moe_router_pre_softmax {args['moe_router_pre_softmax']}, which means",
                    effective.normalizes_top_k(config), not args["moe_router_pre_softmax"])  # fmt: skip
    scaling = as_number(config.get("routed_scaling_factor", 2.5)) if family == "deepseek-v3" else 1.0
    if "moe_router_topk_scaling_factor" in args:
        yield Pair("routed_scaling_factor", "moe_router_topk_scaling_factor", scaling,
                    _number(args, "moe_router_topk_scaling_factor") or 1.0)  # fmt: skip


def _number(fields: Mapping[str, Any], name: str) -> float | None:
    return as_number(fields.get(name))


def _int(fields: Mapping[str, Any], name: str) -> int | None:
    return as_int(fields.get(name))


def _text(fields: Mapping[str, Any], name: str) -> str | None:
    return as_text(fields.get(name))
