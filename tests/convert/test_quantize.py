"""`--quantize fp8-block128`: numbers against torch, and the ways there and back that return the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

import holdfast
from holdfast.convert.quantize import QuantizeOptions, block_scales, quantized
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound, Unsupported
from tests.convert.test_quantized import llama
from tests.merging import models


def weights(path: Path, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def options(**given: object) -> ConvertOptions:
    return ConvertOptions(to="hf", quantize=QuantizeOptions(unquantized=given.pop("unquantized", ())), **given)  # type: ignore[arg-type]


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def there_and_back(tmp_path: Path, source: Path, dtype: str) -> tuple[Path, Path]:
    """Quantize, dequantize, quantize. Returns both quantized folders."""
    convert(source, tmp_path / "once", options())
    convert(tmp_path / "once", tmp_path / "plain", ConvertOptions(to="hf", dequantize=dtype))
    convert(tmp_path / "plain", tmp_path / "twice", options())
    return tmp_path / "once", tmp_path / "twice"


def test_every_block_is_divided_by_its_largest_magnitude(tmp_path: Path) -> None:
    torch.manual_seed(0)
    value = torch.randn(300, 200)
    value[256:, 128:] = 0  # a block of zeros
    value[:128, :128] *= 1e-35
    convert(weights(tmp_path / "a", **{"a.weight": value}), tmp_path / "b", options(block_bytes=9000))
    found = load_file(tmp_path / "b" / "model.safetensors")
    scales, numbers = found["a.weight_scale_inv"], found["a.weight"]
    assert (scales.dtype, numbers.dtype) == (torch.float32, torch.float8_e4m3fn)
    for row in range(3):
        for column in range(2):
            block = (slice(row * 128, (row + 1) * 128), slice(column * 128, (column + 1) * 128))
            largest = value[block].abs().max()
            scale = largest / 448 if largest >= 2.0**-100 else torch.tensor(1.0)
            assert scales[row, column] == scale
            assert torch.equal(numbers[block].float(), (value[block] / scale).to(torch.float8_e4m3fn).float())
    assert scales[2, 1] == 1
    assert scales[0, 0] == 1
    assert not numbers[:128, :128].float().any()


@pytest.mark.parametrize("seed", range(3))
def test_bfloat16_weights_come_back_bit_for_bit(tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    value = torch.randn(1000, 700) * torch.exp(torch.randn(1000, 1) * 4)
    value[torch.rand(1000, 700) < 0.5] = 0
    source = weights(tmp_path / "a", **{"a.weight": value.bfloat16(), "norm.weight": torch.ones(3)})
    once, twice = there_and_back(tmp_path, source, "bfloat16")
    assert folder_bytes(once) == folder_bytes(twice)


def test_weights_of_float32_come_back_with_the_same_numbers(tmp_path: Path) -> None:
    """Their scales are rounded on the way, so only the numbers are exact."""
    torch.manual_seed(0)
    source = weights(tmp_path / "a", **{"a.weight": torch.randn(1000, 700)})
    once, twice = there_and_back(tmp_path, source, "bfloat16")
    before, after = (load_file(folder / "model.safetensors") for folder in (once, twice))
    assert torch.equal(before["a.weight"].view(torch.uint8), after["a.weight"].view(torch.uint8))
    assert torch.allclose(before["a.weight_scale_inv"], after["a.weight_scale_inv"], rtol=2**-8)
    assert not torch.equal(before["a.weight_scale_inv"], after["a.weight_scale_inv"])


def test_transformers_opens_the_result_and_computes_nearly_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    model = LlamaForCausalLM(LlamaConfig(hidden_size=128, intermediate_size=256, **shape)).eval()
    model.save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", options(max_shard_size="200KB"))
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config.pop("quantization_config") == {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    assert config == json.loads((tmp_path / "a" / "config.json").read_text())
    loader: Any = AutoModelForCausalLM
    opened, info = loader.from_pretrained(
        tmp_path / "b", output_loading_info=True, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    assert not any(info.values())
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        difference = opened(tokens).logits.float() - model(tokens).logits
    assert difference.abs().max() < 0.2 * model(tokens).logits.abs().max()


@pytest.mark.full
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_three_architectures_there_and_back(tmp_path: Path, family: str, tied: bool, max_shard_size: str) -> None:
    base = models.write(tmp_path / "base", family, tied=tied, max_shard_size=max_shard_size)
    once, twice = there_and_back(tmp_path, base, "bfloat16")
    assert folder_bytes(once) == folder_bytes(twice)
    before, plain, fp8 = models.tensors(base), models.tensors(tmp_path / "plain"), models.tensors(once)
    assert before.keys() == plain.keys()
    scaled = {key.removesuffix("_scale_inv") for key in fp8 if key.endswith("_scale_inv")}
    assert len(scaled) >= 3 * (4 if family == "gpt2" else 7)
    for key, value in before.items():
        if key not in scaled:
            assert torch.equal(plain[key], value), key
            continue
        # A scale for each block of 128x128: the sizes of these models are smaller.
        scales = fp8[f"{key}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        wanted = fp8[key].float() * scales[: value.shape[0], : value.shape[1]]
        assert torch.equal(plain[key], wanted.bfloat16()), key
        assert (plain[key].float() - value.float()).abs().max() <= value.float().abs().max() / 16
    loader: Any = AutoModelForCausalLM
    _, info = loader.from_pretrained(tmp_path / "plain", dtype="auto", output_loading_info=True)
    assert not any(info.values()), info
    for name in ("generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "plain" / name).read_bytes() == (base / name).read_bytes()


def test_embeddings_heads_norms_routers_and_patterns_stay(tmp_path: Path) -> None:
    names = [
        "model.embed_tokens",
        "lm_head",
        "l.0.mlp.gate",
        "l.0.mlp.gate_proj",
        "l.0.q_norm",
        "l.0.o_proj",
        "l.0.kept",
    ]
    tensors = {f"{name}.weight": torch.ones(4, 4) for name in names} | {"l.0.experts": torch.ones(2, 4, 4)}
    convert(weights(tmp_path / "a", **tensors), tmp_path / "b", options(unquantized=("*kept*",)))
    found = load_file(tmp_path / "b" / "model.safetensors")
    fp8 = {key for key, value in found.items() if value.dtype == torch.float8_e4m3fn}
    assert fp8 == {"l.0.mlp.gate_proj.weight", "l.0.o_proj.weight"}
    assert found.keys() == tensors.keys() | {f"{key}_scale_inv" for key in fp8}
    stated = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert stated["modules_to_not_convert"] == ["l.0.kept", "l.0.mlp.gate", "l.0.q_norm", "lm_head"]


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="is quantized already"):
        convert(llama(tmp_path / "fp8"), tmp_path / "b", options())
    plain = weights(tmp_path / "a", **{"a.weight": torch.tensor([[1.0, torch.nan]])})
    with pytest.raises(Mismatch, match=r"'a\.weight' has NaN or infinite values in the rows 0 to 1"):
        convert(plain, tmp_path / "b", options())
    with pytest.raises(InvalidArgument, match=r"--unquantized 'x' matches no weight"):
        convert(plain, tmp_path / "b", options(unquantized=("x",)))
    with pytest.raises(InvalidArgument, match="--quantize int3: choose fp8-block128"):
        convert(plain, tmp_path / "b", ConvertOptions(to="hf", quantize=QuantizeOptions("int3")))
    with pytest.raises(InvalidArgument, match="writes the formats hf and holdfast"):
        convert(plain, tmp_path / "b", ConvertOptions(to="dcp", quantize=QuantizeOptions()))
    with pytest.raises(NotFound, match="no weight of a linear layer"):
        convert(weights(tmp_path / "n", n=torch.ones(1)), tmp_path / "b", options())
    assert not (tmp_path / "b").exists()


def test_a_state_with_an_optimizer_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    with pytest.raises(Unsupported, match=r"writes weights only, but optimizer is there too.*--only"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(quantize=QuantizeOptions()))


def test_the_scale_of_a_last_block_sees_no_padding() -> None:
    values = -torch.arange(1.0, 131.0)[None].repeat(129, 1)
    assert torch.equal(block_scales(values) * 448, torch.tensor([[128.0, 130.0], [128.0, 130.0]]))


def test_layers_inside_an_embedding_and_shared_layers_are_stated_as_unquantized(tmp_path: Path) -> None:
    shared = torch.nn.Linear(4, 4, bias=False)
    model = torch.nn.ModuleDict({"patch_embed": torch.nn.ModuleDict({"proj": torch.nn.Linear(4, 4, bias=False)})})
    model.update({"first": shared, "second": shared, "plain": torch.nn.Linear(4, 4, bias=False)})
    model["embed_tokens"] = torch.nn.Embedding(4, 4)
    holdfast.save(tmp_path / "a", {"model": model})
    source = holdfast.open(tmp_path / "a")
    files = {"config.json": b"{}"}
    found = quantized(source, files, QuantizeOptions(unquantized=("*patch_embed*",)))
    stated = json.loads(found.files["config.json"])["quantization_config"]
    assert stated["modules_to_not_convert"] == ["first", "lm_head", "patch_embed.proj", "second"]


CONFIGS: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4},
    "bart": {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
    "whisper": {
        **{"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    },
    "bert": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
    "roberta": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 1, "n_heads": 4},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", CONFIGS)
def test_transformers_quantizes_the_same_modules(tmp_path: Path, model_type: str) -> None:
    """A module that only one side quantizes would compute with fp8 numbers without scales, or with scales of none."""
    from transformers import (
        MODEL_FOR_MASKED_LM_MAPPING,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
        AutoConfig,
    )
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    sizes = {"vocab_size": 96, "max_position_embeddings": 32, "max_source_positions": 32, "max_target_positions": 32}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = AutoConfig.for_model(model_type, **sizes, **tokens, **CONFIGS[model_type])
    kinds = (MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING)
    kind = next(mapping[type(config)] for mapping in kinds if type(config) in mapping)
    kind(config).save_pretrained(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", options())
    stated = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    with torch.device("meta"):
        model = kind(config)
    made = replace_with_fp8_linear(model, stated, FineGrainedFP8Config(modules_to_not_convert=stated), True)
    expected = {name for name, module in made.named_modules() if type(module).__name__ == "FP8Linear"}
    scales = [key for key in load_file(tmp_path / "b" / "model.safetensors") if key.endswith("_scale_inv")]
    assert expected
    assert {key.removesuffix(".weight_scale_inv") for key in scales} == expected


def test_transposed_layers_are_noted(tmp_path: Path) -> None:
    base = models.write(tmp_path / "base", "gpt2")
    assert any("Conv1D" in note for note in convert(base, tmp_path / "b", options()).notes)
    plain = models.write(tmp_path / "llama", "llama")
    assert not any("Conv1D" in note for note in convert(plain, tmp_path / "c", options()).notes)
