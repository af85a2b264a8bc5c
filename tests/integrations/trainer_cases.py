"""What people do with a Trainer beside training to the end, as functions that the launcher's ranks call."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch.utils.data import IterableDataset, RandomSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import holdfast
from holdfast.core.warnings import HoldfastWarning
from holdfast.integrations.transformers import HoldfastMixin, attach
from tests.integrations.trainer_runs import (
    NotedTrainer,
    Sentences,
    make_arguments,
    make_model,
    make_trainer,
    report,
    train,
    weights,
)
from tests.integrations.trl_runs import make_tokenizer


def error_of(function: Any, *arguments: Any, **options: Any) -> str:
    """Return the class and message of the error that a call raises."""
    try:
        function(*arguments, **options)
    except holdfast.HoldfastError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def attached(folder: str, changes: dict[str, Any] | None = None, root: Any = None, **options: Any) -> Any:
    return attach(make_trainer(folder, changes or {}), root, **options)


def begin_in_used_root(folder: str) -> dict[str, Any]:
    """Train without a resume where steps are: refused, unless they are to be deleted."""
    train(attached(folder, {"max_steps": 8}), folder)
    refused = error_of(attached(folder, {"max_steps": 6}).train)
    again = train(attached(folder, {"max_steps": 6}, overwrite=True), folder, resume=False)
    return {"refused": refused, "again": again}


def resume_by_path(folder: str) -> dict[str, Any]:
    """Go back to an earlier step by its folder, and by the name that Trainer gives to checkpoints."""
    whole = train(attached(folder), folder)
    by_folder = train(attached(folder), folder, resume=f"{folder}/step-000000000008")
    aside = sorted(path.name for path in Path(folder).glob("abandoned-*"))
    by_number = train(attached(folder), folder, resume=f"{folder}/checkpoint-4")
    elsewhere = train(attached(f"{folder}-other"), f"{folder}-other", resume=f"{folder}/step-000000000012")
    unknown = error_of(attached(folder).train, resume_from_checkpoint=f"{folder}/checkpoint-999")
    found = {"whole": whole, "folder": by_folder, "number": by_number, "elsewhere": elsewhere}
    return {**found, "aside": aside, "unknown": unknown}


def native_checkpoints(folder: str) -> dict[str, Any]:
    """Attach Holdfast to a run that Trainer began by itself."""
    train(make_trainer(folder, {"max_steps": 8}), folder, resume=None)
    shutil.copytree(folder, f"{folder}-whole")
    whole = train(make_trainer(f"{folder}-whole", {}), f"{folder}-whole", resume=True)
    refused = error_of(attached(folder).train, resume_from_checkpoint=True)
    went_on = train(attached(folder), folder, resume=f"{folder}/checkpoint-8")
    return {"whole": whole, "refused": refused, "went_on": went_on, "native": sorted(os.listdir(folder))}


def refusals(folder: str) -> dict[str, str]:
    """What cannot be attached, by name."""
    found = {"object": error_of(attach, object())}
    for name, attributes in {
        "deepspeed": {"is_deepspeed_enabled": True},
        "xla": {"is_fsdp_xla_enabled": True},
        "fsdp1": {"is_fsdp_enabled": True},
        "begun": {"is_in_train": True},
    }.items():
        trainer = make_trainer(folder, {})
        vars(trainer).update(attributes)
        if name == "fsdp1":
            vars(trainer.accelerator)["state"] = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
        found[name] = error_of(attach, trainer)
    trainer = attached(folder)
    found["twice"] = error_of(attach, trainer)
    found["trial"] = error_of(trainer.train, trial={"lr": 1})
    found["search"] = error_of(trainer.hyperparameter_search)
    found["carry"] = error_of(attached, folder, carry=["no_such_thing"])
    return found


def other_data(folder: str) -> dict[str, Any]:
    """Go on with other numbers of samples, refused, and with the same number from other parts."""
    train(attached(folder, {"max_steps": 8, "num_train_epochs": 2}), folder)
    more = error_of(attached(folder, {"per_device_train_batch_size": 4}).train, resume_from_checkpoint=True)
    longer = attach(make_trainer(folder, {}, train_dataset=Sentences(40)))
    longer_text = error_of(longer.train, resume_from_checkpoint=True)
    parts = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    same = train(attached(folder, parts), folder)
    return {"more": more, "longer": longer_text, "same": same}


class ReadsFolder(TrainerCallback):
    """A callback as experiment trackers have: it reads, and here also writes, output_dir/checkpoint-N."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, list[str]]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            names = sorted(os.listdir(folder))
            self.seen.append((state.global_step, int(state.log_history[-1]["step"]), names))
            (folder / "config.json").write_text("{}")
            (folder / "note.txt").write_text("mine")


