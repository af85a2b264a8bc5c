"""Models with PEFT adapters: PEFT's own keys and bytes, and loads that go on bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from tests.adapters.peft_cases import adapted, open_base, optimizer_of, train_step, write_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
peft = pytest.importorskip("peft", reason="peft is not installed: make setup")
CASES = ["lora", "rows", "dora", "head", "no task", "embeddings", "biases", "ia3", "prompt"]
CASES += ["prefix", "vera", "loha", "norms"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("peft") / "base")


def sorted_config(file: Path) -> dict[str, Any]:
    fields = json.loads(file.read_text())
    return {key: sorted(value, key=str) if isinstance(value, list) else value for key, value in fields.items()}


def require_as_peft(ours: Path, theirs: Path) -> None:
    """Require the adapters that PEFT wrote, tensor by tensor, and its configs but for the order of sets."""
    files = {str(file.relative_to(theirs)) for file in theirs.rglob("adapter_*")}
    assert files == {str(file.relative_to(ours)) for file in ours.rglob("adapter_*")}
    for file in files:
        if file.endswith(".json"):
            assert sorted_config(ours / file) == sorted_config(theirs / file), file
            continue
        one, two = load_file(ours / file), load_file(theirs / file)
        assert one.keys() == two.keys(), file
        assert all(torch.equal(one[key], two[key]) for key in one), file


@pytest.mark.sliced(3)
@pytest.mark.parametrize("case", [*CASES, "lora+dora"])
def test_an_adapter_is_as_peft_writes_it_and_training_goes_on(tmp_path: Path, base: Path, case: str) -> None:
    model = adapted(open_base(base), *case.split("+"))
    optimizer = optimizer_of(model)
    for number in range(2):
        train_step(model, optimizer, number)
    saved = holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer}, step=2)
    assert saved.verify().good and saved.manifest.bases["model"]["mode"] == "reference"
    assert not list((tmp_path / "x").rglob("config.json"))
    model.save_pretrained(tmp_path / "peft")
    require_as_peft(tmp_path / "x", tmp_path / "peft")
    opened = peft.PeftModel.from_pretrained(open_base(base), str(tmp_path / "x"))
    for adapter in case.split("+")[1:]:
        opened.load_adapter(str(tmp_path / "x" / adapter), adapter)
    expected = [train_step(model, optimizer, number) for number in range(2, 5)]
    live = adapted(open_base(base), *case.split("+"), seed=7)
    resumed = optimizer_of(live)
    holdfast.load(tmp_path / "x", {"model": live, "optimizer": resumed})
    assert [train_step(live, resumed, number) for number in range(2, 5)] == expected


class Mixin:
    """What fully_shard puts before the class of a module."""


def test_the_base_is_named_by_its_plain_class(tmp_path: Path, base: Path) -> None:
    for name in ("plain", "sharded"):
        model = adapted(open_base(base), "no task")
        inner = model.base_model.model
        if name == "sharded":
            inner.__class__ = type("FSDP" + type(inner).__name__, (Mixin, type(inner)), {})
        holdfast.save(tmp_path / name, {"model": model})
    config = sorted_config(tmp_path / "sharded" / "adapter_config.json")
    assert config == sorted_config(tmp_path / "plain" / "adapter_config.json")
    assert config["auto_mapping"]["base_model_class"] == "LlamaForCausalLM"


def test_a_tensor_is_read_under_pefts_key(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora")
    saved = holdfast.save(tmp_path / "x", {"model": model})
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    live = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight
    assert torch.equal(torch.from_numpy(saved.read(key)), live.detach())


def test_masters_and_averages_of_an_adapter_are_its_own(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora")
    average = holdfast.EMA(model, 0.5)
    average.update()
    state = {"model": model, "ema": average}
    saved = holdfast.save(tmp_path / "x", state, model_dtype="bfloat16")
    assert {"model", "master_weights", "ema/model"} <= set(saved.groups)
    assert saved.keys("master_weights") == saved.keys("model") == saved.keys("ema/model")
    assert load_file(tmp_path / "x" / "adapter_model.safetensors")[saved.keys("model")[0]].dtype == torch.bfloat16
    peft.PeftModel.from_pretrained(open_base(base), str(tmp_path / "x" / "ema"))
    live = adapted(open_base(base), "lora", seed=7)
    holdfast.load(tmp_path / "x", {"model": live, "ema": holdfast.EMA(live, 0.5)})
    for one, two in zip(model.parameters(), live.parameters(), strict=True):
        assert torch.equal(one, two)  # the masters


def test_transformers_own_adapters_are_as_transformers_writes_them(tmp_path: Path, base: Path) -> None:
    model = open_base(base)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    holdfast.save(tmp_path / "x", {"model": model})
    model.save_pretrained(tmp_path / "theirs")
    require_as_peft(tmp_path / "x", tmp_path / "theirs")
    live = open_base(base)
    live.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    holdfast.load(tmp_path / "x", {"model": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in model.state_dict().items())
    type(open_base(base)).from_pretrained(tmp_path / "x")  # finds the base by itself


def test_what_pefts_file_cannot_hold_is_saved_as_any_module(tmp_path: Path, base: Path) -> None:
    config = peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM")
    model = peft.get_peft_model(open_base(base), config)
    with pytest.raises(holdfast.Unsupported, match=r"model: base='reference', but what PEFT saves of P_TUNING"):
        holdfast.save(tmp_path / "x", {"model": model}, base="reference")
    with pytest.warns(holdfast.HoldfastWarning, match="P_TUNING.* is computed .* saved as any module"):
        saved = holdfast.save(tmp_path / "x", {"model": model})
    assert not list((tmp_path / "x").rglob("*config.json")) and not saved.manifest.bases
    live = peft.get_peft_model(open_base(base), config)
    holdfast.load(tmp_path / "x", {"model": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in model.state_dict().items())


def test_adapters_that_only_one_side_has_are_a_mismatch(tmp_path: Path, base: Path) -> None:
    one, two = adapted(open_base(base), "lora"), adapted(open_base(base), "lora", "dora")
    holdfast.save(tmp_path / "one", {"model": one})
    holdfast.save(tmp_path / "two", {"model": two})
    with pytest.raises(holdfast.Mismatch, match=r"missing in the checkpoint: model\.dora: base_model"):
        holdfast.load(tmp_path / "one", {"model": two})
    with pytest.raises(holdfast.Mismatch, match=r"not in the live state: model\.dora: base_model"):
        holdfast.load(tmp_path / "two", {"model": one})


@pytest.mark.parametrize("options", [{"only": ["optimizer"]}, {"ignore": ["*_proj*"]}], ids=["only", "ignore"])
@pytest.mark.parametrize("mode", ["reference", "full"])
def test_states_saved_without_their_adapters_load_with_the_same_patterns(
    tmp_path: Path, base: Path, options: dict[str, Any], mode: Any
) -> None:
    model = adapted(open_base(base), "embeddings" if options.get("only") else "head")
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    saved = holdfast.save(tmp_path / "x", {"model": model, "optimizer": optimizer}, base=mode, **options)
    assert saved.manifest.bases["model"]["mode"] == mode
    live = adapted(open_base(base), "embeddings" if options.get("only") else "head", seed=7)
    resumed = optimizer_of(live)
    train_step(live, resumed, 1)
    holdfast.load(tmp_path / "x", {"model": live, "optimizer": resumed}, **options)
    for one, two in zip(model.named_parameters(), live.parameters(), strict=True):
        if one[1].requires_grad and (options.get("only") or "_proj" not in one[0]):
            assert torch.equal(optimizer.state[one[1]]["exp_avg"], resumed.state[two]["exp_avg"]), one[0]


def test_an_adapter_of_another_name_keeps_the_record_of_its_base(tmp_path: Path, base: Path) -> None:
    model = peft.get_peft_model(open_base(base), peft.LoraConfig(r=2, target_modules=["q_proj"]), "mine")
    saved = holdfast.save(tmp_path / "x", {"model": model, "note": 1}, ignore=["note"])
    assert saved.groups == ("model.mine",) and saved.manifest.bases["model"]["mode"] == "reference"
    with torch.no_grad():
        model.get_base_model().get_input_embeddings().weight[0] += 1
    with pytest.raises(holdfast.Mismatch, match="of the live base model differs"):
        holdfast.load(tmp_path / "x", {"model": model, "note": 1}, ignore=["note"])


def test_a_folder_of_pefts_own_loads(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "dora")
    model.save_pretrained(tmp_path / "theirs")
    live = adapted(open_base(base), "dora", seed=7)
    holdfast.load(tmp_path / "theirs", {"model": live})
    assert all(torch.equal(live.state_dict()[key], value) for key, value in model.state_dict().items())


def test_a_step_in_the_background_has_the_bytes_of_a_save(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora", "dora")
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(tmp_path / "run") as checkpointer:
        checkpointer.save(1, state).result(60)
        checkpointer.save(2, state).result(60)  # from the cached plan
    holdfast.save(tmp_path / "x", state)
    for step in (1, 2):
        folder = tmp_path / "run" / f"step-{step:012d}"
        for file in (*(tmp_path / "x").rglob("adapter_*"), tmp_path / "x" / "state.json"):
            assert (folder / file.relative_to(tmp_path / "x")).read_bytes() == file.read_bytes(), file


def test_names_that_collide_are_refused(tmp_path: Path, base: Path) -> None:
    model = adapted(open_base(base), "lora", "dora")
    with pytest.raises(holdfast.Unsupported, match=r"would both be stored as 'model\.dora'"):
        holdfast.save(tmp_path / "x", {"model": model, "model.dora": torch.nn.Linear(2, 2)})
    model.add_adapter("ema", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(holdfast.Unsupported, match="an adapter has the name of another entry"):
        holdfast.save(tmp_path / "x", {"model": model, "ema": holdfast.EMA(model, 0.5)})


@pytest.mark.full
def test_a_step_by_reference_has_the_bytes_of_the_adapter_and_its_optimizer(tmp_path: Path) -> None:
    """On a base of 1 GB a step takes less than 1.05 times what the adapter and its optimizer take."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 5, "num_attention_heads": 16}
    folder = write_base(tmp_path / "large", vocab_size=512, **sizes)
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) >= 10**9
    ratio = require_small_steps(tmp_path, folder, adapted(open_base(folder), "lora"))
    print(f"a step takes {ratio:.4f} times the bytes of the adapter and its optimizer state")
    shutil.rmtree(folder)


