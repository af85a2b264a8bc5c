"""`holdfast show` and `holdfast convert` with quantized weights, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from holdfast.cli.main import cli
from tests.convert.test_quantized import llama


def output(*arguments: str | Path) -> str:
    done = CliRunner().invoke(cli, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


def test_block_scales_are_shown_with_their_weights(tmp_path: Path) -> None:
    source = llama(tmp_path / "a")
    text = output("show", source)
    assert "quantized: 7 weights, float8_e4m3fn times a float32 scale per block of 128x128\n" in text
    assert "weight  float8_e4m3fn[256, 128]  32.77 kB  times a float32 scale per block of 128x128\n" in text
    shown = json.loads(output("show", source, "--json"))["groups"]["model"]["tensors"]
    key = "model.layers.0.mlp.down_proj.weight"
    assert shown[key]["scales"] == {"key": f"{key}_scale_inv", "per": "block", "block": [128, 128]}
    assert "scales" not in shown["lm_head.weight"]


def test_missing_scales_and_other_kinds_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    save_file(
        {f"{n}.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn) for n in range(4)},
        tmp_path / "a" / "model.safetensors",
    )
    (tmp_path / "a" / "config.json").write_text('{"quantization_config": {"quant_method": "odd"}}')
    text = output("show", tmp_path / "a")
    assert "quantized: '0.weight' is float8_e4m3fn, but neither '0.weight_scale_inv' nor" in text
    assert "quantized: 1 more like these\n" in text
    assert "quantized: config.json says odd\n" in text


def test_the_options_of_convert(tmp_path: Path) -> None:
    source, plain, fp8 = llama(tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    dequantize = ("convert", source, plain, "--to", "hf", "--dequantize", "bfloat16")
    assert "bfloat16 x12\n" in output(*dequantize, "--dry-run")
    output(*dequantize)
    output("convert", plain, fp8, "--to", "hf", "--quantize", "fp8-block128", "--unquantized", "*down*")
    found = load_file(fp8 / "model.safetensors")
    assert sum(value.dtype == torch.float8_e4m3fn for value in found.values()) == 6
    refused = CliRunner().invoke(cli, ["convert", str(source), str(tmp_path / "d"), "--unquantized", "x"])
    assert "--unquantized needs --quantize" in str(refused.exception)
