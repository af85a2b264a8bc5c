"""Folders of transformers' Trainer and of accelerate, written by the real ones: nothing of them is lost in silence."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from tests.cli.calls import call

STEPS = 2


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint folder of the real Trainer, and the Trainer."""
    from transformers import Trainer, TrainingArguments

    root = tmp_path_factory.mktemp("trainer")
    options = TrainingArguments(
        str(root), max_steps=STEPS, save_steps=STEPS, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, lr_scheduler_type="cosine", learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(model=llama(), args=options, train_dataset=Texts())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train()
    return root / f"checkpoint-{STEPS}", trainer


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"n": 3, "t": torch.arange(2.0)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("not loaded here")


@pytest.fixture(scope="module")
def accelerated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any, Any]:
    """Folders of accelerate's save_state, safetensors and not, of two models; the first model and its optimizer."""
    from accelerate import Accelerator

    root = tmp_path_factory.mktemp("accelerate")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerator = Accelerator(cpu=True)
        model, critic = llama(), torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        accelerator.prepare(model, critic, optimizer, scheduler)
        accelerator.register_for_checkpointing(Counter())
        tokens = Texts()[0]["input_ids"][None]
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        accelerator.save_state(str(root / "safe"))
        accelerator.save_state(str(root / "plain"), safe_serialization=False)
    return root / "safe", root / "plain", model, optimizer


def test_a_folder_of_the_trainer_has_its_optimizer_scheduler_rng_and_step(trained: tuple[Path, Any]) -> None:
    folder, trainer = trained
    opened = holdfast.open(folder)
    assert opened.step == STEPS and {"model", "optimizer", "rng_state"} <= set(opened.groups)
    assert opened.value("scheduler")["last_epoch"] == STEPS == opened.value("trainer_state")["global_step"]
    assert opened.read("cpu", "rng_state").dtype == np.uint8
    assert any("training_args.bin" in note for note in opened.notes)
    first = trainer.optimizer.optimizer.state_dict()["state"][0]["exp_avg"]
    assert np.array_equal(opened.read("0/exp_avg", "optimizer"), first.numpy())


def test_a_folder_of_the_trainer_resumes_a_live_state(trained: tuple[Path, Any]) -> None:
    folder, trainer = trained
    model = llama(1)
    trainer_of_this = type(trainer)(model=model, args=trainer.args, train_dataset=Texts())
    trainer_of_this.create_optimizer_and_scheduler(STEPS)
    state = {"model": model, "optimizer": trainer_of_this.optimizer, "scheduler": trainer_of_this.lr_scheduler}
    report = holdfast.load(folder, state)
    assert report.step == STEPS and any("training_args.bin" in note for note in report.notes)
    for a, b in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(a, b)
    expected = trainer.optimizer.optimizer.state_dict()["state"]
    for number, own in trainer_of_this.optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(own[name]), torch.as_tensor(v)) for name, v in expected[number].items())
    assert trainer_of_this.lr_scheduler.state_dict()["last_epoch"] == STEPS


def test_show_and_convert_name_what_is_left_out(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = trained
    shown = call("show", str(folder))
    assert "training_args.bin" in shown.stdout and "left out" in shown.stdout
    assert any("training_args.bin" in note for note in json.loads(call("show", str(folder), "--json").stdout)["notes"])
    done = convert(folder, tmp_path / "hf", ConvertOptions(to="hf"))
    notes = "\n".join(done.notes)
    assert all(word in notes for word in ("training_args.bin", "optimizer", "scheduler", "rng_state", "trainer_state"))
    assert set(holdfast.open(tmp_path / "hf").groups) == {"model"}
    convert(folder, tmp_path / "own", ConvertOptions())
    own = holdfast.open(tmp_path / "own")
    assert own.step == STEPS and {"model", "optimizer", "rng_state"} <= set(own.groups)


@pytest.mark.parametrize("which", [0, 1])
def test_a_folder_of_accelerate_has_everything(accelerated: tuple[Path, Path, Any, Any], which: int) -> None:
    opened = holdfast.open(accelerated[which])
    assert {"model", "model_1", "optimizer", "random_states_0", "custom_checkpoint_0"} <= set(opened.groups)
    assert opened.value("scheduler")["last_epoch"] == 0
    assert set(opened.keys("model_1")) == {"weight", "bias"}
    assert np.array_equal(opened.read("t", "custom_checkpoint_0"), [0.0, 1.0])
    state = accelerated[3].state_dict()["state"]
    assert np.array_equal(opened.read("2/exp_avg_sq", "optimizer"), state[2]["exp_avg_sq"].numpy())


def test_random_states_of_accelerate_restore_the_generators(accelerated: tuple[Path, Path, Any, Any]) -> None:
    opened = holdfast.open(accelerated[0])
    generator = torch.Generator()
    generator.set_state(torch.from_numpy(opened.read("torch_manual_seed", "random_states_0").copy()))
    entry = opened.state["random_states_0"]["value"]
    assert entry["torch_manual_seed"] == {"$tensor": "torch_manual_seed"}
    random.Random().setstate((3, tuple(entry["random_state"]["$tuple"][1]["$tuple"]), None))


def test_a_companion_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "optimizer.pt").write_bytes(b"nothing of torch")
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "weights.npz").write_bytes(b"x")
    (tmp_path / "README.md").write_text("a model")
    opened = holdfast.open(tmp_path)
    assert opened.groups == ("model",)
    assert any("left out" in note and "optimizer.pt" in note for note in opened.notes)
    assert any("extra/weights.npz" in note for note in opened.notes)
    assert not any("README" in note for note in opened.notes)


def test_a_folder_without_anything_else_has_no_notes(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    assert holdfast.open(tmp_path).notes == ()
