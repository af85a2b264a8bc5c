"""Started by torchrun in test_elastic.py: trains 8 steps, saves every second one, and dies as it is told.

Arguments: the root, the file to which rank 0 appends one line per step, and "raise" or "raise, kill".
"""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import holdfast


def main(root: str, log: str, deaths: str) -> None:
    dist.init_process_group("gloo")
    rank, life = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"]
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    with holdfast.Checkpointer(root, deadline_s=120) as checkpointer:
        step = checkpointer.restore(state) or 0
        while step < 8:
            step += 1
            torch.manual_seed(step)
            loss = model(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                with open(log, "a", encoding="utf-8") as lines:
                    lines.write(f"{life} {step} {loss.item().hex()}\n")
            if step % 2 == 0:
                checkpointer.save(step, state).result()
            if (life, step, rank) == ("0", 3, 1):
                raise RuntimeError("rank 1 fails in its first life")
            if "kill" in deaths and (life, step, rank) == ("1", 5, 0):
                os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
