"""Writes the seeds anew: `python -m tests.fuzz.seeds`."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.sources.made import save_dcp, torch_file

HERE = Path(__file__).parent


def write() -> None:
    """One file of each kind, as small as it can be with every kind of value in it."""
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "model": {"a": base, "t": base.T, "part": base[:, 2:4], "b": torch.ones(2).bfloat16()},
        "optimizer": {
            "state": {0: {"step": torch.tensor(1.0), "exp_avg": base}},
            "param_groups": [{"lr": 0.1, "params": [0]}],
        },
        "step": 3,
        "array": np.arange(3),
        "note": {"pair": (1, None), "size": torch.Size([2])},
    }
    (HERE / "torch.seed").write_bytes(torch_file(state))
    (HERE / "legacy.seed").write_bytes(torch_file(state, zipped=False))
    with tempfile.TemporaryDirectory() as top:
        del state["array"]
        folder = save_dcp(Path(top) / "c", state)
        metadata, items = (folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()
    (HERE / "dcp.seed").write_bytes(struct.pack("<I", len(metadata)) + metadata + items)


if __name__ == "__main__":
    write()
