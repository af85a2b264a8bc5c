"""mergekit, the peer that merges are compared with, run in this process on one thread."""

import contextlib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.merging.models import tensors


def peer_merge(config: dict[str, Any], out: Path, *, seed: int | None = None, stable: bool = False):
    """Merge with mergekit and return its tensors. `stable` sorts magnitudes stably."""
    pytest.importorskip("mergekit", reason="requirements/dev.txt installs mergekit, the peer of merges")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _peer_merge(config, out, seed, stable)


def _peer_merge(config: dict[str, Any], out: Path, seed: int | None, stable: bool):
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(copy_tokenizer=False, quiet=True, random_seed=seed, write_model_card=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a sum of its own depends on them
    try:
        with _stable_sorts() if stable else contextlib.nullcontext():
            run_merge(MergeConfiguration.model_validate(config), str(out), options)
    finally:
        torch.set_num_threads(threads)
    return tensors(out)


@contextlib.contextmanager
def _stable_sorts():
    real = torch.argsort, torch.Tensor.argsort

    def argsort(tensor, dim=-1, descending=False):
        return torch.sort(tensor, dim=dim, descending=descending, stable=True).indices

    with mock.patch("torch.argsort", argsort), mock.patch.object(torch.Tensor, "argsort", argsort):
        yield
    assert (torch.argsort, torch.Tensor.argsort) == real
