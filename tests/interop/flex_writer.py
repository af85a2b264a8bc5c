"""Run by Paddle on two ranks: saves a flex checkpoint of sharded and replicated tensors, and the truth beside it.

Everything is small: a copy of what it writes is kept in tests/golden/paddle/.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.flex_checkpoint.dcp.sharded_weight import ShardedWeight


def values(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def main(folder: str) -> None:
    dist.init_parallel_env()
    mesh = dist.ProcessMesh([0, 1], dim_names=["x"])
    rank = dist.get_rank()
    truth: dict[str, np.ndarray] = {}

    def tensor(key: str, array: np.ndarray, placement: object, dtype: str = "float32") -> paddle.Tensor:
        whole = paddle.to_tensor(array).astype(dtype)
        truth[key] = whole.astype("float32").numpy() if dtype == "bfloat16" else whole.numpy()
        return dist.shard_tensor(whole, mesh, [placement])

    def part(key: str, array: np.ndarray) -> ShardedWeight:
        """A rank's rows of a bfloat16 tensor, which shard_tensor cannot cut on a CPU."""
        whole = paddle.to_tensor(array).astype("bfloat16")
        truth[key] = whole.astype("float32").numpy()
        rows = array.shape[0] // 2
        own = paddle.to_tensor(array[rank * rows : rank * rows + rows]).astype("bfloat16")
        return ShardedWeight(key.split("::")[1], own, own.shape, array.shape, (rank * rows, 0))

    def run(key: str, array: np.ndarray, cut: int) -> ShardedWeight:
        """A rank's run of elements, as the sharded optimizers hold flat buffers."""
        truth[key] = array
        owned = slice(0, cut) if rank == 0 else slice(cut, array.size)
        own = paddle.to_tensor(array.ravel()[owned])
        name = key.split("::")[1]
        return ShardedWeight(name, own, array.shape, array.shape, (0, 0), True, owned)

    state = {
        "model": {
            "rows.weight": tensor("model::rows.weight", values(1, 6, 4), dist.Shard(0)),
            "columns.weight": tensor("model::columns.weight", values(2, 4, 6), dist.Shard(1)),
            "narrow.weight": part("model::narrow.weight", values(3, 4, 6)),
            "whole.weight": tensor("model::whole.weight", values(4, 3, 5), dist.Replicate(), "bfloat16"),
            "uneven.weight": tensor("model::uneven.weight", values(5, 5, 3), dist.Shard(0)),
            "norm.weight": tensor("model::norm.weight", values(6, 7), dist.Replicate()),
            "count": tensor("model::count", np.arange(4), dist.Replicate(), "int64"),
        },
        "optimizer": {
            "rows.weight.moment1_0": tensor("optimizer::rows.weight/moment1_0", values(7, 6, 4), dist.Shard(0)),
            "rows.weight.moment2_0": run("optimizer::rows.weight/moment2_0", values(8, 6, 4), 10),
        },
    }
    dist.save_state_dict(state, folder)
    dist.save_state_dict(state, f"{folder}_safetensors", safetensors=True)
    dist.barrier()
    if rank == 0:
        np.savez(os.path.join(os.path.dirname(folder), "truth_flex_two_ranks.npz"), **truth)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(sys.argv[1])
