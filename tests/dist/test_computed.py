"""Adapters merged and weights quantized by ranks: the bytes of one process."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.adapters.comm import current_ranks
from holdfast.convert.quantize import QuantizeOptions
from holdfast.convert.run import ConvertOptions, convert
from tests.dist.harness import run_ranks

WORLD = 4
LINEAR = {f"model.layers.{n}.mlp.{name}": (160, 200) for n in range(2) for name in ("up_proj", "gate_proj")}
SHAPES = {**LINEAR, "model.embed_tokens": (90, 200)}
SMALL: dict[str, Any] = {"to": "hf", "block_bytes": 8192, "max_shard_size": 60_000}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{key}.weight": torch.randn(*shape, generator=generator).bfloat16() for key, shape in SHAPES.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapter")
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for key, (rows, columns) in SHAPES.items():
        prefix = f"base_model.model.{key}"
        first, second = (
            ("lora_A.weight", "lora_B.weight") if key in LINEAR else ("lora_embedding_A", "lora_embedding_B")
        )
        sizes = (columns, rows) if key in LINEAR else (rows, columns)
        tensors[f"{prefix}.{first}"] = torch.randn(8, sizes[0], generator=generator)
        tensors[f"{prefix}.{second}"] = torch.randn(sizes[1], 8, generator=generator)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "lora_alpha": 4}))
    return folder


def folder_bytes(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def merge_on_rank(base, adapter, out):
    from holdfast.merging.lora import merge_adapters

    merge_adapters.BLOCK_BYTES = 8192
    return holdfast.merge_lora([adapter, adapter], out, base=base, weights=[1.0, 0.3], max_shard_size=60_000).files


def test_ranks_merge_adapters_to_the_bytes_of_one_process(base, adapter, tmp_path):
    holdfast.merge_lora([adapter, adapter], tmp_path / "one", base=base, weights=[1.0, 0.3], max_shard_size=60_000)
    files = run_ranks(WORLD, merge_on_rank, base, adapter, tmp_path / "four")
    assert len(set(files)) == 1 and files[0] > 4
    assert folder_bytes(tmp_path / "four") == folder_bytes(tmp_path / "one")


@pytest.mark.full
def test_torchrun_merges_adapters(base, adapter, tmp_path):
    arguments = ["merge", base, "--lora", adapter, "--max-shard-size", "60kB"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    for name, launch in (("one", []), ("four", launcher)):
        done = subprocess.run(
            [sys.executable, *launch, "-m", "holdfast", *map(str, arguments), tmp_path / name],
            check=False, capture_output=True, text=True, timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("wrote ") == 1
    assert folder_bytes(tmp_path / "four") == folder_bytes(tmp_path / "one")


def convert_on_rank(source, out, options):
    return convert(source, out, options, current_ranks(60.0)).files


@pytest.mark.full
def test_ranks_quantize_and_dequantize_to_the_bytes_of_one_process(base, tmp_path):
    quantize = ConvertOptions(quantize=QuantizeOptions(), **SMALL)
    convert(base, tmp_path / "fp8", quantize)
    run_ranks(WORLD, convert_on_rank, base, tmp_path / "fp8-of-ranks", quantize)
    found = folder_bytes(tmp_path / "fp8")
    assert any(name.startswith("model-00004") for name in found)
    assert folder_bytes(tmp_path / "fp8-of-ranks") == found
    dequantize = ConvertOptions(dequantize="bfloat16", **SMALL)
    convert(tmp_path / "fp8", tmp_path / "plain", dequantize)
    run_ranks(WORLD, convert_on_rank, tmp_path / "fp8", tmp_path / "plain-of-ranks", dequantize)
    assert folder_bytes(tmp_path / "plain-of-ranks") == folder_bytes(tmp_path / "plain")
