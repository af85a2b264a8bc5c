"""`HoldfastManager`, a checkpoint manager of torchtitan that saves and loads with Holdfast."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtitan.components.checkpointer import MODEL, TRAIN_STATE, BaseCheckpointManager
from torchtitan.tools import filesystem
from torchtitan.tools.logging import logger

from holdfast import keep
from holdfast.api import load, open_checkpoint
from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import Mismatch, NotFound, Unsupported
from holdfast.integrations.torchtitan.hub_names import hub_statements
from holdfast.integrations.torchtitan.titan_state import joined, run_state, whole_shapes, without_excluded
from holdfast.mapping.program import Mapping

_NEWEST = -1  # torchtitan's step for "the newest"
_SEED = 0  # a checkpoint of the model alone, before training


class HoldfastManager(BaseCheckpointManager):  # type: ignore[misc]
    """Save and load the state of a torchtitan run. `save` returns at once, and training goes on."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """torchtitan's options, and whether the model is saved under the hub's names."""

        hub_names: bool = True
        """Save the model under the names of its Hugging Face adapter."""

    def __init__(
        self,
        config: Config,
        *,
        dataloader: Any,
        model_parts: list[nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        self.save_future = None  # background saves are finished by `close`
        self._config = config
        if config.initial_load_in_hf_quantized:
            raise Unsupported("initial_load_in_hf_quantized: convert the folder first, `holdfast convert FOLDER OUT`")
        assets = None if sd_adapter is None else sd_adapter.hf_assets_path
        hub_config = _hub_config(assets) if config.hub_names else None
        architecture = (getattr(hub_config, "architectures", None) or ["Model"])[0]
        model = joined(model_parts, architecture, hub_config)
        self._statements = _statements(model, model_parts, sd_adapter) if config.hub_names else None
        self._files = _tokenizer_files(assets)
        self._assets = assets
        self._state = run_state(model, optimizers, lr_schedulers, dataloader, states)
        self._checkpointer = Checkpointer(
            filesystem.join(base_folder, config.folder),
            keep=keep.last(config.keep_latest_k) if config.keep_latest_k else None,
            mapping=self._statements,
        )
        logger.info(f"Holdfast saves checkpoints to {self._checkpointer.storage.name}")

    def __del__(self) -> None:
        self.close()

    @torch.no_grad()
    def _load(self, step: int = _NEWEST) -> bool:
        """Restore `step`, by default the newest; else the initial checkpoint of the config. False if there is none."""
        found = self._checkpointer.peek() if step == _NEWEST else None
        if step == _NEWEST and found is None:
            return self._load_initial()
        seed = (step if found is None else found.step) == _SEED
        state = {MODEL: self._state[MODEL]} if seed else self._wanted()
        restored = self._checkpointer.restore(state, step=None if step == _NEWEST else step)
        if restored is None:
            raise NotFound(f"checkpoint.load_step={step}: no such step under {self._checkpointer.storage.name}")
        self._require_loaded(restored, state)
        logger.info(f"Holdfast restored step {restored} from {self._checkpointer.storage.name}")
        return True

    def _wanted(self) -> dict[str, Any]:
        """Return the state without the entries that `exclude_from_loading` names."""
        return without_excluded(self._state, self._config.exclude_from_loading)

    def _require_loaded(self, step: int, state: dict[str, Any]) -> None:
        """Raise Mismatch unless the trainer has the step that was restored."""
        trainer = state.get(TRAIN_STATE)
        if trainer is not None and getattr(trainer, "step", step) != step:
            raise Mismatch(f"step {step} was restored, and the train state is at step {trainer.step}")

    def _load_initial(self) -> bool:
        config = self._config
        path = config.initial_load_path or (self._assets if config.initial_load_in_hf else None)
        if path is None:
            logger.info("Holdfast found no checkpoint: this is a fresh start.")
            return False
        state = {MODEL: self._state[MODEL]} if config.initial_load_model_only else self._wanted()
        mapping = None
        if config.initial_load_in_hf or self._has_hub_names(path):
            if self._statements is None:
                raise Unsupported("initial_load_in_hf needs hub_names=True and a model with a state dict adapter")
            mapping = {MODEL: Mapping.parse(self._statements).reverse()}
        load(path, state, mapping=mapping)
        logger.info(f"Holdfast loaded {', '.join(state)} from {path}")
        return True

    def _has_hub_names(self, path: str) -> bool:
        """Return True if the checkpoint lacks names of the live model: a step of another run, under the hub's names."""
        if self._statements is None:
            return False
        live = {name for name, _ in self._state[MODEL].named_parameters()}
        return not live <= set(open_checkpoint(path).keys())

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save `curr_step` if it is due, and return True if so. Waits for the commit of the last step only."""
        if not self._is_due(curr_step, last_step):
            return False
        state = {MODEL: self._state[MODEL]} if curr_step == _SEED else self._state
        handle = self._checkpointer.save(curr_step, state, files=self._files)
        if last_step or curr_step == _SEED:
            handle.result()
        return True

    def _is_due(self, step: int, last_step: bool) -> bool:
        config = self._config
        if config.load_only:
            return False
        first = step == 1 and config.enable_first_step_checkpoint
        seed = step == _SEED and config.create_seed_checkpoint
        return last_step or first or seed or (step > 0 and step % config.interval == 0)

    def _maybe_wait_for_staging(self) -> None:
        """Do nothing: the next optimizer step waits on the device for the copies of a save."""

    def _wait_for_saving(self) -> None:
        self._checkpointer.finish()

    def _close(self) -> None:
        if hasattr(self, "_checkpointer"):
            self._checkpointer.close()


def _statements(model: nn.Module, parts: list[nn.Module], adapter: Any) -> list[str] | None:
    """Return the mapping to the hub's names; without an adapter that a mapping can express, None and a warning."""
    hooked = any(module._state_dict_hooks for part in parts for module in part.modules())
    try:
        if adapter is None:
            raise Unsupported("the model has no state dict adapter")
        return hub_statements(whole_shapes(model), parts, adapter)
    except Unsupported as error:
        if hooked:
            raise Unsupported(
                f"the model changes its state dict by hooks, and they cannot be made a mapping ({error}): use a "
                "config without fused weights"
            ) from error
        logger.warning(f"Holdfast saves the model under torchtitan's names, not the hub's: {error}")
        return None


def _hub_config(assets: str | None) -> Any:
    """Return the transformers config in the folder of the hub's assets, if both are there."""
    if assets is None or not (Path(assets) / "config.json").is_file():
        return None
    try:
        from transformers import AutoConfig
    except ImportError:
        logger.warning("transformers is not installed: checkpoints get no config.json")
        return None
    return AutoConfig.from_pretrained(assets)


def _tokenizer_files(assets: str | None) -> dict[str, Path] | None:
    """Return the tokenizer's files in the folder of the hub's assets, to be published with each step."""
    if assets is None or not Path(assets).is_dir():
        return None
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "vocab.json")
    return {name: Path(assets) / name for name in names if (Path(assets) / name).is_file()} or None
