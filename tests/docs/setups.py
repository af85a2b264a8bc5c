"""Hidden setups of the blocks in the docs: the names that a page uses and does not define, as small as can be."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import holdfast

Names = dict[str, Any]


class Rows(Dataset[torch.Tensor]):
    """Equal samples."""

    def __init__(self, count: int) -> None:
        self.rows = torch.ones(count, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def hub_model(**sizes: int) -> Any:
    """Return a small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small: Names = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads: Names = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**small | heads | sizes))


@contextmanager
def training() -> Iterator[Names]:
    """Give a model, what trains it, and a checkpoint of them in the folder `saved`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("body", torch.nn.Linear(4, 4))
    model.add_module("head", torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)

    model(torch.ones(1, 4)).square().mean().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    holdfast.save("saved", state)
    yield {
        "holdfast": holdfast,
        "torch": torch,
        "F": F,
        "model": model,
        "module": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "loader": DataLoader(Rows(8), batch_size=2),
        "batches": holdfast.Batches(DataLoader(Rows(8), batch_size=2)),
        "state": state,
        "train_step": lambda: 0.0,
        "evaluate": lambda _model: None,
        "path": "saved",
        "root": "runs/a",
        "start": 0,
        "step": 1,
    }


@contextmanager
def empty() -> Iterator[Names]:
    """Give nothing: the page shows everything."""
    yield {}


@contextmanager
def paddle_program() -> Iterator[Names]:
    """Give a folder that Paddle exported."""
    shutil.copytree(Path(__file__).parents[1] / "golden" / "paddle_program" / "mlp", "exported")
    yield {"holdfast": holdfast}


@contextmanager
def hub() -> Iterator[Names]:
    """Give a model of transformers, and its folder."""
    model = hub_model()
    model.save_pretrained("hub-folder")
    optimizer = torch.optim.AdamW(model.parameters())
    yield {"holdfast": holdfast, "model": model, "optimizer": optimizer, "path": "saved", "root": "runs/a"}


@contextmanager
def experts() -> Iterator[Names]:
    """Give a model with experts, its folder, and a mapping that changes nothing."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes: Names = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    model = MixtralForCausalLM(
        MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=2)
    )
    model.save_pretrained("hub-folder")
    yield {"holdfast": holdfast, "model": model, "path": "saved"}


@contextmanager
def mapped() -> Iterator[Names]:
    """Give a state, and a mapping that serves a load and a save."""
    with training() as names:
        yield names | {"mapping": "body.weight^T -> body.weight"}


