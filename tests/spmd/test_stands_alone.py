"""holdfast.spmd stands alone: its folder, torch and the standard library are enough to run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import holdfast
from holdfast import spmd

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "holdfast"

# `holdfast` is a namespace package here: the copy has no holdfast/__init__.py, as a wheel of spmd alone would not.
PROGRAM = """
    import importlib
    import pkgutil
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    # a holdfast that is installed, as an editable one is, would come before a namespace package
    sys.path[:] = [entry for entry in sys.path if not (Path(entry) / "holdfast" / "__init__.py").exists()]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
    import holdfast.spmd

    here = Path(sys.argv[1]).resolve()
    for module in pkgutil.walk_packages(holdfast.spmd.__path__, "holdfast.spmd."):
        importlib.import_module(module.name)
    loaded = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "holdfast"}
    strays = [name for name in loaded if name != "holdfast" and not name.startswith("holdfast.spmd")]
    assert not strays, strays
    for name, module in loaded.items():
        file = getattr(module, "__file__", None)
        assert file is None or here in Path(file).resolve().parents, f"{name} is {file}"

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    assert holdfast.spmd.enable() == []
    x = torch.arange(12.0).reshape(4, 3)
    placed = distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])
    placed[1:3] = 7.0
    x[1:3] = 7.0
    assert torch.equal(placed.cumsum(-2).full_tensor(), x.cumsum(-2))
    assert holdfast.spmd.SpmdError.__base__ is Exception
    print(f"{len(loaded)} modules")
    holdfast.spmd.disable()
    dist.destroy_process_group()
"""


def test_a_copy_of_the_folder_runs_without_the_rest(tmp_path: Path) -> None:
    shutil.copytree(SOURCE / "spmd", tmp_path / "holdfast" / "spmd", ignore=shutil.ignore_patterns("__pycache__"))
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    count = int(ran.stdout.split()[0])
    assert count >= len(list((SOURCE / "spmd").rglob("*.py")))


def test_the_contract_forbids_every_other_module() -> None:
    """A module that is new in Holdfast has to be named in the contract, or spmd could import it."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = [one for one in contracts if one.get("source_modules") == ["holdfast.spmd"]]
    modules = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    others = modules - {"__init__", "__main__", "spmd"}
    assert set(contract["forbidden_modules"]) == {f"holdfast.{name}" for name in others}


def test_training_does_not_load_it() -> None:
    program = (
        "import sys, holdfast.train.models.experts; print([name for name in sys.modules if 'holdfast.spmd' in name])"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_its_errors_are_those_of_holdfast_where_there_is_holdfast() -> None:
    pairs = [
        (spmd.SpmdError, holdfast.HoldfastError),
        (spmd.SpmdArgumentError, holdfast.InvalidArgument),
        (spmd.PlanMismatch, holdfast.Mismatch),
        (spmd.PlanNotFound, holdfast.NotFound),
        (spmd.UnsupportedCall, holdfast.Unsupported),
        (spmd.SpmdWarning, holdfast.HoldfastWarning),
    ]
    for own, root in pairs:
        assert issubclass(own, root), own
