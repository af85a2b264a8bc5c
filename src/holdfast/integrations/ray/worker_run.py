"""`WorkerRun`: this worker and its run, as Ray Train describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs
import ray.train
import torch.distributed as dist

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.storage import is_address

_SCHEMES = {"s3": "s3", "gcs": "gs"}  # the file systems of pyarrow whose paths Holdfast can address
_FOLDER = "holdfast"


@dataclass(frozen=True, slots=True)
class WorkerRun:
    """The rank of this worker, and the folder of the run. Local mode has no folder: everything of it is None."""

    rank: int
    experiment: str | None  # a path on the file system
    files: pyarrow.fs.FileSystem | None
    ray_keeps: int | None  # CheckpointConfig(num_to_keep)

    @staticmethod
    def current() -> WorkerRun:
        """Return the run of the worker that asks; raises InvalidArgument outside of a train loop."""
        if not hasattr(ray.train, "CheckpointUploadMode"):
            raise Unsupported("this is the first version of Ray Train: set RAY_TRAIN_V2_ENABLED=1")
        try:
            context = ray.train.get_context()
        except RuntimeError as error:
            raise InvalidArgument(
                f"RayCheckpointer belongs into the train loop of a TorchTrainer, where Ray knows the worker: {error}"
            ) from error
        _require_group(context)
        try:
            storage = context.get_storage()
        except NotImplementedError:  # local mode
            return WorkerRun(context.get_world_rank(), None, None, None)
        return WorkerRun(
            context.get_world_rank(), storage.experiment_fs_path, storage.storage_filesystem, _number_to_keep()
        )

    @property
    def is_local(self) -> bool:
        """True if the folder of the run is on a file system that this host has mounted."""
        return isinstance(self.files, pyarrow.fs.LocalFileSystem)

    def root(self, given: str | os.PathLike[str] | None) -> str:
        """Return the root of the checkpoints: the one that is given, or a folder of the run."""
        if given is None:
            return self._own_root()
        text = os.fspath(given)
        in_working_folder = not (is_address(text) or Path(text).expanduser().is_absolute())
        if in_working_folder and self.experiment is not None:
            raise InvalidArgument(
                f"root={text!r} is relative, and Ray's workers run in folders of their own: give an "
                "absolute path, or no root, for the folder of the run"
            )
        return text

    def _own_root(self) -> str:
        if self.experiment is None or self.files is None:
            raise InvalidArgument("Ray's local mode has no storage path: give RayCheckpointer a root")
        if self.is_local:
            return f"{self.experiment}/{_FOLDER}"
        if self.files.type_name in _SCHEMES:
            return f"{_SCHEMES[self.files.type_name]}://{self.experiment}/{_FOLDER}"
        raise InvalidArgument(
            f"RunConfig.storage_path is on a {self.files.type_name} file system, which Holdfast has no address for: "
            "give RayCheckpointer a root"
        )


def _require_group(context: Any) -> None:
    """Raise InvalidArgument unless the workers are the ranks of torch.distributed."""
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    workers = (context.get_world_rank(), context.get_world_size())
    if ranks != workers:
        raise InvalidArgument(
            f"Ray's worker {workers[0]} of {workers[1]} is rank {ranks[0]} of {ranks[1]} in torch.distributed: use "
            "TorchTrainer, which makes the process group of all workers"
        )


def _number_to_keep() -> int | None:
    """Return how many checkpoints Ray keeps, which its public context does not tell."""
    from ray.train.v2._internal.execution.context import get_train_context

    number: int | None = get_train_context().train_run_context.get_run_config().checkpoint_config.num_to_keep
    return number
