"""Names in files: the record of a save, the convention of a run, and files without a record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.core.errors import Mismatch
from tests.adapters.hub.architectures import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

IN_MEMORY = "model.layers.0.mlp.experts.gate_up_proj"
ON_HUB = "model.layers.0.block_sparse_moe.experts.3.w1.weight"


@pytest.fixture
def model() -> Any:
    return tiny_model("mixtral")


def blank(model: Any) -> Any:
    """A model of the same class with other values."""
    return type(model)(model.config)


def equal(one: Any, other: Any) -> bool:
    """True if two models hold the same values."""
    state = other.state_dict()
    return all(torch.equal(tensor, state[key]) for key, tensor in one.state_dict().items())


def keys_of(folder: Path) -> set[str]:
    """The keys in a folder's model files."""
    return {key for file in folder.glob("model*.safetensors") for key in load_file(file)}


def test_a_save_records_the_mapping_and_a_load_follows_the_record(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast.save(tmp_path / "c", {"model": model})
    assert ON_HUB in keys_of(tmp_path / "c") and IN_MEMORY not in keys_of(tmp_path / "c")
    record = holdfast.open(tmp_path / "c").manifest.mappings
    assert "block_sparse_moe.experts.*.w1.weight" in record["model"]
    from transformers import conversion_mapping

    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [])
    loaded = blank(model)
    report = holdfast.load(tmp_path / "c", {"model": loaded})
    assert equal(model, loaded) and f"model: {IN_MEMORY}" in report.loaded and not report.unexpected


def test_hub_keys_false_stores_names_in_memory_and_such_files_load_by_default(tmp_path: Path, model: Any) -> None:
    holdfast.save(tmp_path / "c", {"model": model}, hub_keys=False)
    assert IN_MEMORY in keys_of(tmp_path / "c")
    assert "mappings" not in json.loads((tmp_path / "c" / "holdfast.json").read_text())
    loaded = blank(model)
    holdfast.load(tmp_path / "c", {"model": loaded})
    assert equal(model, loaded)


def test_a_recorded_checkpoint_loads_without_hub_keys(tmp_path: Path, model: Any) -> None:
    holdfast.save(tmp_path / "c", {"model": model})
    loaded = blank(model)
    holdfast.load(tmp_path / "c", {"model": loaded}, hub_keys=False)
    assert equal(model, loaded)


def test_a_hub_folder_needs_hub_keys(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(Mismatch, match=r"experts\.gate_up_proj"):
        holdfast.load(tmp_path / "hf", {"model": blank(model)}, hub_keys=False)
    loaded = blank(model)
    holdfast.load(tmp_path / "hf", {"model": loaded})
    assert equal(model, loaded)


def test_a_users_mapping_wins(tmp_path: Path, model: Any) -> None:
    mapping = "model.norm.weight -> final.weight"
    holdfast.save(tmp_path / "c", {"model": model}, mapping=mapping)
    assert {"final.weight", IN_MEMORY} <= keys_of(tmp_path / "c")
    assert not holdfast.open(tmp_path / "c").manifest.mappings


def test_a_plain_dict_loads_by_the_names_in_the_file(tmp_path: Path, model: Any) -> None:
    holdfast.save(tmp_path / "c", {"model": model})
    stored = {key: value for file in (tmp_path / "c").glob("model*") if file.suffix == ".safetensors"
              for key, value in load_file(file).items()}  # fmt: skip
    wanted = {"model": {key: torch.zeros_like(value) for key, value in stored.items()}}
    holdfast.load(tmp_path / "c", wanted)
    assert all(torch.equal(value, wanted["model"][key]) for key, value in stored.items())


def test_patterns_speak_of_names_in_memory(tmp_path: Path, model: Any) -> None:
    holdfast.save(tmp_path / "c", {"model": model})
    loaded = blank(model)
    report = holdfast.load(tmp_path / "c", {"model": loaded}, only=["*.gate_up_proj"])
    assert {text.rsplit(".", 1)[1] for text in report.loaded} == {"gate_up_proj"}
    assert torch.equal(loaded.state_dict()[IN_MEMORY], model.state_dict()[IN_MEMORY])


def test_a_missing_tensor_is_named(tmp_path: Path, model: Any) -> None:
    model.save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(Mismatch, match=r"missing in the checkpoint: model: model\.norm\.weight"):
        holdfast.load(tmp_path / "hf", {"model": blank(model)})


def test_a_factored_state_keeps_the_names_in_memory(tmp_path: Path, model: Any) -> None:
    optimizer = torch.optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.warns(UserWarning, match="stored under the names that its tensors have in memory"):
        holdfast.save(tmp_path / "c", {"model": model, "optimizer": optimizer})
    assert IN_MEMORY in keys_of(tmp_path / "c")
    loaded = type(model).from_pretrained(tmp_path / "c")
    assert equal(model, loaded)


@pytest.mark.parametrize("hub_keys", [True, False])
def test_a_run_keeps_the_names_of_the_step_that_it_restored(tmp_path: Path, model: Any, hub_keys: bool) -> None:
    def state(of: Any) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(of.parameters())
        for parameter in of.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": of, "optimizer": optimizer}

    with holdfast.Checkpointer(tmp_path / "run", hub_keys=hub_keys) as ck:
        first = state(model)
        ck.save(1, first).result(60)
        ck.save(2, first).result(60)
    folders = sorted((tmp_path / "run").glob("step-*"))
    assert all((ON_HUB in keys_of(folder)) is hub_keys for folder in folders)
    again = state(blank(model))
    with holdfast.Checkpointer(tmp_path / "run") as ck:
        assert ck.restore(again) == 2
        assert equal(model, again["model"])
        ck.save(3, again).result(60)
    newest = max((tmp_path / "run").glob("step-*"))
    assert (ON_HUB in keys_of(newest)) is hub_keys
    for file in folders[-1].glob("*.safetensors"):
        assert (newest / file.name).read_bytes() == file.read_bytes()


def test_files_of_a_base_model_load_under_its_prefix(tmp_path: Path) -> None:
    whole = tiny_model("gpt2")
    whole.transformer.save_pretrained(tmp_path / "base")
    loaded = blank(whole)
    report = holdfast.load(tmp_path / "base", {"model": loaded}, strict=False)
    assert equal(whole.transformer, loaded.transformer) and not report.missing


def test_models_without_rules_have_no_record(tmp_path: Path) -> None:
    model = tiny_model("llama")
    holdfast.save(tmp_path / "c", {"model": model})
    assert "mappings" not in json.loads((tmp_path / "c" / "holdfast.json").read_text())
