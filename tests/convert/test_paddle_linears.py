"""Folders of Paddle become what transformers opens: every linear weight [out, in], square ones too, or an error."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.convert.sinks.paddle import is_linear
from holdfast.core.errors import Unsupported
from tests.cli.calls import call
from tests.sources.paddle.folders import GOLDEN, random_matrix, states_of, write_group

Arrays = dict[str, np.ndarray[Any, Any]]
COMMON = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 8},
    "qwen3_moe": {**EXPERTS, "head_dim": 8}, "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "deepseek_v3": {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
                    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
                    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "num_key_value_heads": 4},
}  # fmt: skip


def hub_model(kind: str, folder: Path, **more: Any) -> tuple[Any, Arrays]:
    """A model of transformers, and its tensors as the hub has them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **KINDS[kind], **more})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def as_paddle_has_it(weights: Arrays, head: bool = False) -> Arrays:
    def turned(key: str) -> bool:
        mixtral = ".experts." in key and key.endswith(("w1.weight", "w2.weight", "w3.weight"))
        return is_linear(key) or mixtral or (head and key == "lm_head.weight")

    return {key: np.ascontiguousarray(value.T) if turned(key) else value for key, value in weights.items()}


def paddle_folder(folder: Path, config: Path, weights: Arrays, form: str = "np", **options: Any) -> Path:
    """A unified checkpoint with a model, its moments, and masters, all as Paddle's layers have them."""
    write_group(folder, "model", weights, form)
    write_group(folder, "optimizer", states_of(weights), "np", master_weights=False)
    fields = json.loads(config.read_text()) | {"paddleformers_version": "1.2.0"} | options
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(12)[None]).logits


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_known_architecture_becomes_what_transformers_opens(tmp_path: Path, kind: str, head: bool) -> None:
    from transformers import AutoModelForCausalLM

    model, expected = hub_model(kind, tmp_path / "hub")
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected, head))
    done = convert(source, tmp_path / "hf", ConvertOptions(to="hf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert done.ready and found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].shape == value.shape and np.array_equal(found[key], value), key
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()), logits(model))


@pytest.mark.parametrize("form", ["holdfast", "dcp"])
def test_moments_go_with_their_weights(tmp_path: Path, form: str) -> None:
    _, expected = hub_model("llama", tmp_path / "hub")
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected))
    convert(source, tmp_path / "out", ConvertOptions(to=form))
    opened = holdfast.open(tmp_path / "out")
    for key, value in expected.items():
        assert np.array_equal(opened.read(key, "model"), value), key
        assert np.array_equal(opened.read(f"{key}/exp_avg", "optimizer"), value * np.float32(0.5)), key
        assert np.array_equal(opened.read(f"{key}/exp_avg_sq", "optimizer"), value * np.float32(0.25)), key


def test_what_the_real_paddle_had_in_memory_becomes_what_it_wrote_for_the_hub(tmp_path: Path) -> None:
    truth = np.load(GOLDEN / "truth_llama_bf16.npz")
    weights = {key.removeprefix("model::"): truth[key] for key in truth if key.startswith("model::")}
    source = paddle_folder(tmp_path / "paddle", GOLDEN / "llama_bf16_hf" / "config.json", weights)
    convert(source, tmp_path / "hf", ConvertOptions(to="hf"))
    twin = holdfast.open(GOLDEN / "llama_bf16_hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    for key in twin.keys("model"):
        assert np.array_equal(found[key], twin.read(key, "model").astype(np.float32)), key


def test_a_folder_that_is_as_the_hub_has_it_stays_so(tmp_path: Path) -> None:
    for name in ("llama_bf16_hf", "llama_fp32_hf"):
        done = convert(GOLDEN / name, tmp_path / name, ConvertOptions(to="hf"))
        before, after = holdfast.open(GOLDEN / name), holdfast.open(tmp_path / name)
        assert done.ready and all(
            before.read(key, "model").tobytes() == after.read(key, "model").tobytes() for key in before.keys("model")
        )


SQUARE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4}


def test_square_weights_of_which_nothing_tells_are_refused_until_the_user_says_it(tmp_path: Path) -> None:
    _, expected = hub_model("llama", tmp_path / "hub", **SQUARE)
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected))
    with pytest.raises(Unsupported, match=r"no weight's shape shows.*--linear-weights in-out or out-in"):
        convert(source, tmp_path / "a", ConvertOptions(to="hf"))
    convert(source, tmp_path / "b", ConvertOptions(to="hf", linear_weights="in-out"))
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in expected.items())
    convert(source, tmp_path / "c", ConvertOptions(to="hf", linear_weights="out-in"))
    assert np.array_equal(load_file(tmp_path / "c" / "model.safetensors")["model.layers.0.mlp.up_proj.weight"],
                          expected["model.layers.0.mlp.up_proj.weight"].T)  # fmt: skip


def test_square_weights_in_files_that_say_their_layout(tmp_path: Path) -> None:
    _, expected = hub_model("llama", tmp_path / "hub", **SQUARE)
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", expected, form="pt")
    convert(source, tmp_path / "a", ConvertOptions(to="hf"))
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in expected.items())