def callbacks_read_folders(folder: str) -> dict[str, Any]:
    trainer = attached(folder, {"max_steps": 8})
    reader = ReadsFolder()
    trainer.add_callback(reader)
    train(trainer, folder)
    good = [holdfast.open(path).verify().good for path in sorted(Path(folder).glob("step-*"))]
    left = {path.name: sorted(os.listdir(path)) for path in Path(folder).glob("checkpoint-*")}
    return {"seen": reader.seen, "good": good, "left": left}


class RecordedHub:
    """A hub that notes what is uploaded: no address is reachable from the tests."""

    def __init__(self) -> None:
        self.uploads: list[dict[str, Any]] = []

    def create_repo(self, name: str, **options: Any) -> Any:
        return SimpleNamespace(repo_id=f"user/{name}")

    def upload_folder(self, **options: Any) -> Any:
        ignored = options.get("ignore_patterns") or []
        files = sorted(os.listdir(options["folder_path"]))
        self.uploads.append({**options, "files": files, "ignore_patterns": list(ignored)})
        return SimpleNamespace(done=lambda: True, result=lambda: None)


def pushes(folder: str) -> list[dict[str, Any]]:
    hub = RecordedHub()
    importlib.import_module("transformers.trainer").__dict__["hf_api"] = lambda: hub
    changes = {"push_to_hub": True, "hub_strategy": "all_checkpoints", "hub_always_push": True, "max_steps": 8}
    trainer = attach(make_trainer(folder, changes, processing_class=make_tokenizer()))
    train(trainer, folder)
    trainer.push_to_hub()
    return hub.uploads


def only_models(folder: str) -> dict[str, Any]:
    train(attached(folder, {"save_only_model": True, "max_steps": 4}), folder)
    names = sorted(os.listdir(f"{folder}/step-000000000004"))
    refused = error_of(attached(folder).train, resume_from_checkpoint=True)
    return {
        "names": names,
        "refused": refused,
        "size": len(AutoModelForCausalLM.from_pretrained(f"{folder}/step-000000000004").state_dict()),
    }


def evaluate_only(folder: str) -> list[str]:
    attached(folder).evaluate()
    return sorted(os.listdir(folder)) if Path(folder).exists() else []


class Constant(NotedTrainer):
    """A trainer whose evaluations are all equally good."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = {"eval_score": 0.5}
        self.log(metrics)
        return metrics


def equally_good(folder: str) -> dict[str, Any]:
    """The first of equally good steps is the best one for Trainer: it must be there at the end."""
    changes: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "save_total_limit": 1}
    changes |= {"load_best_model_at_end": True}
    changes |= {"metric_for_best_model": "score", "greater_is_better": True}
    arguments = make_arguments(folder, **changes)
    trainer = attach(Constant(make_model(), arguments, train_dataset=Sentences(), eval_dataset=Sentences(8)))
    found = train(trainer, folder)
    stored = holdfast.open(f"{folder}/step-000000000004").read("model.embed_tokens.weight")
    live = trainer.model.get_input_embeddings().weight.detach().numpy()
    return {**found, "loaded": bool((stored == live).all())}


class Forgets(NotedTrainer):
    """A trainer that loads the optimizer in its own way, and nothing of Holdfast's."""

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        pass


