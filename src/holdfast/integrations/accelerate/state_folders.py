"""`attach`: an Accelerator's own `save_state` and `load_state`, with Holdfast's checkpoints as the folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from holdfast import keep
from holdfast.api import load, save
from holdfast.checkpointer import Checkpointer
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from holdfast.core.names import folder_step, step_folder
from holdfast.integrations.accelerate.prepared_state import PreparedState


def attach(
    accelerator: Accelerator,
    root: str | os.PathLike[str] | None = None,
    *,
    extra: MutableMapping[str, Any] | None = None,
    **options: Any,
) -> StateFolders:
    """Let `accelerator.save_state` and `load_state` write and read Holdfast checkpoints; return the controls.

    With automatic_checkpoint_naming `save_state()` returns at once and the checkpoints are the steps of a run under
    `root`, by default `project_dir/checkpoints`; `total_limit` is `keep.last`. Otherwise `save_state(folder)` blocks
    until the folder is durable. `options` are those of `holdfast.Checkpointer`, for automatic naming.
    """
    folders = StateFolders(accelerator, root, extra, options)
    vars(accelerator).update(save_state=folders.save_state, load_state=folders.load_state)
    return folders


class StateFolders:
    """The methods that `attach` puts in the place of `save_state` and `load_state`, and their controls."""

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | os.PathLike[str] | None,
        extra: MutableMapping[str, Any] | None,
        options: dict[str, Any],
    ) -> None:
        self._prepared = PreparedState(accelerator, extra)
        self._accelerator = accelerator
        project = accelerator.project_configuration
        if project.save_on_each_node:
            raise Unsupported("save_on_each_node=True: Holdfast writes one folder for all nodes, on shared storage")
        self.checkpointer: Checkpointer | None = None
        if project.automatic_checkpoint_naming:
            if root is None and accelerator.project_dir is None:
                raise InvalidArgument("automatic_checkpoint_naming without a project_dir: give attach a root")
            if project.total_limit is not None:
                options = {"keep": keep.last(project.total_limit)} | options
            self._root = os.fspath(os.path.join(accelerator.project_dir, "checkpoints") if root is None else root)
            self.checkpointer = Checkpointer(self._root, **options)
        elif root is not None or options:
            raise InvalidArgument(
                "attach: a root and options need ProjectConfiguration(automatic_checkpoint_naming=True); without it "
                "save_state gets the folder"
            )

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over one epoch of a prepared loader, after `load_state` from the saved batch on."""
        return self._prepared.batches(loader)

    @property
    def epoch(self) -> int:
        """The epoch to begin or go on with."""
        return self._prepared.epoch

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> Path:
        """Save the state; return its folder, which with automatic naming appears once the save is committed."""
        if not safe_serialization:
            raise Unsupported("save_state(safe_serialization=False): Holdfast writes safetensors only")
        if save_model_func_kwargs:
            raise Unsupported(f"save_state: {', '.join(sorted(save_model_func_kwargs))}: options of another writer")
        if self._accelerator._save_model_state_pre_hook:
            raise Unsupported("save_state: a hook of register_save_state_pre_hook expects files that are not written")
        self._prepared.require_saveable()
        project = self._accelerator.project_configuration
        step = project.iteration
        if self.checkpointer is not None:
            self.checkpointer.save(step, self._prepared.objects())
            folder = Path(self._root) / step_folder(step)
        else:
            if output_dir is None:
                raise InvalidArgument("save_state: give a folder, or set automatic_checkpoint_naming")
            folder = Path(output_dir).expanduser()
            save(folder, self._prepared.objects())
        project.iteration = step + 1
        return folder

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a folder, or the newest good checkpoint with automatic naming; raises NotFound if none exists.

        A loop that goes on with `batches` is exact. One that skips batches by itself, as with accelerate's own
        folders, draws other random numbers than the run that never stopped.
        """
        if load_kwargs or load_model_func_kwargs:
            names = sorted({*(load_kwargs or {}), *load_model_func_kwargs})
            raise Unsupported(f"load_state: {', '.join(names)}: options of another reader")
        if self._accelerator._load_model_state_pre_hook:
            raise Unsupported("load_state: a hook of register_load_state_pre_hook expects files that are not there")
        objects = self._prepared.objects()
        state = dict(objects)
        folder = None if input_dir is None else Path(input_dir).expanduser()
        if self.checkpointer is not None and (folder is None or folder.parent.resolve() == Path(self._root).resolve()):
            wanted = None if folder is None else folder_step(folder.name)
            found = self.checkpointer.restore(state, step=wanted)
            if found is None:
                raise NotFound(f"{self._root}: no checkpoint to load; begin without load_state")
            self._accelerator.project_configuration.iteration = found + 1
        elif folder is None:
            raise InvalidArgument("load_state: give a folder, or set automatic_checkpoint_naming")
        else:
            _require_checkpoint(folder)
            load(folder, state)
        self._prepared.restored(objects, state)
        self._prepared.offer_position()

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for the save in flight; return False after `timeout` seconds."""
        return self.checkpointer is None or self.checkpointer.finish(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Finish the save in flight and release the writer."""
        if self.checkpointer is not None:
            self.checkpointer.close(timeout)


def _require_checkpoint(folder: Path) -> None:
    if not folder.is_dir():
        raise NotFound(f"{folder}: no such folder")
    if any(folder.glob("random_states_*.pkl")):
        raise Unsupported(
            f"{folder}: written by accelerate itself, with pickles: load it before attach(accelerator), then save anew"
        )
