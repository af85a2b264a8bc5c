"""A small checkpoint as Megatron-Core writes it in the format torch_dist: a real folder of torch DCP."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tests.sources.made import save_dcp, torch_file

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61,
}  # fmt: skip
ARGS = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "kv_channels": 8, "tensor_model_parallel_size": 2, "ffn_hidden_size": 48,
    "norm_epsilon": 1e-6, "rotary_base": 10000, "swiglu": True, "normalization": "RMSNorm",
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "vocab_size": 61,
    "max_position_embeddings": 2048, "padded_vocab_size": 128,
}  # fmt: skip


def layer_weights() -> dict[str, torch.Tensor]:
    """The weights of all layers of a Llama, each in one tensor."""
    shapes = {
        "self_attention.linear_qkv.weight": (64, 32), "self_attention.linear_qkv.layer_norm_weight": (32,),
        "self_attention.linear_proj.weight": (32, 32), "mlp.linear_fc1.weight": (96, 32),
        "mlp.linear_fc1.layer_norm_weight": (32,), "mlp.linear_fc2.weight": (32, 48),
    }  # fmt: skip
    return {f"decoder.layers.{name}": torch.randn(2, *shape) for name, shape in shapes.items()}


def write_iteration(folder: Path, args: dict[str, Any] | None = ARGS, *, tied: bool = False) -> Path:
    """A torch_dist checkpoint of a Llama with a padded vocabulary, without common.pt if there are no args."""
    torch.manual_seed(0)
    state = layer_weights() | {"decoder.final_layernorm.weight": torch.randn(32)}
    ends = ("embedding.word_embeddings.weight", "output_layer.weight")
    state |= {name: torch.randn(128, 32) for name in ends[: 1 if tied else 2]}
    save_dcp(folder, state)
    if args is not None:
        args = {**args, "untie_embeddings_and_output_weights": not tied}
        common = {"args": argparse.Namespace(**args), "iteration": int(folder.name.removeprefix("iter_"))}
        (folder / "common.pt").write_bytes(torch_file(common))
    return folder


def write_run(root: Path, *iterations: int) -> Path:
    """The root of a run, whose tracker file names the last of the iterations."""
    for number in iterations:
        write_iteration(root / f"iter_{number:07d}")
    (root / "latest_checkpointed_iteration.txt").write_text(f"{iterations[-1]}\n")
    return root


def write_hub(folder: Path, **changes: Any) -> Path:
    """A folder with nothing but the config.json of the model, as changed."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return folder
