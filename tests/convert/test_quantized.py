"""Quantized weights: copied and renamed with their scales, never joined, cut, turned or cast without them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Mismatch, Unsupported

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 128, "intermediate_size": 256,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 8,
}  # fmt: skip
PROJECTIONS = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


def fp8(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns).to(torch.float8_e4m3fn)


def llama(folder: Path, scale: str = "weight_scale_inv") -> Path:
    """A Llama as DeepSeek quantizes: fp8 weights with a scale for each block of 128 by 128."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": torch.randn(8, 128).bfloat16(), "lm_head.weight": torch.randn(8, 128).bfloat16(),
        "model.norm.weight": torch.ones(128).bfloat16(),
    }  # fmt: skip
    for part, names in PROJECTIONS.items():
        for name in names:
            rows = 256 if name in ("gate_proj", "up_proj") else 128
            columns = 256 if name == "down_proj" else 128
            tensors[f"model.layers.0.{part}.{name}.weight"] = fp8(rows, columns)
            tensors[f"model.layers.0.{part}.{name}.{scale}"] = torch.rand(rows // 128, columns // 128)
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"model.layers.0.{name}.weight"] = torch.ones(128).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("name", ["fused", "fused-grouped", "megatron", "megatron-local", "megatron-dist", "paddle"])
def test_a_mapping_that_changes_fp8_weights_and_not_their_scales_is_refused(
    tmp_path: Path, name: str, scale: str
) -> None:
    source = llama(tmp_path / "a", scale)
    with pytest.raises(
        Unsupported, match=rf"_proj\.weight' is float8_e4m3fn, quantized, stored with '.*{scale}'.*scales"
    ):
        convert(source, tmp_path / "b", ConvertOptions(to="hf", mapping=MappingOptions(name)))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_dtype_for_fp8_weights_is_refused(tmp_path: Path, dtype: str) -> None:
    source = llama(tmp_path / "a")
    with pytest.raises(Unsupported, match=rf"--dtype {dtype}.*is float8_e4m3fn, quantized.*dequantize"):
        convert(source, tmp_path / "b", ConvertOptions(to="hf", dtype=dtype))
    save_file({"w": fp8(2, 2)}, tmp_path / "c.safetensors")
    with pytest.raises(Unsupported, match="'w' is float8_e4m3fn"):
        convert(tmp_path / "c.safetensors", tmp_path / "b", ConvertOptions(to="hf", dtype=dtype))


def same(a: Path, b: Path, names: dict[str, str] | None = None) -> None:
    before, after = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    renamed = {(names or {}).get(key, key): tensor for key, tensor in before.items()}
    assert renamed.keys() == after.keys()
    for key, tensor in renamed.items():
        assert torch.equal(tensor[None].view(torch.uint8), after[key][None].view(torch.uint8)), key


