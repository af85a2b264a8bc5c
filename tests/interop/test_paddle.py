"""With the real Paddle: it reads what Holdfast wrote, Holdfast reads what it wrote, bit for bit. `make interop`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from tests.sources.paddle.folders import check_truth

HERE = Path(__file__).parent
PYTHON = os.environ.get("HOLDFAST_PADDLE_PYTHON", "")
DEADLINE_S = 150
BETAS = (0.9, 0.95)
STEPS = 3


def missing_paddle() -> str | None:
    """Why Paddle cannot be run, if it cannot."""
    if not PYTHON:
        return "needs paddlepaddle in an environment of its own: make interop"
    if not list(Path(PYTHON).parent.parent.glob("lib/python*/site-packages/paddle/__init__.py")):
        return f"{PYTHON}: this paddlepaddle has no wheel for this platform; its AOA engine alone is tested"
    return None


pytestmark = pytest.mark.skipif(missing_paddle() is not None, reason=missing_paddle() or "")


def run_paddle(folder: Path, *arguments: str) -> None:
    """Run Python with Paddle in it; what it printed is shown if it fails."""
    others = ("PYTHONPATH", "VIRTUAL_ENV", "CUDA_VISIBLE_DEVICES")
    environment = {name: value for name, value in os.environ.items() if name not in others}
    command = [os.path.abspath(PYTHON), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    logs = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log/workerlog.*")))
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{logs[-3000:]}"


@pytest.fixture(scope="module")
def flex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `paddle.distributed.save_state_dict` wrote from two gloo ranks."""
    folder = tmp_path_factory.mktemp("flex")
    launch = ("-m", "paddle.distributed.launch", "--nproc_per_node", "2", "--log_dir", "log")
    run_paddle(folder, *launch, str(HERE / "flex_writer.py"), str(folder / "flex_two_ranks"))
    return folder


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("params")
    run_paddle(folder, str(HERE / "params_writer.py"), str(folder))
    return folder


@pytest.mark.parametrize("name", ["flex_two_ranks", "flex_two_ranks_safetensors"])
def test_holdfast_reads_what_two_ranks_of_paddle_saved(flex: Path, name: str) -> None:
    assert len(list((flex / name).glob("*.distcp"))) == 2
    assert check_truth(flex / name, flex / "truth_flex_two_ranks.npz") == 9


@pytest.mark.parametrize(("name", "count"), [("fp32", 25), ("bf16", 30)])
def test_holdfast_reads_what_paddle_save_wrote(params: Path, name: str, count: int) -> None:
    assert check_truth(params / f"params_{name}", params / f"truth_params_{name}.npz") == count


def test_holdfast_reads_what_jit_save_exported(tmp_path: Path) -> None:
    run_paddle(tmp_path, str(HERE / "inference_writer.py"), str(tmp_path))
    truth, checkpoint = np.load(tmp_path / "truth.npz"), holdfast.open(tmp_path / "net")
    assert set(checkpoint.keys("model")) == set(truth)
    assert all(checkpoint.read(key).tobytes() == truth[key].tobytes() for key in truth)


def trained_llama() -> dict[str, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=BETAS)
    for step in range(STEPS):
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def truth_of(state: dict[str, Any], narrow: bool) -> dict[str, np.ndarray[Any, Any]]:
    """What Paddle must hold: its layers are [in, out], and it keeps powers of betas for a step."""

    def turned(key: str, tensor: torch.Tensor) -> np.ndarray[Any, Any]:
        return (tensor.T if key.endswith("_proj.weight") else tensor).detach().float().contiguous().numpy()

    out = {}
    powers = [np.multiply.accumulate(np.full(STEPS + 1, beta, np.float32))[-1:] for beta in BETAS]
    for key, parameter in state["model"].named_parameters():
        out[f"model::{key}"] = turned(key, parameter.bfloat16() if narrow else parameter)
        if narrow:
            out[f"master_weights::{key}"] = turned(key, parameter)
        own = state["optimizer"].state[parameter]
        out[f"optimizer::{key}/moment1_0"] = turned(key, own["exp_avg"])
        out[f"optimizer::{key}/moment2_0"] = turned(key, own["exp_avg_sq"])
        out |= {f"optimizer::{key}/beta{n}_pow_acc_0": power for n, power in enumerate(powers, 1)}
    return out


@pytest.mark.parametrize("narrow", [False, True])
def test_paddle_resumes_from_what_holdfast_wrote(tmp_path: Path, narrow: bool) -> None:
    state = trained_llama()
    holdfast.save(tmp_path / "holdfast", state, step=STEPS, model_dtype="bfloat16" if narrow else None)
    convert(tmp_path / "holdfast", tmp_path / "paddle", ConvertOptions(to="paddle", max_shard_size="40KB"))
    run_paddle(tmp_path, str(HERE / "unified_reader.py"), str(tmp_path / "paddle"), str(tmp_path / "found.npz"))
    found, expected = np.load(tmp_path / "found.npz"), truth_of(state, narrow)
    assert set(found) == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].tobytes() == value.tobytes(), name
