"""The adapter_config.json of a LoRA adapter: checked fields, and the scaling of a module as PEFT computes it.

A field that would change the result and is not known here is refused by name: an adapter is merged as it was trained,
or not at all.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.format import strictjson

MOST_RANK = 16_384
_MOST_PATTERNS = 100_000
_PATTERN_CHARS = 400
_REPEATS = 4  # of one pattern: more may take forever to match
_NESTED = re.compile(r"\)[*+{?]|[*+}][*+{]")
_NAME = re.compile(r"\w+")
_KINDS = ("LORA",)

# Fields that are read here, or say how the adapter was trained and which modules it has. Any other may change weights.
_KNOWN_FIELDS = frozenset(
    [
        "auto_mapping",
        "base_model_name_or_path",
        "base_model_class",
        "bias",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "parent_library",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "unsloth_fixed",
        "velora_config",
        "loftq_config",
        "use_dora",
        "use_rslora",
        "fan_in_fan_out",
        "lora_bias",
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "trainable_token_indices",
        "peft_type",
        "init_lora_weights",
    ]
)
_TRANSPOSED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # of transformers' Conv1D
# Initialisations that change the base model too: the adapter alone does not hold what was trained.
_CHANGES_BASE = ("pissa", "olora", "loftq", "corda", "lora_ga")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The fields of an adapter's config that decide the merged weights."""

    where: str
    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    use_rslora: bool
    use_dora: bool
    fan_in_fan_out: bool
    token_indices: Mapping[str, tuple[int, ...]]  # by the ending of a module's name
    base: str | None = None
    saved_modules: tuple[str, ...] = ()  # modules_to_save: the endings of names of modules
    ties: bool = False  # modules that the base ties are trained as one
    targets: tuple[str, ...] = ()  # target_modules: the endings of names of modules; none if patterns choose among them
    excluded: tuple[str, ...] = ()
    layers: frozenset[int] | None = None  # layers_to_transform
    layer_names: tuple[str, ...] = ()  # layers_pattern: the names that the number of a layer follows

    @staticmethod
    def read(data: bytes, where: str) -> LoraConfig:
        """Return a checked config. Raises Unsupported for another kind of adapter, or a field of unknown effect."""
        fields = strictjson.loads(data, where)
        if not isinstance(fields, dict):
            raise InvalidArgument(f"{where}: expected a JSON object")
        kind = fields.get("peft_type")
        if kind not in _KINDS:
            raise Unsupported(f"{where}: the adapter's peft_type is {str(kind)[:80]!r}; Holdfast merges LORA")
        start = fields.get("init_lora_weights")
        if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
            raise Unsupported(
                f"{where}: init_lora_weights is {start[:80]!r}, which changes the base model too: convert the adapter "
                "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...) first"
            )
        unknown = sorted(name for name, value in fields.items() if value and name not in _KNOWN_FIELDS)
        if unknown:
            raise Unsupported(f"{where}: Holdfast cannot merge an adapter with {unknown[0][:80]!r}")
        base = fields.get("base_model_name_or_path")
        ranks, alphas = _patterns(fields, "rank_pattern", where), _patterns(fields, "alpha_pattern", where)
        return LoraConfig(
            where=where,
            rank=_rank(fields.get("r"), f"{where}: r"),
            alpha=_number(fields.get("lora_alpha"), f"{where}: lora_alpha"),
            ranks={pattern: _rank(value, f"{where}: rank_pattern") for pattern, value in ranks},
            alphas={pattern: _number(value, f"{where}: alpha_pattern") for pattern, value in alphas},
            use_rslora=_flag(fields, "use_rslora", where),
            use_dora=_flag(fields, "use_dora", where),
            fan_in_fan_out=_flag(fields, "fan_in_fan_out", where),
            token_indices=_token_indices(fields.get("trainable_token_indices"), where),
            base=base if isinstance(base, str) and base else None,
            saved_modules=_names(fields, "modules_to_save", where),
            ties=_flag(fields, "ensure_weight_tying", where),
            targets=() if _has_patterns(fields) else _stated_names(fields.get("target_modules")),
            excluded=_stated_names(fields.get("exclude_modules")),
            layers=_layers(fields.get("layers_to_transform")),
            layer_names=_layer_names(fields),
        )

    def saves(self, key: str) -> bool:
        """Return True if the module of a tensor is among those that were trained as a whole."""
        return key.rpartition(".")[0].endswith(self.saved_modules)

    def stated_rows(self, module: str) -> tuple[int, ...] | None:
        """Return the trained rows that the config states for a module by name, None if it states none."""
        return next((rows for name, rows in self.token_indices.items() if name and is_module(module, name)), None)

    def rows_of(self, module: str) -> tuple[int, ...]:
        """Return the trained rows of a module: by its name, or those of the input embeddings."""
        return self.stated_rows(module) or self.token_indices.get("", ())

    def rank_of(self, module: str) -> int:
        """Return the rank that the config states for a module."""
        return self.ranks.get(_matching(self.ranks, module), self.rank)

    def scaling(self, module: str, weight: float) -> float:
        """Return the factor of a module's product of matrices."""
        alpha = self.alphas.get(_matching(self.alphas, module), self.alpha)
        rank = self.rank_of(module)
        return weight * alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _stated_names(value: Any) -> tuple[str, ...]:
    """Return the names of modules in a list. A pattern means no modules: it may take forever to match."""
    return tuple(name for name in value if isinstance(name, str) and name) if isinstance(value, list) else ()


