"""One phase of the demo: a small language model on any mesh, from a checkpoint if there is one.

torchrun --nproc-per-node 4 -m demo.train out/demo --mesh 2x2 --until 40
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

import holdfast
from demo.text import TEXT

SEQUENCE, BATCH = 64, 12


class Loader:
    """Batches by position: the same global batch at the same step, whatever the number of ranks."""

    def __init__(self) -> None:
        self.tokens = torch.tensor(list(TEXT.encode()) * 2)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def next(self, rank: int, ranks: int) -> torch.Tensor:
        starts = [(self.position + index) * 37 % len(TEXT.encode()) for index in range(BATCH)]
        self.position += BATCH
        return torch.stack([self.tokens[start : start + SEQUENCE] for start in starts[rank::ranks]])


def build(mesh: DeviceMesh) -> LlamaForCausalLM:
    """A small Llama, cut by tensor parallelism if the mesh has it, then by FSDP2."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    if "tp" in (mesh.mesh_dim_names or ()):
        plan: dict[str, Any] = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for layer in range(config.num_hidden_layers):
            for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
                plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def make_mesh(text: str) -> DeviceMesh:
    sizes = tuple(int(size) for size in text.split("x"))
    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where checkpoints and losses go")
    parser.add_argument("--mesh", required=True, help="data parallel size, or data x tensor parallel: 3, 2x2")
    parser.add_argument("--save-at", type=int, help="the step to save at")
    parser.add_argument("--until", type=int, required=True, help="the last step")
    parser.add_argument("--again", help="save what was restored under this name, too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = make_mesh(arguments.mesh)
    train(arguments, mesh)
    dist.destroy_process_group()


def train(arguments: argparse.Namespace, mesh: DeviceMesh) -> None:
    model = build(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
    loader = Loader()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader, "name": "kelp"}
    dp = mesh["dp"]
    losses: dict[int, float] = {}
    with holdfast.Checkpointer(arguments.folder / "run") as checkpointer:
        start = checkpointer.restore(state) or 0
        say(f"{arguments.mesh} ranks: " + (f"resumed at step {start}" if start else "starting from nothing"))
        if arguments.again:
            holdfast.save(arguments.folder / arguments.again, state, step=start)
        for step in range(start + 1, arguments.until + 1):
            tokens = loader.next(dp.get_local_rank(), dp.size())
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses[step] = float(total) / dist.get_world_size()
            if step % 20 == 0:
                say(f"  step {step:3}  loss {losses[step]:.4f}")
            if step == arguments.save_at:
                handle = checkpointer.save(step, state)
                saved = handle.result()
                say(f"  saved {saved.path} in {handle.stall_ms:.0f} ms")
    if dist.get_rank() == 0:
        (arguments.folder / f"losses-{arguments.mesh}.json").write_text(json.dumps(losses))


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
