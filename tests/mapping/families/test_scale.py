"""DeepSeek-V3 at its full size, shapes alone: 61 layers, 256 experts, and the layer that predicts further tokens."""

import pytest

from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Mapping, Sized
from tests.effort import at_most

pytestmark = pytest.mark.slow  # 61 layers of 256 experts


CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
}
HIDDEN, WIDE, EXPERT, VOCABULARY = 7168, 18432, 2048, 129280
LIMIT_S = 15  # of one core; about 6 on two busy ones


def full_size() -> dict[str, Sized]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (VOCABULARY, HIDDEN),
    }
    for number in range(62):
        layer = f"model.layers.{number}"
        attention = {
            "q_a_proj": (1536, HIDDEN),
            "q_a_layernorm": (1536,),
            "q_b_proj": (24576, 1536),
            "kv_a_proj_with_mqa": (576, HIDDEN),
            "kv_a_layernorm": (512,),
            "kv_b_proj": (32768, 512),
            "o_proj": (HIDDEN, 16384),
        }
        shapes |= {f"{layer}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{layer}.{norm}_layernorm.weight": (HIDDEN,) for norm in ("input", "post_attention")}
        mlps = {f"{layer}.mlp": WIDE}
        if number >= 3:
            shapes[f"{layer}.mlp.gate.weight"] = (256, HIDDEN)
            shapes[f"{layer}.mlp.gate.e_score_correction_bias"] = (256,)
            mlps = {f"{layer}.mlp.experts.{expert}": EXPERT for expert in range(256)}
            mlps[f"{layer}.mlp.shared_experts"] = EXPERT
        for mlp, width in mlps.items():
            shapes |= {f"{mlp}.gate_proj.weight": (width, HIDDEN), f"{mlp}.up_proj.weight": (width, HIDDEN)}
            shapes[f"{mlp}.down_proj.weight"] = (HIDDEN, width)
    last = "model.layers.61"
    shapes |= {f"{last}.{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{last}.eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    return {key: Sized(shape, dtype_named("bfloat16")) for key, shape in shapes.items()}


@pytest.mark.full
@pytest.mark.sliced(3)
@pytest.mark.parametrize("variant", ["stacked", "megatron", "megatron-dist-layers"])
def test_the_full_key_set_goes_there_and_back_in_seconds(variant: str) -> None:
    sources = full_size()
    with at_most(LIMIT_S):
        there = Mapping.parse(f"deepseek-v3-{variant}", CONFIG).compile(sources).recipes
        back = Mapping.parse(f"deepseek-v3-from-{variant}", CONFIG).compile(there).recipes
    assert {key: (recipe.shape, recipe.dtype) for key, recipe in back.items()} == {
        key: (spec.shape, spec.dtype) for key, spec in sources.items()
    }
    if variant == "stacked":
        assert there["model.layers.60.mlp.experts.gate_up_proj"].shape == (256, 2 * EXPERT, HIDDEN)
