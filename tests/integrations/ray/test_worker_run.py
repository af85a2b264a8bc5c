"""What Ray says of a worker, and the root that follows."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import holdfast

fs: Any = None
RayCheckpointer: Any
WorkerRun: Any
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    try:
        import ray.train.torch  # noqa: F401  (a folder of this name is not enough)

        from holdfast.integrations.ray import RayCheckpointer
        from holdfast.integrations.ray.worker_run import WorkerRun

        fs = importlib.import_module("pyarrow.fs")
    except ImportError:
        fs = None

pytestmark = [pytest.mark.skipif(fs is None, reason="Ray is not installed: make ray"), pytest.mark.full]


def test_it_belongs_into_a_train_loop(tmp_path: Path):
    with pytest.raises(holdfast.InvalidArgument, match="the train loop of a TorchTrainer"):
        RayCheckpointer(tmp_path)


def test_the_first_version_of_ray_train_is_refused(tmp_path: Path):
    text = "from holdfast.integrations.ray import RayCheckpointer; RayCheckpointer('/tmp')"
    environment = os.environ | {"RAY_TRAIN_V2_ENABLED": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert "Unsupported: this is the first version of Ray Train" in ended.stderr


def test_roots(tmp_path: Path):
    run = WorkerRun(0, "/runs/a", fs.LocalFileSystem(), None)
    assert run.root(None) == "/runs/a/holdfast"
    assert run.root("/elsewhere") == "/elsewhere" and run.root("s3://bucket/a") == "s3://bucket/a"
    with pytest.raises(holdfast.InvalidArgument, match="root='runs/b' is relative"):
        run.root("runs/b")
    bucket = fs.S3FileSystem(anonymous=True, region="us-east-1")
    assert WorkerRun(0, "bucket/runs/a", bucket, None).root(None) == "s3://bucket/runs/a/holdfast"
    other = fs.SubTreeFileSystem("/", fs.LocalFileSystem())
    with pytest.raises(holdfast.InvalidArgument, match="on a subtree file system"):
        WorkerRun(0, "/runs/a", other, None).root(None)