def test_the_user_cannot_say_what_shapes_deny(tmp_path: Path) -> None:
    _, expected = hub_model("llama", tmp_path / "hub")
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected))
    with pytest.raises(Unsupported, match=r"the shape of .* implies the opposite order"):
        convert(source, tmp_path / "a", ConvertOptions(to="hf", linear_weights="out-in"))


@pytest.mark.parametrize("form", ["np", "pt"])
def test_state_dicts_of_paddle_beside_a_config(tmp_path: Path, form: str) -> None:
    _, expected = hub_model("llama", tmp_path / "hub", **(SQUARE if form == "pt" else {}))
    (tmp_path / "paddle").mkdir()
    (tmp_path / "paddle" / "model_state.pdparams").write_bytes(pickle.dumps(as_paddle_has_it(expected), 4))
    (tmp_path / "paddle" / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    convert(tmp_path / "paddle", tmp_path / "hf", ConvertOptions(to="hf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in expected.items())


def test_a_folder_of_paddle_without_a_sign_of_it_is_told_by_its_shapes(tmp_path: Path) -> None:
    _, expected = hub_model("llama", tmp_path / "hub")
    write_group(tmp_path / "paddle", "model", as_paddle_has_it(expected))
    (tmp_path / "paddle" / "config.json").write_bytes((tmp_path / "hub" / "config.json").read_bytes())
    convert(tmp_path / "paddle", tmp_path / "hf", ConvertOptions(to="hf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in expected.items())


def strange(folder: Path, config: dict[str, Any] | None, **weights: np.ndarray[Any, Any]) -> Path:
    named = {key.replace("__", "."): value for key, value in weights.items()}
    write_group(folder, "model", {"model.embed_tokens.weight": random_matrix(1, 64, 32), **named})
    write_group(folder, "optimizer", states_of(named), "np", master_weights=False)
    if config is not None:
        (folder / "config.json").write_text(json.dumps({"paddleformers_version": "1.2.0", **config}))
    return folder


def test_an_architecture_that_is_not_known_is_refused_or_marked(tmp_path: Path) -> None:
    gate = random_matrix(2, 32, 48)
    with pytest.raises(Unsupported, match=r"no config\.json"):
        convert(strange(tmp_path / "a", None, l__gate_proj__weight=gate), tmp_path / "x", ConvertOptions(to="hf"))
    odd = strange(
        tmp_path / "b", {"model_type": "mine"}, l__gate_proj__weight=gate, l__odd__weight=random_matrix(3, 8, 9)
    )
    with pytest.raises(Unsupported, match=r"l\.odd\.weight \[8, 9\] may or may not be the weight of a linear layer"):
        convert(odd, tmp_path / "x", ConvertOptions(to="hf"))
    done = convert(odd, tmp_path / "own", ConvertOptions())
    assert not done.ready and any("keep their stored order" in note for note in done.notes)
    source = strange(tmp_path / "c", {"model_type": "mine", "hidden_size": 32}, l__gate_proj__weight=gate)
    printed = call("convert", str(source), str(tmp_path / "y"), "--to", "hf").stdout
    assert "open it with" not in printed and "names mine, whose key names may differ from the hub" in printed
    assert np.array_equal(load_file(tmp_path / "y" / "model.safetensors")["l.gate_proj.weight"], gate.T)


def test_a_known_architecture_is_called_ready(tmp_path: Path) -> None:
    _, expected = hub_model("llama", tmp_path / "hub")
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected))
    printed = call("convert", str(source), str(tmp_path / "hf"), "--to", "hf").stdout
    assert "open it with" in printed and "transposed 14 linear weights from [in, out] to [out, in]" in printed


def test_a_mapping_that_leaves_or_makes_the_wrong_orientation_is_refused(tmp_path: Path) -> None:
    _, expected = hub_model("llama", tmp_path / "hub")
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected))
    convert(source, tmp_path / "a", ConvertOptions(to="hf", mapping=MappingOptions("from-paddle")))
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in expected.items())
    with pytest.raises(Unsupported, match=r"after the mapping .* is \[in, out\]"):  # turned although it was right
        convert(
            GOLDEN / "llama_fp32_hf", tmp_path / "b", ConvertOptions(to="hf", mapping=MappingOptions("from-paddle"))
        )
    with pytest.raises(Unsupported, match=r"after the mapping .* is \[in, out\]"):
        statements = ["model.norm.weight -> model.norm.weight"]
        convert(source, tmp_path / "b", ConvertOptions(to="hf", mapping=MappingOptions(statements)))


def test_there_and_back_through_paddle(tmp_path: Path) -> None:
    _, expected = hub_model("qwen3", tmp_path / "hub")
    source = paddle_folder(tmp_path / "paddle", tmp_path / "hub" / "config.json", as_paddle_has_it(expected))
    convert(source, tmp_path / "again", ConvertOptions(to="paddle"))
    convert(tmp_path / "again", tmp_path / "hf", ConvertOptions(to="hf"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(np.array_equal(found[key], value) for key, value in expected.items())