def test_a_copy_and_a_rename_with_the_scales_are_allowed(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    convert(source, tmp_path / "b", ConvertOptions(to="hf"))
    same(source, tmp_path / "b")
    both = ["model.layers.$N.mlp.up_proj.weight -> l.$N.up.weight",
            "model.layers.$N.mlp.up_proj.weight_scale_inv -> l.$N.up.weight_scale_inv"]  # fmt: skip
    convert(source, tmp_path / "c", ConvertOptions(to="hf", mapping=MappingOptions(both)))
    names = {f"model.layers.0.mlp.up_proj.{end}": f"l.0.up.{end}" for end in ("weight", "weight_scale_inv")}
    same(source, tmp_path / "c", names)
    others = ["model.norm.weight -> norm.weight"]
    convert(source, tmp_path / "d", ConvertOptions(to="hf", mapping=MappingOptions(others)))
    same(source, tmp_path / "d", {"model.norm.weight": "norm.weight"})


UP, SCALE = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight_scale_inv"
DOWN, DOWN_SCALE = "model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.down_proj.weight_scale_inv"


@pytest.mark.parametrize(
    "statements",
    [
        [f"{UP} -> up.weight"],  # the scale keeps its old name
        [f"{UP} -> up.weight", f"{SCALE} -> other.weight_scale_inv"],
        [f"{UP}^T -> {UP}"],
        [f"{UP}^T -> {UP}", f"{SCALE} -> {SCALE}"],
        [f"{UP} -> {UP}", f"{SCALE}^T -> {SCALE}"],
        [f"{UP} -> a.weight, b.weight, axis=0"],
        [f"{UP} -> _"],
        [f"{SCALE} -> _"],
        [f"{UP} -> {UP}, dtype='bfloat16'"],
        [f"{UP} -> t", f"{DOWN} -> {UP}", f"t -> {DOWN}"],  # exchanged without their scales
    ],
)
def test_programs_that_part_a_weight_from_its_scale_are_refused(tmp_path: Path, statements: list[str]) -> None:
    source = llama(tmp_path / "a")
    with pytest.raises(Unsupported, match="quantized"):
        convert(source, tmp_path / "b", ConvertOptions(mapping=MappingOptions(statements)))


def test_scales_that_go_with_their_weights_block_for_block_are_allowed(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    gate, gate_scale = UP.replace("up_proj", "gate_proj"), SCALE.replace("up_proj", "gate_proj")
    joined = [f"{gate}, {UP} -> g.weight, axis=0", f"{gate_scale}, {SCALE} -> g.weight_scale_inv, axis=0",
              f"{DOWN}^T -> d.weight", f"{DOWN_SCALE}^T -> d.weight_scale_inv"]  # fmt: skip
    convert(source, tmp_path / "b", ConvertOptions(to="hf", mapping=MappingOptions(joined)))
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "b" / "model.safetensors")

    def values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return weight.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)

    expected = torch.cat([values(before[gate], before[gate_scale]), values(before[UP], before[SCALE])])
    assert torch.equal(values(after["g.weight"], after["g.weight_scale_inv"]), expected)
    assert torch.equal(
        values(after["d.weight"], after["d.weight_scale_inv"]), values(before[DOWN], before[DOWN_SCALE]).T
    )


def test_blocks_that_do_not_end_with_a_part_are_refused(tmp_path: Path) -> None:
    tensors = {f"{n}.weight": fp8(96, 128) for n in "ab"} | {f"{n}.weight_scale_inv": torch.rand(1, 1) for n in "ab"}
    save_file(tensors, tmp_path / "m.safetensors")
    joined = [
        "a.weight, b.weight -> c.weight, axis=0",
        "a.weight_scale_inv, b.weight_scale_inv -> c.weight_scale_inv, axis=0",
    ]
    with pytest.raises(Unsupported, match="quantized"):
        convert(tmp_path / "m.safetensors", tmp_path / "b", ConvertOptions(mapping=MappingOptions(joined)))


PACKED: dict[str, dict[str, torch.Tensor]] = {
    "gptq": {"l.qweight": torch.ones(4, 8, dtype=torch.int32), "l.qzeros": torch.ones(1, 1, dtype=torch.int32),
             "l.scales": torch.ones(1, 8).half(), "l.g_idx": torch.ones(8, dtype=torch.int32)},
    "compressed-tensors": {"l.weight_packed": torch.ones(4, 8, dtype=torch.int32), "l.weight_scale": torch.ones(4, 1),
                           "l.weight_shape": torch.ones(2, dtype=torch.int64)},
    "bitsandbytes": {"l.weight": torch.ones(16, 1, dtype=torch.uint8), "l.weight.absmax": torch.ones(1),
                     "l.weight.quant_map": torch.ones(16),
                     "l.weight.quant_state.bitsandbytes__nf4": torch.ones(4, dtype=torch.uint8)},
    "int8": {"l.weight": torch.ones(4, 4, dtype=torch.int8), "l.SCB": torch.ones(4)},
    "mxfp4": {"e.down_proj_blocks": torch.ones(2, 4, 2, 16).byte(), "e.down_proj_scales": torch.ones(2, 4, 2).byte()},
    "modelopt": {"l.weight": fp8(4, 4), "l.weight_scale": torch.ones(()), "l.input_scale": torch.ones(())},
}  # fmt: skip


