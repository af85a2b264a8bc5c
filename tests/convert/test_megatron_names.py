import pytest

from holdfast.convert.megatron_names import has_hub_names, has_megatron_names, mapping_hint
from tests.convert.megatron import CONFIG

ATTENTION = "decoder.layers.0.self_attention.linear_qkv.weight"
STACKED = "decoder.layers.self_attention.linear_qkv.weight"
LATENT = "decoder.layers.0.self_attention.linear_kv_up_proj.weight"
OLD = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
MAMBA = "decoder.layers.0.mixer.in_proj.weight"


@pytest.mark.parametrize(
    "key",
    [ATTENTION, STACKED, LATENT, OLD, MAMBA, f"model.{ATTENTION}",
     "decoder.layers.3.self_attention.linear_q_down_proj.weight", "decoder.layers.self_attention.linear_q_proj.weight",
     "decoder.layers.mixer.in_proj.weight", "encoder.layers.0.self_attention.linear_qkv.bias",
     "language_model.transformer.layers.11.attention.query_key_value.bias"],
)  # fmt: skip
def test_names_of_megatron(key):
    assert has_megatron_names(["other", key])


@pytest.mark.parametrize(
    "key",
    ["model.layers.0.self_attn.q_proj.weight", "backbone.layers.0.mixer.in_proj.weight",
     "visual.blocks.0.mlp.linear_fc1.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight",
     "transformer.h.0.self_attention.query_key_value.weight", "model.decoder.layers.0.self_attn.out_proj.weight",
     "transformer.encoder.layers.0.self_attention.query_key_value.weight"],
)  # fmt: skip
def test_names_of_the_hub(key):
    assert not has_megatron_names([key])


def test_names_of_the_families_on_the_hub():
    for key in ("model.layers.0.self_attn.q_proj.weight", "layers.1.self_attn.kv_b_proj.weight",
                "transformer.h.0.attn.c_attn.weight", "h.3.attn.c_proj.bias"):  # fmt: skip
        assert has_hub_names(["other", key])
    assert not has_hub_names([ATTENTION, STACKED, LATENT, OLD, MAMBA, "model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("keys", "model_type", "hint"),
    [
        ([STACKED], "llama", "--map llama-from-megatron-dist?"),
        ([STACKED], None, "--map from-megatron-dist --config FOLDER"),
        ([ATTENTION], "qwen3", "--map qwen3-from-megatron?"),
        ([ATTENTION, "decoder.layers.0.input_layernorm.weight"], "llama", "--map llama-from-megatron-local?"),
        ([ATTENTION, "decoder.layers.0.mlp.experts.experts.linear_fc1.weight"], "mixtral",
         "--map mixtral-from-megatron-dist-layers?"),
        ([LATENT, "decoder.layers.0.input_layernorm.weight"], "deepseek_v3", "--map deepseek-v3-from-megatron?"),
        ([LATENT, "decoder.layers.0.self_attention.kv_layernorm.weight"], "deepseek_v3",
         "--map deepseek-v3-from-megatron-local?"),
        ([LATENT], "llama", "no built-in mapping of llama has these names"),
        ([LATENT.replace(".0", "")], "deepseek_v3", "no built-in mapping has latent attention with all layers in one"),
        ([ATTENTION], "opt", "model_type 'opt', a family without built-in mappings"),
        ([ATTENTION, MAMBA], "llama", "no built-in mapping has Mamba layers"),
        ([OLD], "llama", "no built-in mapping has the names of Megatron before Megatron-Core"),
    ],
)  # fmt: skip
def test_the_mapping_that_fits_or_that_none_does(keys, model_type, hint):
    config = None if model_type is None else {**CONFIG, "model_type": model_type, "architectures": []}
    assert hint in mapping_hint(keys, config)