@contextmanager
def adapters() -> Iterator[Names]:
    """Give a base model in a folder, and what PEFT has for it."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    hub_model().save_pretrained("base")
    yield {
        "holdfast": holdfast,
        "torch": torch,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "LoraConfig": LoraConfig,
        "PeftModel": PeftModel,
        "get_peft_model": get_peft_model,
        "step": 1200,
    }


@contextmanager
def lora() -> Iterator[Names]:
    """Give a base model and three adapters of it, each in a folder."""
    from peft import LoraConfig, get_peft_model

    hub_model().save_pretrained("base")
    for folder in ("adapter", "a", "b"):
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        get_peft_model(hub_model(), config).save_pretrained(folder)
    yield {"holdfast": holdfast}


@contextmanager
def adapter_files() -> Iterator[Names]:
    """Give a base model and an adapter of it, each in a folder, without PEFT."""
    from safetensors.torch import save_file

    hub_model().save_pretrained("base")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    Path("adapter").mkdir()
    tensors = {f"{prefix}.lora_A.weight": torch.ones(2, 16), f"{prefix}.lora_B.weight": torch.ones(16, 2)}
    save_file(tensors, "adapter/adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    Path("adapter/adapter_config.json").write_text(json.dumps(config))
    yield {"holdfast": holdfast}


@contextmanager
def models() -> Iterator[Names]:
    """Give three models in folders, and a file that merges two of them."""
    model = hub_model()
    for folder in ("base", "a", "b"):
        model.save_pretrained(folder)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
    Path("merge.yaml").write_text("method: linear\nmodels: [{path: a, weight: 1}, {path: b, weight: 1}]\n")
    yield {"holdfast": holdfast}


@contextmanager
def embedding_model() -> Iterator[Names]:
    """Give a small Qwen3 of the hub, with its tokenizer."""
    from tests.train.embedding.tiny_models import write_model

    write_model(Path("Qwen3-0.6B"), "qwen3")
    yield {}


@contextmanager
def embedding_run() -> Iterator[Names]:
    """Give the config of a small embedding run, with its data."""
    from tests.dist.embedding_cases import config, write_data

    written = config(Path("runs/embedding"), write_data(Path("data")), train__steps=3).to_toml()
    Path("embedding.toml").write_text(written.replace('name" = "lists"', 'name" = "questions"'))
    yield {}


@contextmanager
def llama_config() -> Iterator[Names]:
    """Give the config of a model with 8 billion parameters."""
    sizes: Names = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    heads: Names = {"num_attention_heads": 32, "num_key_value_heads": 8}
    named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    Path("Llama-8B").mkdir()
    Path("Llama-8B/config.json").write_text(json.dumps(named | sizes | heads))
    yield {"holdfast": holdfast}


@contextmanager
def tokens() -> Iterator[Names]:
    """Give a model whose vocabulary is padded, and its tokenizer."""
    from tests.tokens.vocabularies import tokenizer

    yield {"holdfast": holdfast, "tokenizer": tokenizer(), "model": hub_model()}


@contextmanager
def mesh() -> Iterator[Names]:
    """Give a mesh of one rank, a model and its inputs; the rules of holdfast.spmd are gone afterwards."""
    import torch.distributed as dist

    import holdfast.spmd

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        inputs = torch.ones(2, 4)
        yield {
            "holdfast": holdfast,
            "torch": torch,
            "F": F,
            "mesh": dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)),
            "model": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)),
            "example_inputs": [inputs],
            "tokens": inputs,
            "targets": torch.tensor([0, 1]),
        }
    finally:
        holdfast.spmd.disable()
        dist.destroy_process_group()


@contextmanager
def meta() -> Iterator[Names]:
    """Give a model class and a checkpoint of it, and a mesh of one rank."""
    from torch.distributed.fsdp import fully_shard

    with mesh() as names:
        holdfast.save("saved", {"model": names["model"]})

        def build(_config: Any) -> torch.nn.Module:
            return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

        yield names | {"Model": build, "config": None, "path": "saved", "fully_shard": fully_shard}


@contextmanager
def accelerate() -> Iterator[Names]:
    """Give what accelerate prepares, for two epochs of four batches."""
    from accelerate.state import AcceleratorState

    with training() as names:
        rows = DataLoader(Rows(8), batch_size=2, shuffle=True)
        yield names | {"loader": rows, "epochs": 2}
    AcceleratorState._reset_state(reset_partial_state=True)


@contextmanager
def trainer() -> Iterator[Names]:
    """Give a model, samples and arguments of two steps to Trainer, under the name of the class derived from it."""
    from transformers import Trainer, TrainingArguments

    samples = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    arguments = TrainingArguments("out", max_steps=2, save_steps=1, report_to=[], dataloader_pin_memory=False)
    yield {"SFTTrainer": Trainer, "model": hub_model(), "args": arguments, "data": samples}


@contextmanager
def lightning() -> Iterator[Names]:
    """Give a module of Lightning and its data, for 600 batches."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            return self.layer(batch).square().mean()

        def validation_step(self, batch: torch.Tensor) -> None:
            self.log("val_loss", self.layer(batch).square().mean())

        def test_step(self, batch: torch.Tensor) -> None:
            self.log("test_loss", self.layer(batch).square().mean())

        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = self.current_epoch > 0

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            return DataLoader(Rows(300))

        def val_dataloader(self) -> Any:
            return DataLoader(Rows(1))

        test_dataloader = val_dataloader

    with warnings.catch_warnings():
        for category in (UserWarning, FutureWarning):  # of loaders without workers, of TensorBoard, of torch's trees
            warnings.simplefilter("ignore", category)
        yield {"module": Module()}


def command_line() -> None:
    """Write what the examples of the command line work on: two runs, a model and one tuned from it, a config."""
    from tests.tokens.vocabularies import tokenizer

    for root in ("runs/llama", "runs/other"):
        model = hub_model()
        optimizer = torch.optim.AdamW(model.parameters())
        with holdfast.Checkpointer(root, keep=holdfast.keep.last(3)) as ck:
            for step in (20, 40, 60):
                model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                state = {"model": model, "optimizer": optimizer, "note": {"epoch": step // 40}}
                ck.save(step, state, metrics={"loss": 4.0 - step / 100}).result()
    model.save_pretrained("base")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.add_(torch.outer(torch.ones(16), torch.arange(16.0)))
    model.save_pretrained("tuned")
    for folder in ("base", "tuned"):
        tokenizer().save_pretrained(folder)
    Path("tiny.toml").write_text((Path(__file__).parents[2] / "examples" / "dense-tiny.toml").read_text())


SETUPS: dict[str, Callable[[], Any]] = {
    "training": training,
    "empty": empty,
    "paddle program": paddle_program,
    "hub": hub,
    "experts": experts,
    "mapped": mapped,
    "adapters": adapters,
    "lora": lora,
    "adapter files": adapter_files,
    "models": models,
    "embedding model": embedding_model,
    "embedding run": embedding_run,
    "llama config": llama_config,
    "tokens": tokens,
    "accelerate": accelerate,
    "trainer": trainer,
    "lightning": lightning,
    "mesh": mesh,
    "meta": meta,
}
# They take seconds, most of them to import a framework: `make test` leaves their blocks out, `make full` runs them.
FULL = {"adapters", "lora", "accelerate", "trainer", "lightning", "llama config"}
