"""What other programs make of the hub's tensors, written with torch and nothing of Holdfast."""

from __future__ import annotations

import re
from typing import Any

import torch

State = dict[str, torch.Tensor]


def grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """For each key and value head its queries, its key, its value: as Megatron's attention cuts them."""
    heads = config.get("num_attention_heads") or config["n_head"]
    groups = config.get("num_key_value_heads") or heads
    size = q.shape[0] // heads
    rest = q.shape[1:]
    parts = [
        q.reshape(groups, heads // groups * size, *rest),
        k.reshape(groups, size, *rest),
        v.reshape(groups, size, *rest),
    ]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def layer_numbers(state: State, layers: str) -> list[int]:
    found = {int(match[1]) for key in state if (match := re.match(rf"{re.escape(layers)}\.(\d+)\.", key))}
    return sorted(found)


def experts_of(state: State, prefix: str) -> list[int]:
    found = {int(match[1]) for key in state if (match := re.match(rf"{re.escape(prefix)}\.(\d+)\.", key))}
    return sorted(found)


def hub_names(state: State) -> State:
    """Mixtral's names of experts as other families have them."""
    words = {"block_sparse_moe": "mlp", "w1.weight": "gate_proj.weight", "w2.weight": "down_proj.weight"}
    words["w3.weight"] = "up_proj.weight"
    out = {}
    for key, value in state.items():
        out[replaced(key, words)] = value
    return out


def replaced(key: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        key = key.replace(old, new)
    return key


def fused(state: State, config: dict[str, Any], *, by_group: bool) -> State:
    """q, k, v and gate, up in one weight each, wherever they are."""
    out = dict(hub_names(state))
    for key in list(out):
        if (match := re.fullmatch(r"(.*\.self_attn)\.q_proj\.(weight|bias)", key)) is not None:
            q, k, v = (out.pop(f"{match[1]}.{x}_proj.{match[2]}") for x in "qkv")
            whole = grouped(q, k, v, config) if by_group else torch.cat([q, k, v])
            out[f"{match[1]}.qkv_proj.{match[2]}"] = whole
        if (match := re.fullmatch(r"(.*)\.gate_proj\.(weight|bias)", key)) is not None:
            pair = [out.pop(f"{match[1]}.{x}_proj.{match[2]}") for x in ("gate", "up")]
            out[f"{match[1]}.gate_up_proj.{match[2]}"] = torch.cat(pair)
    return out


def megatron(state: State, config: dict[str, Any], *, engine: bool) -> State:
    """Megatron-Core's keys; with Transformer Engine norms are inside linear layers and experts are grouped."""
    state = hub_names(state)
    out = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if "lm_head.weight" in state:
        out["output_layer.weight"] = state["lm_head.weight"]
    for number in layer_numbers(state, "model.layers"):
        prefix = f"model.layers.{number}."
        layer = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        made = {**_attention(layer, config, engine=engine), **_feed_forward(layer, engine=engine)}
        out |= {f"decoder.layers.{number}.{key}": value for key, value in made.items()}
    return out


def _attention(layer: State, config: dict[str, Any], *, engine: bool) -> State:
    out = {"self_attention.linear_proj.weight": layer["self_attn.o_proj.weight"]}
    if "self_attn.o_proj.bias" in layer:
        out["self_attention.linear_proj.bias"] = layer["self_attn.o_proj.bias"]
    latent = "self_attn.kv_b_proj.weight" in layer
    norm = "self_attention.linear_qkv.layer_norm_weight" if engine and not latent else "input_layernorm.weight"
    out[norm] = layer["input_layernorm.weight"]
    if latent:
        names = {
            "q_a_proj": "linear_q_down_proj.weight",
            "q_b_proj": "linear_q_up_proj.weight",
            "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
            "kv_b_proj": "linear_kv_up_proj.weight",
            "q_a_layernorm": "linear_q_up_proj.layer_norm_weight" if engine else "q_layernorm.weight",
            "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight" if engine else "kv_layernorm.weight",
        }
        return out | {f"self_attention.{new}": layer[f"self_attn.{old}.weight"] for old, new in names.items()}
    for kind in ("weight", "bias"):
        if f"self_attn.q_proj.{kind}" in layer:
            q, k, v = (layer[f"self_attn.{x}_proj.{kind}"] for x in "qkv")
            out[f"self_attention.linear_qkv.{kind}"] = grouped(q, k, v, config)
    for x in "qk":
        if f"self_attn.{x}_norm.weight" in layer:
            out[f"self_attention.{x}_layernorm.weight"] = layer[f"self_attn.{x}_norm.weight"]
    return out


def _feed_forward(layer: State, *, engine: bool) -> State:
    out: State = {}
    norm = layer["post_attention_layernorm.weight"]
    if "mlp.gate.weight" not in layer:
        out["mlp.linear_fc1.layer_norm_weight" if engine else "pre_mlp_layernorm.weight"] = norm
        for kind in ("weight", "bias"):
            if f"mlp.gate_proj.{kind}" in layer:
                out[f"mlp.linear_fc1.{kind}"] = torch.cat(
                    [layer[f"mlp.gate_proj.{kind}"], layer[f"mlp.up_proj.{kind}"]]
                )
                out[f"mlp.linear_fc2.{kind}"] = layer[f"mlp.down_proj.{kind}"]
        return out
    out["pre_mlp_layernorm.weight"] = norm
    out["mlp.router.weight"] = layer["mlp.gate.weight"]
    if "mlp.gate.e_score_correction_bias" in layer:
        out["mlp.router.expert_bias"] = layer["mlp.gate.e_score_correction_bias"]
    for number in experts_of(layer, "mlp.experts"):
        expert = f"mlp.experts.{number}"
        ways = ("linear_fc1", "linear_fc2")
        first, second = (
            f"mlp.experts.{way}.weight{number}" if engine else f"mlp.experts.local_experts.{number}.{way}.weight"
            for way in ways
        )
        out[first] = torch.cat([layer[f"{expert}.gate_proj.weight"], layer[f"{expert}.up_proj.weight"]])
        out[second] = layer[f"{expert}.down_proj.weight"]
    if "mlp.shared_experts.down_proj.weight" in layer:
        pair = [layer[f"mlp.shared_experts.{x}_proj.weight"] for x in ("gate", "up")]
        out["mlp.shared_experts.linear_fc1.weight"] = torch.cat(pair)
        out["mlp.shared_experts.linear_fc2.weight"] = layer["mlp.shared_experts.down_proj.weight"]
    return out


def experts_stored(state: State) -> State:
    """Megatron's grouped experts as its distributed checkpoints hold them: one tensor for a layer."""
    out = dict(state)
    for key in state:
        if (match := re.fullmatch(r"(.*\.mlp\.experts)\.(linear_fc[12])\.weight0", key)) is not None:
            numbers = sorted(int(k.rpartition("weight")[2]) for k in state if k.startswith(f"{match[1]}.{match[2]}."))
            parts = [out.pop(f"{match[1]}.{match[2]}.weight{number}") for number in numbers]
            out[f"{match[1]}.experts.{match[2]}.weight"] = torch.stack(parts)
    return out


def layers_stored(state: State) -> State:
    """... and, where layers are alike, all layers as one tensor."""
    out: State = {}
    for key, value in state.items():
        if (match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", key)) is None:
            out[key] = value
        elif match[1] == "0":
            count = len(layer_numbers(state, "decoder.layers"))
            out[f"decoder.layers.{match[2]}"] = torch.stack(
                [state[f"decoder.layers.{n}.{match[2]}"] for n in range(count)]
            )
    return out


def gpt2_linear(state: State, config: dict[str, Any]) -> State:
    """GPT-2 with weights [out, in] and q, k and v apart."""
    out: State = {}
    for key, stored in state.items():
        value = stored.T if re.search(r"\.(c_attn|c_fc|c_proj)\.weight$", key) else stored
        if ".c_attn." in key:
            for x, part in zip("qkv", value.split(config["n_embd"]), strict=True):
                out[key.replace("c_attn", f"{x}_proj")] = part
        else:
            out[key] = value
    return out


def gpt2_megatron(state: State, config: dict[str, Any], *, engine: bool) -> State:
    """GPT-2 in Megatron-Core's naming."""
    state = gpt2_linear(state, config)
    words = {
        "transformer.wte.": "embedding.word_embeddings.",
        "transformer.wpe.": "embedding.position_embeddings.",
        "transformer.ln_f.": "decoder.final_layernorm.",
        "transformer.h.": "decoder.layers.",
        ".attn.c_proj.": ".self_attention.linear_proj.",
        ".mlp.c_fc.": ".mlp.linear_fc1.",
        ".mlp.c_proj.": ".mlp.linear_fc2.",
        ".ln_1.": ".self_attention.linear_qkv.layer_norm_" if engine else ".input_layernorm.",
        ".ln_2.": ".mlp.linear_fc1.layer_norm_" if engine else ".pre_mlp_layernorm.",
    }
    out: State = {}
    for key, value in state.items():
        if ".q_proj." in key:
            q, k, v = (state[key.replace("q_proj", f"{x}_proj")] for x in "qkv")
            out[key.replace("transformer.h", "decoder.layers").replace("attn.q_proj", "self_attention.linear_qkv")] = (
                grouped(q, k, v, config)
            )
        elif ".k_proj." not in key and ".v_proj." not in key:
            out[replaced(key, words)] = value
    return out
