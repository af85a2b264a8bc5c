"""Tiny models of transformers architectures, made from their own configs by reductions that fit most of them."""

from __future__ import annotations

from typing import Any

# Architectures whose tensors have other names or shapes in memory than on the hub, or whose rules may say so.
CONVERTED = """
    afmoe altclip aria aria_text audio-spectrogram-transformer audioflamingo3 axk1 axk2 aya_vision bailing_hybrid
    beam beit cohere2_moe cohere_asr cosmos3_omni deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deit dinov2
    dinov2_with_registers dinov3_vit dots1 ernie4_5_moe esm exaone_moe flex_olmo flint fuyu gemma3 glm4_moe
    glm4_moe_lite glm4v_moe glm_moe_dsa glmasr got_ocr2 gpt_neox granite_speech granite_speech_plus granitemoe
    granitemoehybrid granitemoeshared gte hrm_text hunyuan_v1_moe hy_v3 hy_v4 hyperclovax_vision_v2 ijepa internvl
    jamba jina_embeddings_v3 kimi_k25 kimi_linear kolibri1 laguna llava llava_next llava_next_video llava_onevision
    longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral3 mistral_large4 mixtral molmo2_text
    musicflamingo nemotron_h nomic_bert olmo_hybrid olmoe paddleocr_vl paligemma phimoe pi0 pixio pp_chart2table
    qwen2_5_omni_thinker qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3_5_moe_text qwen3_moe qwen3_next
    qwen3_omni_moe_thinker qwen3_vl_moe qwen4_exp_text radio rf_detr sam3_tracker sapiens2 solar_open step3p7
    t5gemma2 timesfm2_5 tipsv2 tipsv2_text_model tipsv2_vision_model ultrabert ultravbert unlimited_ocr video_llava
    videomae vipllava vision-encoder-decoder vision-text-dual-encoder vit vit_mae vit_msn vivit voxtral
    voxtral_realtime
""".split()

# Architectures without conversion rules.
SAME_NAMES = """
    albert bart bert bloom codegen cohere distilbert electra falcon gemma gemma2 glm gpt2 gptj granite helium llama
    mamba mistral mpt olmo2 opt persimmon phi phi3 qwen2 qwen3 roberta smollm3 stablelm starcoder2 t5 whisper xglm
""".split()

# Sizes that most configs share, by the name of the attribute. Configs inside a config are reduced likewise.
SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "hidden_dim": 32,
    "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48, "d_inner": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "moe_intermediate_size": 24, "shared_expert_intermediate_size":
    24, "expert_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 24, "shared_intermediate_size": 24,
    "mlp_dim": 48, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "depth": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "decoder_num_layers": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 8, "d_kv": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "n_routed_experts": 4, "num_experts": 4,
    "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_k": 2,
    "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_layer_start_index": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "image_size": 32, "patch_size": 8, "projection_dim": 16, "max_position_embeddings": 64,
    "max_source_positions": 32, "max_target_positions": 32, "pad_token_id": 0, "pooler_hidden_size": 32,
    "out_hidden_size": 32, "projector_hidden_size": 32, "num_image_tokens": 4, "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "temporal_patch_size": 2, "linear_num_key_heads":
    2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "rotary_dim": 4,
    "lru_width": 32, "state_size": 8, "time_step_rank": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head":
    16, "mamba_dt_rank": 4, "conv_dim": (16,), "conv_kernel": (4,), "conv_stride": (4,), "num_conv_pos_embeddings":
    8, "num_conv_pos_embedding_groups": 4, "feature_size": 16, "num_mel_bins": 16, "num_queries": 8,
    "encoder_hidden_size": 32, "embedding_size": 16, "vision_feature_layer": -1, "max_window_layers": 1,
    "global_attn_every_n_layers": 1, "num_codebooks": 2, "num_query_tokens": 4,
}  # fmt: skip


def reduce_config(config: Any, sizes: dict[str, Any] | None = None) -> Any:
    """Make a config tiny, in place: the sizes that it has, and those of the configs inside it."""
    sizes = sizes or {}
    for name in getattr(type(config), "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            reduce_config(inner, {**sizes, **sizes.get(name, {})})
    attribute_map = getattr(type(config), "attribute_map", {})
    for name, value in {**SIZES, **sizes}.items():
        if isinstance(value, dict) or name in attribute_map:
            continue
        if name in vars(config) and (getattr(config, name) is not None or name in sizes):
            was = getattr(config, name)
            if isinstance(was, list) and not isinstance(value, list | tuple):
                continue
            if isinstance(was, int | float) and not isinstance(was, bool) and isinstance(value, tuple):
                continue
            setattr(config, name, value)
    layers = getattr(config, "num_hidden_layers", None)
    for name in ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types"):
        listed = vars(config).get(name)
        if isinstance(listed, list) and isinstance(layers, int):
            setattr(config, name, listed[:layers] if name not in sizes else sizes[name])
    return config


def tiny_config(model_type: str, sizes: dict[str, Any] | None = None) -> Any:
    """Return a tiny config: made with these sizes if its class accepts them all, else reduced in place."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    try:
        return cls(**_arguments(cls(), {**SIZES, **(sizes or {})}))
    except Exception:  # noqa: BLE001  (whatever a class says of sizes that do not go together)
        return reduce_config(cls(), sizes)


def _arguments(default: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes that a config has, as arguments of its class."""
    out: dict[str, Any] = {}
    inner = getattr(type(default), "sub_configs", {})
    for name, value in sizes.items():
        was = vars(default).get(name)
        fits = isinstance(was, type(value)) or (was is None and name in vars(default)) or isinstance(was, list | tuple)
        if name in vars(default) and name not in inner and (fits or name not in SIZES or SIZES[name] is not value):
            out[name] = value
    for name in inner:
        if hasattr(part := getattr(default, name, None), "to_dict"):
            changed = _arguments(part, {**{n: v for n, v in sizes.items() if n not in inner}, **sizes.get(name, {})})
            kept = {"model_type": part.model_type} if getattr(part, "model_type", "") else {}
            out[name] = {**kept, **changed}
    return out


def model_class(config: Any, names: tuple[str, ...] = ()) -> Any:
    """Return the class to build: the one with a head where the config has one."""
    import transformers.models.auto.modeling_auto as auto

    tables = (
        "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
        "MODEL_FOR_OBJECT_DETECTION_MAPPING", "MODEL_MAPPING",
    )  # fmt: skip
    for table in tables:
        found = getattr(auto, table, {})
        try:
            cls = found[type(config)]
        except KeyError:
            continue
        return cls[0] if isinstance(cls, tuple) else cls
    raise KeyError(type(config).__name__)


def tiny_model(model_type: str, sizes: dict[str, Any] | None = None) -> Any:
    """Return a tiny model with random values in all its parameters, the same each time."""
    import torch

    config = tiny_config(model_type, sizes)
    torch.manual_seed(1)
    model = model_class(config)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model