def _layer_names(fields: Mapping[str, Any]) -> tuple[str, ...]:
    value = fields.get("layers_pattern")
    return _stated_names([value] if isinstance(value, str) else value)


def _has_patterns(fields: Mapping[str, Any]) -> bool:
    """Return True if a pattern, which may take forever to match, leaves out some of the modules in target_modules."""
    return isinstance(fields.get("exclude_modules"), str) or not all(map(_NAME.fullmatch, _layer_names(fields)))


def _layers(value: Any) -> frozenset[int] | None:
    numbers = [value] if type(value) is int else value
    return frozenset(n for n in numbers if type(n) is int) if isinstance(numbers, list) and numbers else None


def is_module(module: str, name: str) -> bool:
    """Return True if a name in trainable_token_indices means a module; "" is the input embeddings."""
    return not name or module == name or module.endswith(f".{name}")


def is_transposed(model_type: object, module: str, stated: bool) -> bool:
    """Return True if a model stores the weight of a linear layer as [in, out].

    The layer's class decides, as in PEFT. Without a known type of model, it is what the adapter states.
    """
    if not isinstance(model_type, str):
        return stated
    return model_type in _TRANSPOSED_MODELS and not module.endswith("lm_head")


def _matching(patterns: Mapping[str, Any], module: str) -> str:
    """Return the first pattern that matches a module's name or its ending."""
    return next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), module)


def _patterns(fields: Mapping[str, Any], name: str, where: str) -> list[tuple[str, Any]]:
    found = fields.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        raise InvalidArgument(f"{where}: {name}: expected at most {_MOST_PATTERNS} patterns with values")
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidArgument(f"{where}: {name}: {pattern[:80]!r} is no regular expression: {error}") from None
        if len(pattern) > _PATTERN_CHARS or len(re.findall(r"[*+{]", pattern)) > _REPEATS or _NESTED.search(pattern):
            raise Unsupported(f"{where}: {name}: the pattern {pattern[:80]!r} may take forever to match; spell it out")
    return list(found.items())


def _rank(value: Any, where: str) -> int:
    if type(value) is not int or not 1 <= value <= MOST_RANK:
        raise InvalidArgument(f"{where}: expected a rank from 1 to {MOST_RANK}, got {repr(value)[:80]}")
    return value


def _number(value: Any, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > 1e30:
        raise InvalidArgument(f"{where}: expected a finite number, got {str(value)[:80]}")
    return value if type(value) is int else float(value)


def _names(fields: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    found = fields.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise InvalidArgument(f"{where}: {name}: expected a list of names, got {str(found)[:80]}")
    return tuple(found)


def _flag(fields: Mapping[str, Any], name: str, where: str) -> bool:
    value = fields.get(name, False)
    if value not in (True, False, None):
        raise InvalidArgument(f"{where}: {name}: expected true or false, got {str(value)[:80]}")
    return bool(value)


def _token_indices(value: Any, where: str) -> dict[str, tuple[int, ...]]:
    """Return the trained rows of embeddings by module; a list is for the input embeddings."""
    by_module = value if isinstance(value, dict) else {"": value} if value else {}
    out: dict[str, tuple[int, ...]] = {}
    for module, indices in by_module.items():
        good = isinstance(indices, list) and all(type(index) is int and 0 <= index < 2**31 for index in indices)
        if not good or len(set(indices)) != len(indices):
            raise InvalidArgument(f"{where}: trainable_token_indices: expected different non-negative numbers of rows")
        out[module] = tuple(indices)
    return out
