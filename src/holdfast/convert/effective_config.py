"""The values that transformers takes from a config.json, its defaults for missing fields included.

Only values that decide what a model computes and that no shape shows: rotary embeddings, epsilon of the norms,
tying, activation, attention window, routing of experts. None stands for a value that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import InvalidArgument
from holdfast.mapping import families

Config = Mapping[str, Any]

# Of transformers' config classes, by family.
_THETA = {
    "llama": 1e4, "mistral": 1e4, "qwen2": 1e4, "qwen3": 1e4, "qwen3-moe": 1e4, "mixtral": 1e6, "deepseek-v3": 1e4,
}  # fmt: skip
_EPSILON = {
    "llama": 1e-6, "mistral": 1e-6, "qwen2": 1e-6, "qwen3": 1e-6, "qwen3-moe": 1e-6, "mixtral": 1e-5,
    "deepseek-v3": 1e-6, "gpt2": 1e-5,
}  # fmt: skip
_EPSILON_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")
_ACTIVATION_FIELDS = ("hidden_act", "activation_function")
_EXPERTS_FIELD = {"mixtral": "num_local_experts", "qwen3-moe": "num_experts", "deepseek-v3": "n_routed_experts"}
_EXPERTS = {"mixtral": 8, "qwen3-moe": 128, "deepseek-v3": 256}
_TOP_K = {"mixtral": 2, "qwen3-moe": 8, "deepseek-v3": 8}
_WINDOW = {"mistral": 4096}
_LARGEST = 2**63
_WITH_WINDOW = ("mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe")


def family_name(config: Config) -> str:
    """Return the family of a config.json, or its model_type if no built-in mapping is made for it."""
    try:
        return families.family_of(config).name
    except InvalidArgument:
        return str(config.get("model_type"))


def rope_fields(config: Config) -> Mapping[str, Any]:
    """Return the dict of rotary embeddings: rope_parameters of transformers 5, rope_scaling of earlier ones."""
    for name in ("rope_scaling", "rope_parameters"):
        fields = config.get(name)
        if isinstance(fields, Mapping) and fields:
            return fields
    return {}


def rope_type(config: Config) -> str:
    fields = rope_fields(config)
    return str(fields.get("rope_type") or fields.get("type") or "default")


def rope_theta(config: Config) -> float | None:
    return _number(rope_fields(config).get("rope_theta"), config.get("rope_theta"), _THETA.get(family_name(config)))


def rope_share(config: Config) -> float | None:
    """Return the share of a head's dims that rotate."""
    if family_name(config) not in _THETA:
        return None
    return _number(rope_fields(config).get("partial_rotary_factor"), config.get("partial_rotary_factor"), 1.0)


def epsilon(config: Config) -> float | None:
    return _number(*(config.get(name) for name in _EPSILON_FIELDS), _EPSILON.get(family_name(config)))


def epsilon_field(config: Config) -> str:
    """Return the name of the epsilon in this config.json, or that of its family."""
    found = next((name for name in _EPSILON_FIELDS if config.get(name) is not None), None)
    return found or ("layer_norm_epsilon" if family_name(config) == "gpt2" else "rms_norm_eps")


def is_tied(config: Config) -> bool | None:
    """Return True if the head shares the embedding."""
    tied, name = config.get("tie_word_embeddings"), family_name(config)
    if isinstance(tied, bool):
        return tied
    return name == "gpt2" if name in _EPSILON else None


def activation(config: Config) -> str | None:
    name = family_name(config)
    default = "gelu_new" if name == "gpt2" else "silu" if name in _EPSILON else None
    found = next((config[field] for field in _ACTIVATION_FIELDS if config.get(field) is not None), default)
    return found if isinstance(found, str) else None


def window(config: Config) -> int | None:
    """Return the number of tokens that attention sees, None if it sees all of them."""
    name = family_name(config)
    if name not in _WITH_WINDOW or (name.startswith("qwen") and config.get("use_sliding_window") is not True):
        return None
    size = as_int(config.get("sliding_window", _WINDOW.get(name)))
    positions = as_int(config.get("max_position_embeddings"))
    return None if size is not None and positions is not None and size >= positions else size


def experts_field(config: Config) -> str:
    return _EXPERTS_FIELD.get(family_name(config), "num_experts")


def experts(config: Config) -> int | None:
    fields = (experts_field(config), "num_local_experts", "num_experts", "n_routed_experts")
    return _int(*(config.get(field) for field in fields), _EXPERTS.get(family_name(config)))


def experts_per_token(config: Config) -> int | None:
    return _int(config.get("num_experts_per_tok"), _TOP_K.get(family_name(config)))


def normalizes_top_k(config: Config) -> bool | None:
    """Return True if the weights of a token's experts are made to sum to 1, None where they are no softmax."""
    name = family_name(config)
    if name == "qwen3-moe":
        return config.get("norm_topk_prob") is True
    return True if name == "mixtral" else None


def as_number(value: Any) -> float | None:
    """Return a number as a float, None for anything else."""
    if isinstance(value, float):
        return value
    whole = as_int(value)
    return None if whole is None else float(whole)


def as_int(value: Any) -> int | None:
    """Return an integer of ordinary size, None for anything else."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return value if is_int and abs(value) < _LARGEST else None


def as_text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(*values: Any) -> float | None:
    """Return the first value that is a number."""
    return next((number for value in values if (number := as_number(value)) is not None), None)


def _int(*values: Any) -> int | None:
    return next((number for value in values if (number := as_int(value)) is not None), None)
