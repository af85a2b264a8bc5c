"""Model configs: sizes and traits of a decoder, and conversion to and from Hugging Face's config.json. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from holdfast.core.errors import InvalidArgument, Unsupported


@dataclass(frozen=True, slots=True)
class ArchitectureTraits:
    """The traits shared by models of one Hugging Face model type."""

    architecture: str
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    shared_expert: bool = False


FAMILIES = {
    "llama": ArchitectureTraits("LlamaForCausalLM"),
    "qwen2": ArchitectureTraits("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": ArchitectureTraits("Qwen3ForCausalLM", qk_norm=True),
    "qwen2_moe": ArchitectureTraits("Qwen2MoeForCausalLM", qkv_bias=True, experts=True, shared_expert=True),
    "qwen3_moe": ArchitectureTraits("Qwen3MoeForCausalLM", qk_norm=True, experts=True),
}

_RATES = ("attention_dropout", "residual_dropout", "embedding_dropout")

# Settings of config.json that this trainer does not implement, with the only supported values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], (), None),
    "pretraining_tp": (1, None),
    "rope_scaling": (None,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder's sizes. `family` is its Hugging Face model type."""

    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int = 0
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    embedding_dropout: float = 0.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.001

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise InvalidArgument(f"model family {self.family!r}: choose one of {', '.join(FAMILIES)}")
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // max(1, self.num_attention_heads))
        _check_sizes(self)
        _check_dropout(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise InvalidArgument(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}; every key head serves equally many query heads"
            )
        if self.traits.experts and not 0 < self.num_experts_per_tok <= self.num_experts:
            raise InvalidArgument(
                f"num_experts_per_tok={self.num_experts_per_tok} must be at least 1 and at most "
                f"num_experts={self.num_experts}"
            )

    @property
    def traits(self) -> ArchitectureTraits:
        return FAMILIES[self.family]

    @property
    def drops(self) -> bool:
        """True if training uses dropout."""
        return any(getattr(self, name) for name in _RATES)

    def to_hf(self) -> dict[str, Any]:
        """Return the content of a config.json that transformers can open."""
        out: dict[str, Any] = {
            "architectures": [self.traits.architecture],
            "model_type": self.family,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "use_sliding_window": False,
            "use_cache": True,
        }
        out |= {name: getattr(self, name) for name in _shared_names(self.traits)}
        if self.family == "llama":
            out |= {"mlp_bias": False}
        if self.traits.experts:
            out |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "output_router_logits": False}
        if self.family == "qwen2_moe":
            out |= {"qkv_bias": True}
        return out

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], **changes: Any) -> ModelConfig:
        """Read the content of config.json; raises Unsupported for a setting that this trainer does not implement."""
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise Unsupported(f"config.json: model_type {family!r} is not one of {', '.join(FAMILIES)}")
        for name, allowed in _ONLY.items():
            if config.get(name, allowed[0]) not in allowed:
                raise Unsupported(f"config.json: {name}={config[name]!r} is not supported, only {allowed[0]!r}")
        config = {"num_experts": config.get("num_local_experts"), **config}  # as transformers 5 calls it
        known = {name: config[name] for name in _shared_names(FAMILIES[family]) if config.get(name) is not None}
        rope = config.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise Unsupported(f"config.json: rope_type {rope['rope_type']!r} is not supported, only 'default'")
        known["rope_theta"] = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
        known.setdefault("num_key_value_heads", config.get("num_attention_heads"))
        return cls(**{"family": family, **known, **changes})


def _shared_names(traits: ArchitectureTraits) -> list[str]:
    """Return the fields that have the same names in config.json."""
    ours = {"family", "rope_theta", "residual_dropout", "embedding_dropout"}
    if not traits.experts:
        ours |= {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"}
        ours |= {"router_aux_loss_coef"}
    if not traits.shared_expert:
        ours |= {"shared_expert_intermediate_size"}
    return [field.name for field in fields(ModelConfig) if field.name not in ours]


def _check_dropout(config: ModelConfig) -> None:
    for name in _RATES:
        if not 0 <= getattr(config, name) < 1:
            raise InvalidArgument(f"model {name}={getattr(config, name)} must be at least 0 and less than 1")


def _check_sizes(config: ModelConfig) -> None:
    needed = [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
    ]
    if config.traits.experts:
        needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
    else:
        needed.append("intermediate_size")
    if config.traits.shared_expert:
        needed.append("shared_expert_intermediate_size")
    for name in needed:
        if getattr(config, name) < 1:
            raise InvalidArgument(
                f"model {name}={getattr(config, name)} must be at least 1 for a {config.family} model"
            )
    if config.rms_norm_eps < 0 or not config.rope_theta > 0:
        raise InvalidArgument(
            f"model rms_norm_eps={config.rms_norm_eps} must be at least 0, and rope_theta={config.rope_theta} positive"
        )
    if config.head_dim % 2:
        raise InvalidArgument(f"model head_dim={config.head_dim} must be even: rotary embeddings rotate pairs")
