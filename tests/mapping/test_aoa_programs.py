"""AOA programs as Paddle's own model files write them, unchanged, on a checkpoint that Holdfast saved.

The programs lie in aoa_programs/, as `{"aoa_statements": [...]}`: what `_gen_aoa_config` and
`_gen_inv_aoa_config` of PaddleFormers 1.2.0 give for Llama and for Qwen3-MoE with 2 layers, 4 experts,
4 heads and 2 key and value heads. "tied" ones are for tied embeddings (Qwen3-MoE's also with biases of
q, k and v), "fleet" ones for the classes that hold all experts of a layer in one weight.
"""

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import holdfast
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.layout.box import Box
from holdfast.mapping import Mapping, Sized
from holdfast.plan.recipe import Recipe, to_target_dims

PROGRAMS = Path(__file__).parent / "aoa_programs"
HIDDEN, HEAD, HEADS, GROUPS, LAYERS, EXPERTS, WIDE, VOCABULARY = 16, 8, 4, 2, 2, 4, 12, 32
State = dict[str, np.ndarray]


def program(name: str) -> Mapping:
    return Mapping.parse(PROGRAMS / f"{name}.json")


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """The keys of the hub's naming."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **({} if "tied" in name else {"lm_head.weight": (VOCABULARY, HIDDEN)}),
    }
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        shapes |= {f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        for x, heads in zip("qkv", (HEADS, GROUPS, GROUPS), strict=True):
            shapes[f"{layer}.self_attn.{x}_proj.weight"] = (heads * HEAD, HIDDEN)
            if name == "qwen3_moe_tied":
                shapes[f"{layer}.self_attn.{x}_proj.bias"] = (heads * HEAD,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        mlps = [f"{layer}.mlp"]
        if name.startswith("qwen3_moe"):
            shapes |= {f"{layer}.self_attn.{x}_norm.weight": (HEAD,) for x in "qk"}
            shapes[f"{layer}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
            mlps = [f"{layer}.mlp.experts.{number}" for number in range(EXPERTS)]
        for mlp in mlps:
            shapes |= {f"{mlp}.gate_proj.weight": (WIDE, HIDDEN), f"{mlp}.up_proj.weight": (WIDE, HIDDEN)}
            shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, WIDE)
    return shapes


def saved(folder: Path, name: str) -> Checkpoint:
    generator = torch.Generator().manual_seed(len(name))
    model = {k: torch.randn(shape, generator=generator).bfloat16() for k, shape in shapes_of(name).items()}
    checkpoint = holdfast.save(folder / "checkpoint", {"model": model})
    assert checkpoint.contents.tp_degree == 1
    return checkpoint


def specs(checkpoint: Checkpoint) -> dict[str, Sized]:
    return {key: Sized(r.shape, r.dtype) for key, r in checkpoint.contents.groups["model"].tensors.items()}


def run(mapping: Mapping, state: State, targets: Any = None) -> State:
    sources = {key: Sized(array.shape, _dtype(array)) for key, array in state.items()}
    compiled = mapping.compile(sources, targets, source_tp=1)  # as the manifest says, see `saved`
    assert not compiled.missing
    return {key: made(recipe, state) for key, recipe in compiled.recipes.items()}


def _dtype(array: np.ndarray) -> Any:
    from holdfast.format.dtypes import dtype_named

    return dtype_named(array.dtype.name)


def made(recipe: Recipe[str], state: State) -> np.ndarray:
    out = np.empty(recipe.shape, recipe.dtype.name)
    for term in recipe.terms:
        data = state[term.source][term.part.within(Box.full(state[term.source].shape))]
        for dtype in term.casts:
            data = data.astype(dtype.name)
        out[term.box.within(Box.full(recipe.shape))] = to_target_dims(data, term.order)
    return out


def paddle_llama(state: State, *, tied: bool) -> State:
    """Linear weights transposed; tied weights stored twice."""
    out = {key: array.T if key.endswith("_proj.weight") else array for key, array in state.items()}
    return out | ({"lm_head.weight": state["model.embed_tokens.weight"]} if tied else {})


def grouped(parts: list[np.ndarray]) -> np.ndarray:
    """Per key and value head its queries, its key, its value, along the last dim."""
    q, k, v = parts
    size = HEADS // GROUPS * HEAD
    each = (
        [q[..., g * size : (g + 1) * size], k[..., g * HEAD : (g + 1) * HEAD], v[..., g * HEAD : (g + 1) * HEAD]]
        for g in range(GROUPS)
    )
    return np.concatenate([piece for pieces in each for piece in pieces], axis=-1)


def paddle_qwen3_moe(state: State, *, tied: bool, fleet: bool) -> State:
    out = {key: array for key, array in state.items() if "_proj" not in key}
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        attention = f"{layer}.self_attn"
        out[f"{attention}.qkv_proj.weight"] = grouped([state[f"{attention}.{x}_proj.weight"].T for x in "qkv"])
        if f"{attention}.q_proj.bias" in state:
            out[f"{attention}.qkv_proj.bias"] = grouped([state[f"{attention}.{x}_proj.bias"] for x in "qkv"])
        out[f"{attention}.o_proj.weight"] = state[f"{attention}.o_proj.weight"].T
        gate = out[f"{layer}.mlp.gate.weight"].astype(np.float32)
        out[f"{layer}.mlp.gate.weight"] = gate if fleet else gate.T
        experts = [f"{layer}.mlp.experts.{expert}" for expert in range(EXPERTS)]
        firsts = [
            np.concatenate([state[f"{e}.gate_proj.weight"].T, state[f"{e}.up_proj.weight"].T], axis=1) for e in experts
        ]
        seconds = [state[f"{e}.down_proj.weight"].T for e in experts]
        if fleet:
            out[f"{layer}.mlp.grouped_gemm_experts.weight1"] = np.concatenate(firsts)
            out[f"{layer}.mlp.grouped_gemm_experts.weight2"] = np.concatenate(seconds)
            for x in "qk":
                out[f"{attention}.{x}_layernorm.weight"] = out.pop(f"{attention}.{x}_norm.weight")
        else:
            out |= {f"{e}.up_gate_proj.weight": first for e, first in zip(experts, firsts, strict=True)}
            out |= {f"{e}.down_proj.weight": second for e, second in zip(experts, seconds, strict=True)}
    if fleet:
        out["model.embedding.embed_tokens.weight"] = out.pop("model.embed_tokens.weight")
        out["model.lm_head.weight"] = out.pop("lm_head.weight")
    return out | ({"lm_head.weight": state["model.embed_tokens.weight"]} if tied else {})


NAMES = ["llama", "llama_tied", "qwen3_moe", "qwen3_moe_tied", "qwen3_moe_fleet"]


def expected_of(name: str, state: State) -> State:
    if name.startswith("llama"):
        return paddle_llama(state, tied="tied" in name)
    return paddle_qwen3_moe(state, tied="tied" in name, fleet="fleet" in name)


def assert_same(got: State, expected: State) -> None:
    assert sorted(got) == sorted(expected)
    for key, array in expected.items():
        assert got[key].dtype == array.dtype, key
        assert got[key].shape == array.shape, key
        assert got[key].tobytes() == array.tobytes(), key


@pytest.mark.parametrize("name", NAMES)
def test_paddles_program_makes_paddles_state(tmp_path: Path, name: str) -> None:
    checkpoint = saved(tmp_path, name)
    state = {key: checkpoint.read(key) for key in specs(checkpoint)}
    assert all(array.dtype == ml_dtypes.bfloat16 for array in state.values())
    assert_same(run(program(name), state), expected_of(name, state))


@pytest.mark.parametrize("name", NAMES)
def test_paddles_inverse_makes_the_checkpoint_again(tmp_path: Path, name: str) -> None:
    checkpoint = saved(tmp_path, name)
    wanted = specs(checkpoint)
    state = {key: checkpoint.read(key) for key in wanted}
    there = run(program(name), state)
    assert_same(run(program(f"{name}_inverse"), there, wanted), state)


def test_the_builtin_mapping_is_paddles_program() -> None:
    """Where Paddle's program casts nothing, the family says the same as Paddle's own file."""
    sources = {key: Sized(shape, _dtype(np.zeros(0, ml_dtypes.bfloat16))) for key, shape in shapes_of("llama").items()}
    assert Mapping.parse("llama-paddle").compile(sources).recipes == program("llama").compile(sources).recipes
