"""Pushes to the hub: the model of a committed step, and the end of training without the steps in output_dir."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, SaveStrategy

from holdfast.core.names import is_holdfast_name, is_tensor_file

trainer_module: Any = importlib.import_module("transformers.trainer")  # its names are not declared exported

# Everything that Holdfast keeps under a root, for uploads of the folder that contains it.
ROOT_PATTERNS = ("step-*/**", "abandoned-step-*/**", "damaged-step-*/**", ".*", ".*/**")


def push_step(trainer: Any, folder: str) -> None:
    """Upload a committed step as hub_strategy says: its model, and the whole step if checkpoints are asked for."""
    args = trainer.args
    if not trainer.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
        return
    running = trainer.push_in_progress
    if not args.hub_always_push and running is not None and not running.is_done():
        return
    trainer.callback_handler.on_push_begin(args, trainer.state, trainer.control)
    by_steps = args.save_strategy == SaveStrategy.STEPS
    place = f"step {trainer.state.global_step}" if by_steps else f"epoch {int(trainer.state.epoch)}"
    message = f"Training in progress, {place}"
    options = {"repo_id": trainer.hub_model_id, "folder_path": folder, "token": args.hub_token}
    options |= {"run_as_future": True, "revision": args.hub_revision}
    api = trainer_module.hf_api()
    jobs = [api.upload_folder(**options, commit_message=message, allow_patterns=_model_files(folder))]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        last = args.hub_strategy == HubStrategy.CHECKPOINT
        name = "last-checkpoint" if last else f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
        jobs.append(api.upload_folder(**options, path_in_repo=name, commit_message=f"{message}, checkpoint"))
    if running is None or running.is_done():
        trainer.push_in_progress = trainer_module.PushInProgress(jobs)
    else:
        running.jobs.extend(jobs)


def _model_files(folder: str) -> list[str]:
    """Return the files of the model and its processing class in a step."""
    names = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
    return [name for name in names if _belongs_to_model(name)]


def _belongs_to_model(name: str) -> bool:
    if name in ("holdfast.json", "state.json", "trainer_state.json"):
        return False
    if is_tensor_file(name) or name.endswith((".safetensors", ".safetensors.index.json")):
        return name.startswith(("model-", "model.", "adapter_model."))
    return is_holdfast_name(name) or not name.startswith(".")


@contextmanager
def without_steps() -> Iterator[None]:
    """Leave the steps out of what Trainer uploads: its own patterns know only of checkpoint-N."""
    original = trainer_module.hf_api

    def hf_api(*args: Any, **kwargs: Any) -> Any:
        return _ApiWithoutSteps(original(*args, **kwargs))

    trainer_module.hf_api = hf_api
    try:
        yield
    finally:
        trainer_module.hf_api = original


class _ApiWithoutSteps:
    """The hub's client; uploads of folders ignore what Holdfast keeps."""

    def __init__(self, api: Any) -> None:
        self._api = api

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, **options: Any) -> Any:
        ignored = options.pop("ignore_patterns", None) or []
        return self._api.upload_folder(**options, ignore_patterns=[*ignored, *ROOT_PATTERNS])