def test_a_step_by_reference_is_small(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8}
    folder = write_base(tmp_path / "medium", vocab_size=512, **sizes)
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "v_proj", "up_proj"], task_type="CAUSAL_LM")
    require_small_steps(tmp_path, folder, peft.get_peft_model(open_base(folder), config))


def require_small_steps(tmp_path: Path, folder: Path, model: Any) -> float:
    """Return the bytes of the largest step, as a multiple of those of the adapter and its optimizer state."""
    optimizer = optimizer_of(model)
    train_step(model, optimizer, 0)
    adapter = sum(own.nbytes for own in model.parameters() if own.requires_grad)
    base_bytes = sum(os.path.getsize(file) for file in folder.glob("*.safetensors"))
    assert base_bytes > 20 * adapter
    with holdfast.Checkpointer(tmp_path / "run", base="reference") as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"model": model, "optimizer": optimizer}).result(120)
    ratios = []
    for step in (1, 2):
        files = (tmp_path / "run" / f"step-{step:012d}").rglob("*")
        ratios.append(sum(file.stat().st_size for file in files if file.is_file()) / (3 * adapter))
    assert max(ratios) < 1.05
    return max(ratios)


def test_an_adapter_that_is_not_saved_whole_claims_nothing(tmp_path: Path):
    """PeftModel.from_pretrained would open it with freshly initialized weights."""
    model = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), peft.LoraConfig(target_modules=["0"]))
    holdfast.save(tmp_path / "whole", {"model": model}, base="none")
    holdfast.save(tmp_path / "part", {"model": model}, base="none", ignore=["*lora_A*"])
    assert (tmp_path / "whole" / "adapter_config.json").exists()
    assert not (tmp_path / "part" / "adapter_config.json").exists()
