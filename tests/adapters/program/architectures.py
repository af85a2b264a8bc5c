"""Tiny models of transformers and of our own, by name: example inputs, other inputs, and sizes that may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.adapters.program.models import Cnn, UNet

AUTO = torch.export.Dim.AUTO
Case = tuple[Any, dict[str, Any], dict[str, Any] | None, dict[str, Any] | None]

_TEXT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "use_cache": False}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
_BERT = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {
    "image_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _ids(rows: int, length: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": (torch.arange(rows * length).reshape(rows, length) * 7) % 60, **more}


def _decoder(name: str, config: str, experts: str = "", attention: str = "", **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        import transformers

        made = getattr(transformers, config)(**{**_TEXT, **_HEADS, **sizes})
        model = getattr(transformers, name)(made).eval()
        if experts:
            model.set_experts_implementation(experts)
        if attention:
            model.set_attn_implementation(attention)
        return model, _ids(2, 8), _ids(3, 11), {"input_ids": {0: AUTO, 1: AUTO}}

    return make


def _encoder(name: str, config: str, **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**{**_BERT, **sizes})).eval()

        def inputs(rows: int, length: int) -> dict[str, Any]:
            return _ids(rows, length, attention_mask=torch.ones(rows, length, dtype=torch.int64))

        dims = {0: AUTO, 1: AUTO}
        return model, inputs(2, 8), inputs(3, 11), {"input_ids": dims, "attention_mask": dims}

    return make


def _vision(name: str, config: str, **sizes: Any) -> Callable[[], Case]:
    def make() -> Case:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).eval()
        size = sizes.get("image_size", 32)

        def inputs(rows: int) -> dict[str, Any]:
            return {"pixel_values": torch.linspace(-1, 1, rows * 3 * size * size).reshape(rows, 3, size, size)}

        return model, inputs(2), inputs(3), {"pixel_values": {0: AUTO}}

    return make


def _t5() -> Case:
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, use_cache=False
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()

    def inputs(rows: int, length: int) -> dict[str, Any]:
        return _ids(rows, length) | {"decoder_input_ids": _ids(rows, length + 1)["input_ids"]}

    dims = {0: AUTO, 1: AUTO}
    return model, inputs(2, 8), inputs(3, 11), {"input_ids": dims, "decoder_input_ids": dims}


def _whisper() -> Case:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=16,
        max_target_positions=32, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        use_cache=False,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()

    def inputs(rows: int, length: int) -> dict[str, Any]:
        features = torch.linspace(-1, 1, rows * 8 * 32).reshape(rows, 8, 32)
        return {"input_features": features, "decoder_input_ids": _ids(rows, length)["input_ids"]}

    return model, inputs(2, 8), inputs(3, 11), {"input_features": {0: AUTO}, "decoder_input_ids": {0: AUTO, 1: AUTO}}


def _wav2vec2() -> Case:
    import transformers

    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config).eval()

    def inputs(rows: int) -> dict[str, Any]:
        return {"input_values": torch.linspace(-1, 1, rows * 400).reshape(rows, 400)}

    return model, inputs(2), inputs(3), {"input_values": {0: AUTO}}


def _cnn() -> Case:
    def inputs(rows: int) -> dict[str, Any]:
        return {"pixels": torch.linspace(-1, 1, rows * 3 * 16 * 16).reshape(rows, 3, 16, 16)}

    return Cnn().train(), inputs(2), inputs(5), {"pixels": {0: AUTO}}


def _unet() -> Case:
    def inputs(rows: int, height: int) -> dict[str, Any]:
        image = torch.linspace(-1, 1, rows * height * 16).reshape(rows, 1, height, 16)
        return {"image": image, "time": torch.linspace(0, 1, rows)}

    return UNet().eval(), inputs(2, 16), inputs(3, 24), {"image": {0: AUTO, 2: AUTO}, "time": {0: AUTO}}


ARCHITECTURES: dict[str, Callable[[], Case]] = {
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig"),
    "mistral": _decoder("MistralForCausalLM", "MistralConfig"),
    "qwen2": _decoder("Qwen2ForCausalLM", "Qwen2Config", tie_word_embeddings=True),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", head_dim=8),
    "gemma2": _decoder("Gemma2ForCausalLM", "Gemma2Config", head_dim=8),
    "phi3": _decoder("Phi3ForCausalLM", "Phi3Config", pad_token_id=0, bos_token_id=1, eos_token_id=2),
    "olmo2": _decoder("Olmo2ForCausalLM", "Olmo2Config"),
    "gpt2": _decoder("GPT2LMHeadModel", "GPT2Config", **_GPT2),
    "gpt2, eager attention": _decoder("GPT2LMHeadModel", "GPT2Config", attention="eager", **_GPT2),
    "mixtral": _decoder("MixtralForCausalLM", "MixtralConfig", "batched_mm", num_local_experts=4, num_hidden_layers=1),
    "qwen3-moe": _decoder(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        "batched_mm",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=8,
    ),
    "bert": _encoder("BertForMaskedLM", "BertConfig"),
    "roberta": _encoder("RobertaForMaskedLM", "RobertaConfig", max_position_embeddings=40),
    "distilbert": _encoder("DistilBertForMaskedLM", "DistilBertConfig", dim=32, n_layers=2, n_heads=4, hidden_dim=48),
    "electra": _encoder("ElectraModel", "ElectraConfig", embedding_size=16),
    "t5": _t5,
    "whisper": _whisper,
    "vit": _vision("ViTForImageClassification", "ViTConfig", patch_size=8, **_VISION),
    "clip-vision": _vision("CLIPVisionModel", "CLIPVisionConfig", patch_size=8, **_VISION),
    "convnext": _vision(
        "ConvNextForImageClassification", "ConvNextConfig", hidden_sizes=[8, 16], depths=[1, 1], num_stages=2
    ),
    "resnet": _vision(
        "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]
    ),
    "mobilenet-v2": _vision(
        "MobileNetV2ForImageClassification", "MobileNetV2Config", image_size=64, depth_multiplier=0.35
    ),
    "swin": _vision(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    "wav2vec2": _wav2vec2,
    "cnn": _cnn,
    "unet": _unet,
}

# Why torch cannot decompose a graph. Its way out is the architecture that follows.
NOT_DECOMPOSED = {
    "gpt2": "torch cannot: it calls view on fused attention",
}
