"""`--dequantize`: values against torch, every kind of scale, uneven blocks, several files, refusals by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import holdfast
from holdfast.convert.dequantize import as_float32, multiply_blocks
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.format.dtypes import dtype_named
from tests.convert.test_quantized import LLAMA, llama

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def folder_of(
    path: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any] | None, files: int = 1
) -> Path:
    """A model folder; its tensors are dealt to the files, so that scales are not beside their weights."""
    path.mkdir()
    names = [f"model-{n + 1:05}-of-{files:05}.safetensors" for n in range(files)]
    keys = sorted(tensors)
    for number, name in enumerate(names):
        save_file({key: tensors[key] for key in keys[number::files]}, path / name)
    index = {"metadata": {}, "weight_map": {key: names[at % files] for at, key in enumerate(keys)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    config: dict[str, Any] = {"model_type": "llama", "torch_dtype": "float16"}
    if quantization is not None:
        config["quantization_config"] = quantization
    (path / "config.json").write_text(json.dumps(config))
    return path


def expected(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The values, computed with torch in one go."""
    grid = scale.float().reshape(*scale.shape, *(1,) * (2 - scale.ndim)) if scale.ndim < 2 else scale.float()
    spread = grid.repeat_interleave(block[0], -2).repeat_interleave(block[1], -1)
    return (weight.float() * spread[..., : weight.shape[-2], : weight.shape[-1]]).to(dtype)


def fp8(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


CASES: list[tuple[str, torch.Tensor, torch.Tensor, tuple[int, int]]] = [
    ("_scale_inv", fp8(300, 200), torch.rand(3, 2), (128, 128)),
    ("_scale_inv", fp8(128, 4099), torch.rand(1, 33).bfloat16(), (128, 128)),
    ("_scale_inv", fp8(5000, 257), torch.rand(40, 3), (128, 128)),
    ("_scale_inv", fp8(3, 130, 129), torch.rand(3, 2, 2), (128, 128)),
    ("_scale_inv", fp8(256, 99), torch.tensor([[2.0], [0.5]]).to(torch.float8_e8m0fnu), (128, 128)),
    ("_scale", fp8(4097, 300), torch.rand(4097, 1), (1, 300)),
    ("_scale", fp8(300, 33), torch.rand(300, 1).bfloat16(), (1, 33)),
    ("_scale", fp8(7, 5, dtype=torch.float8_e5m2), torch.tensor(0.25), (7, 5)),
    ("_scale", fp8(300, 200), torch.tensor([3.0]), (300, 200)),
    ("_scale", torch.randint(-128, 128, (300, 200)).to(torch.int8), torch.rand(300, 1), (1, 200)),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
@pytest.mark.parametrize(("ending", "weight", "scale", "block"), CASES)
def test_the_values_are_numbers_times_scales_rounded_once(
    tmp_path: Path, ending: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: str
) -> None:
    tensors = {"a.weight": weight, f"a.weight{ending}": scale, "norm.weight": torch.ones(4)}
    source = folder_of(tmp_path / "a", tensors, FP8 if ending == "_scale_inv" else None, files=3)
    convert(source, tmp_path / "b", ConvertOptions(to="hf", dequantize=dtype, block_bytes=70_000))
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert found.keys() == {"a.weight", "norm.weight"}
    grid = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    assert torch.equal(found["a.weight"], expected(weight, grid, block, getattr(torch, dtype)))
    assert torch.equal(found["norm.weight"], torch.ones(4))
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config == {"model_type": "llama", "torch_dtype": dtype}


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "int8"])
@pytest.mark.parametrize("count", [256, 255])
def test_all_numbers_of_a_byte_are_exact(name: str, count: int) -> None:
    data = np.arange(count, dtype=np.uint8)
    found = torch.from_numpy(as_float32(data, dtype_named(name)))
    wanted = torch.from_numpy(data).view(getattr(torch, name)).float()
    assert torch.equal(found.nan_to_num(1234.0), wanted.nan_to_num(1234.0))


def test_a_single_column_of_blocks_and_a_smaller_last_block() -> None:
    values = np.ones((5, 3), np.float32)
    multiply_blocks(values, np.array([[2.0], [3.0], [5.0]], np.float32), (2, 4))
    assert values[:, 0].tolist() == [2.0, 2.0, 3.0, 3.0, 5.0]