@pytest.mark.parametrize("kind", PACKED)
def test_packed_weights_are_copied_and_nothing_else(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a").mkdir()
    tensors = PACKED[kind] | {"norm.weight": torch.ones(4)}
    save_file(tensors, tmp_path / "a" / "model.safetensors")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    same(tmp_path / "a", tmp_path / "b")
    with pytest.raises(Unsupported, match="quantized"):
        convert(tmp_path / "a", tmp_path / "c", ConvertOptions(to="hf", dtype="bfloat16"))
    weight = next(iter(PACKED[kind]))
    for statement in (
        f"{weight} -> other.weight",
        f"{weight} -> x, y, axis=0",
        f"{weight}, {weight} -> {weight}, axis=0",
    ):
        with pytest.raises(Unsupported, match="quantized"):
            convert(tmp_path / "a", tmp_path / "c", ConvertOptions(mapping=MappingOptions([statement])))


def test_patterns_do_not_leave_a_weight_without_its_scale(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    with pytest.raises(Unsupported, match=r"the patterns exclude .*weight_scale_inv' but keep the weight"):
        convert(source, tmp_path / "b", ConvertOptions(to="hf", remove=("*_scale_inv",)))


@pytest.mark.parametrize("strict", [True, False])
def test_a_load_does_not_cast_quantized_weights(tmp_path: Path, strict: bool) -> None:
    tensors: dict[str, Any] = {"weight": fp8(4, 4), "bias": torch.ones(4), "weight_scale_inv": torch.full((1, 1), 0.5)}
    save_file(tensors, tmp_path / "m.safetensors")
    model = torch.nn.Linear(4, 4, dtype=torch.float32)
    before = model.weight.detach().clone()
    if strict:
        with pytest.raises(Mismatch, match="would ignore its scales"):
            holdfast.load(tmp_path / "m.safetensors", {"model": model}, cast=True)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            report = holdfast.load(tmp_path / "m.safetensors", {"model": model}, cast=True, strict=False)
        assert any("would ignore its scales" in text for text in report.mismatched)
    assert torch.equal(model.weight, before)


def test_a_load_of_fp8_into_fp8_is_what_it_was(tmp_path: Path) -> None:
    save_file({"weight": fp8(4, 4), "weight_scale_inv": torch.ones(1, 1)}, tmp_path / "m.safetensors")
    state = {"model": {"weight": fp8(4, 4), "weight_scale_inv": torch.zeros(1, 1)}}
    holdfast.load(tmp_path / "m.safetensors", state)
    stored = load_file(tmp_path / "m.safetensors")
    assert torch.equal(state["model"]["weight"].view(torch.uint8), stored["weight"].view(torch.uint8))


def test_a_load_through_a_mapping_that_joins_fp8_is_refused(tmp_path: Path) -> None:
    tensors = {f"{n}.weight": fp8(128, 128) for n in "ab"} | {f"{n}.weight_scale_inv": torch.rand(1, 1) for n in "ab"}
    save_file(tensors, tmp_path / "m.safetensors")
    state = {"model": {"c.weight": fp8(256, 128)}}
    with pytest.raises(Unsupported, match="quantized"):
        holdfast.load(tmp_path / "m.safetensors", state, mapping=["a.weight, b.weight -> c.weight, axis=0"])


def test_whole_numbers_beside_scales_of_plain_weights_are_no_quantized_weights(tmp_path: Path) -> None:
    tensors = {"a.weight": torch.randn(4, 4), "a.weight_scale": torch.ones(4), "ids": torch.arange(3)}
    save_file(tensors, tmp_path / "m.safetensors")
    convert(tmp_path / "m.safetensors", tmp_path / "b", ConvertOptions(dtype="bfloat16"))
    assert np.array_equal(holdfast.open(tmp_path / "b").read("ids"), np.arange(3))