class SavesByItself(NotedTrainer):
    """A trainer that writes its checkpoints in its own way."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        pass


def overrides(folder: str) -> dict[str, Any]:
    train(attached(folder, {"max_steps": 4}), folder)
    arguments = make_arguments(folder)
    loads = attach(Forgets(make_model(), arguments, train_dataset=Sentences()))
    refused = error_of(loads.train, resume_from_checkpoint=True)
    saves = attach(SavesByItself(make_model(), make_arguments(f"{folder}-own", max_steps=4), train_dataset=Sentences()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldfastWarning)
        saves.train()
    return {"refused": refused, "warned": [str(one.message) for one in caught if one.category is HoldfastWarning]}


def damaged_newest(folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Resume where the newest step's tensors are damaged: from the one before it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HoldfastWarning)
        trainer = attached(folder, changes)
        trainer.train(resume_from_checkpoint=True)
    return report(trainer, folder)


class Mine(NotedTrainer, HoldfastMixin):
    """A subclass with the mixin and options of its own."""

    holdfast_options: ClassVar[dict[str, Any]] = {"carry": ["seen"]}
    seen = 0

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen += 1
        return super().training_step(*args, **kwargs)


def run_mixin(folder: str, changes: dict[str, Any], kill_step: int | None = None) -> dict[str, Any]:
    trainer = Mine(
        make_model(), make_arguments(folder, **changes), train_dataset=Sentences(), eval_dataset=Sentences(8)
    )
    return train(trainer, folder, True, kill_step) | {"seen": trainer.seen}


def save_sharded_model(folder: str) -> dict[str, Any]:
    """save_model under FSDP2 into output_dir, where the steps are too."""
    trainer = attach(
        make_trainer(
            folder, {"fsdp2": True, "max_steps": 4, "per_device_train_batch_size": 1}, processing_class=make_tokenizer()
        )
    )
    train(trainer, folder)
    trainer.save_model()
    whole = weights(trainer.model)
    opened = AutoModelForCausalLM.from_pretrained(folder)
    names = sorted(os.listdir(folder))
    restarted = error_of(lambda: holdfast.Checkpointer(folder).close())
    return {"same": weights(opened) == whole, "names": names, "restarted": restarted}


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Sentences without a length, in another order each time they are read."""

    def __init__(self, count: int) -> None:
        self._sentences = Sentences(count)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in torch.randperm(len(self._sentences)).tolist():
            yield self._sentences[index]


class StopsEpochs(TrainerCallback):
    """Ends each epoch after five of its seven steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 5 == 0


class OwnSampler(NotedTrainer):
    """A trainer whose sampler has a generator of its own."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return RandomSampler(self.train_dataset, generator=torch.Generator().manual_seed(5))  # type: ignore[arg-type]


def run_odd(folder: str, kind: str, changes: dict[str, Any], kill_step: int | None = None) -> dict[str, Any]:
    """Train on data whose position is not the number of steps by those of an epoch."""
    given: dict[str, Any] = {"train_dataset": Stream(10) if kind == "stream" else Sentences()}
    made = OwnSampler if kind == "sampler" else NotedTrainer
    trainer = made(make_model(), make_arguments(folder, **changes), eval_dataset=Sentences(8), **given)
    if kind == "stops":
        trainer.add_callback(StopsEpochs())
    return train(attach(trainer), folder, True, kill_step)


def pending_gradients(folder: str) -> dict[str, Any]:
    """Save at the end of data whose last batch waits for another one."""
    arguments = make_arguments(folder, save_strategy="epoch", max_steps=4)
    trainer = attach(NotedTrainer(make_model(), arguments, train_dataset=Stream(10)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldfastWarning)
        trainer.train()
    return {"warned": [str(one.message) for one in caught if one.category is HoldfastWarning]}


class Terminates(TrainerCallback):
    """Sends SIGTERM to its own process, as a scheduler does before it takes the machine away."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        time.sleep(0.5)  # ranks ask each other for signals once a second
        if state.global_step == 6 and state.is_world_process_zero:
            os.kill(os.getpid(), signal.SIGTERM)


def run_preempted(folder: str, changes: dict[str, Any], terminate: bool) -> dict[str, Any]:
    trainer = attached(folder, changes, when=holdfast.when.preempted())
    if terminate:
        trainer.add_callback(Terminates())
    return train(trainer, folder)


def processing_files(folder: str) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    train(attach(make_trainer(folder, {"max_steps": 4}, processing_class=tokenizer)), folder)
    step = Path(folder) / "step-000000000004"
    opened = AutoTokenizer.from_pretrained(step)
    return {
        "names": sorted(os.listdir(step)),
        "template": opened.chat_template,
        "length": len(opened),
        "good": holdfast.open(step).verify().good,
    }


def train_into_objects(folder: str, root: str) -> dict[str, Any]:
    """Steps in an object store: train, resume with the best model at the end, and resume by address."""
    changes = {"eval_strategy": "steps", "eval_steps": 4, "save_total_limit": 2, "load_best_model_at_end": True}
    whole = train(make_trainer(f"{folder}-native", changes), f"{folder}-native", resume=None)
    train(attached(folder, changes, root, when=None), folder, kill_step=None)
    place, _, options = root.partition("?")
    again = train(attached(folder, changes, root), folder, resume=f"{place}/step-000000000012?{options}")
    return {"whole": whole, "again": again, "steps": holdfast.Checkpointer(root).steps(), "left": os.listdir(folder)}