def test_transformers_opens_the_result_with_the_values_that_it_computes_itself(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    (source / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": FP8, "torch_dtype": "bfloat16"}))
    (source / "generation_config.json").write_text('{"eos_token_id": 3}')
    convert(source, tmp_path / "b", ConvertOptions(to="hf", dequantize="bfloat16", max_shard_size="200KB"))
    loader: Any = AutoModelForCausalLM
    found, info = loader.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values())
    assert found.dtype is torch.bfloat16
    own = loader.from_pretrained(source, quantization_config=FineGrainedFP8Config(dequantize=True))
    for key, value in own.state_dict().items():
        assert torch.equal(value, found.state_dict()[key]), key
    assert (tmp_path / "b" / "generation_config.json").read_bytes() == b'{"eos_token_id": 3}'


def test_a_mapping_joins_what_was_dequantized(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    convert(source, tmp_path / "b", ConvertOptions(to="hf", dequantize="float32"))
    joined = ConvertOptions(to="hf", dequantize="float32", mapping=MappingOptions("fused"))
    convert(source, tmp_path / "c", joined)
    convert(tmp_path / "b", tmp_path / "d", ConvertOptions(to="hf", mapping=MappingOptions("fused")))
    assert (tmp_path / "c" / "model.safetensors").read_bytes() == (tmp_path / "d" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("form", ["holdfast", "dcp"])
def test_other_formats_are_written_too(tmp_path: Path, form: str) -> None:
    source = llama(tmp_path / "a")
    convert(source, tmp_path / "b", ConvertOptions(to="hf", dequantize="bfloat16"))
    convert(source, tmp_path / "c", ConvertOptions(to=form, dequantize="bfloat16"))
    opened = holdfast.open(tmp_path / "c")
    for key, value in load_file(tmp_path / "b" / "model.safetensors").items():
        assert np.array_equal(opened.read(key).astype(np.float32), value.float().numpy()), key


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'; Holdfast dequantizes fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "with the format 'pack-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "'modelopt' with 'NVFP4'"),
        ({"bits": 4}, "quant_method 'None'"),
    ],
)
def test_an_unknown_quantization_is_refused_by_name(tmp_path: Path, quantization: dict[str, Any], match: str) -> None:
    source = folder_of(tmp_path / "a", {"w": fp8(4, 4), "w_scale": torch.tensor(1.0)}, quantization)
    with pytest.raises(Unsupported, match=match):
        convert(source, tmp_path / "b", ConvertOptions(to="hf", dequantize="bfloat16"))
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"w_scale_inv": None}, Mismatch, "neither 'w_scale_inv' nor 'w_scale' is there"),
        ({"w_scale_inv": torch.rand(2, 3)}, Mismatch, r"has the shape \[2, 3\], which does not fit 'w'.*\[3, 2\]"),
        ({"w_scale_inv": torch.full((3, 2), torch.nan)}, Mismatch, "scales that are not finite"),
        ({"w": None}, Mismatch, "no quantized weight to which it belongs"),
        ({"w": torch.rand(300, 200)}, Mismatch, "'w_scale_inv' is there, but no quantized weight"),
        ({"w": torch.rand(300, 200), "w_scale_inv": None}, NotFound, "no weight is quantized"),
        ({"w_scale_inv": torch.full((3, 2), 1e9)}, Mismatch, "beyond the range of float16"),
    ],
)
def test_scales_that_do_not_fit_are_one_clear_error(
    tmp_path: Path, change: dict[str, torch.Tensor | None], error: type[Exception], match: str
) -> None:
    every = {"w": fp8(300, 200), "w_scale_inv": torch.rand(3, 2), "n": torch.ones(1)} | change
    source = folder_of(tmp_path / "a", {key: value for key, value in every.items() if value is not None}, FP8)
    with pytest.raises(error, match=match):
        convert(source, tmp_path / "b", ConvertOptions(to="hf", dequantize="float16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_options_that_contradict_are_refused(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    with pytest.raises(InvalidArgument, match="--dequantize and --dtype exclude each other"):
        convert(source, tmp_path / "b", ConvertOptions(dequantize="bfloat16", dtype="float32"))
    with pytest.raises(InvalidArgument, match="--dequantize int8"):
        convert(source, tmp_path / "b", ConvertOptions(dequantize="int8"))


def test_damage_in_a_scale_is_found_although_only_the_product_is_written(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    convert(source, tmp_path / "b", ConvertOptions(block_bytes=1000))
    file = next((tmp_path / "b").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    place = next(p for p in holdfast.open(tmp_path / "b").stored_file(file.name).places if "scale" in p.spec.key)
    data[place.begin] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match="the digest of the block"):
        convert(tmp_path / "b", tmp_path / "c", ConvertOptions(to="hf", dequantize="bfloat16"))
    assert not (tmp_path / "c").exists()


PEAK = """
import resource, sys
from holdfast.convert.run import ConvertOptions, convert
from holdfast.convert.quantize import QuantizeOptions
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
convert(sys.argv[1], sys.argv[2], ConvertOptions(to="hf", dequantize="bfloat16"))
convert(sys.argv[2], sys.argv[3], ConvertOptions(to="hf", quantize=QuantizeOptions()))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.full
def test_the_peak_is_that_of_the_chunks(tmp_path: Path) -> None:
    """A weight of 512 MB, and of 1 GB in bfloat16."""
    rows, columns = 1 << 16, 1 << 13
    weight = torch.randint(0, 120, (rows, columns), dtype=torch.uint8).view(torch.float8_e4m3fn)
    source = folder_of(tmp_path / "a", {"w.weight": weight, "w.weight_scale_inv": torch.rand(512, 64)}, FP8)
    arguments = [str(source), str(tmp_path / "b"), str(tmp_path / "c")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) * 1024 < 320 << 20, f"{int(done.stdout) >> 10} MiB"
