"""Tensor parallelism with DTensor: projections sharded by heads and hidden units, the rest by sequence.

Between modules every rank has a plain tensor: its slice of the sequence. Norms and routers work on
that slice; attention and feed-forward gather the sequence and return a slice.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from holdfast.train.models.decoder import Decoder
from holdfast.train.models.sparse_mlp import SparseMoe

SEQUENCE = 1  # the sharded dim of activations


def apply_tensor_parallel(stage: Decoder, mesh: DeviceMesh) -> None:
    """Shard a stage except its experts; `shard_experts` shards those."""
    plan: dict[str, Any] = {}
    if stage.is_first:
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE))
    for number, block in stage.model.layers.items():
        plan |= {f"model.layers.{number}.{name}": style for name, style in _block_plan(block).items()}
    if stage.is_last:
        plan["model.norm"] = _on_slices(SEQUENCE)
    if stage.has_head:
        plan["lm_head"] = ColwiseParallel(input_layouts=Shard(SEQUENCE), output_layouts=Shard(-1))
    parallelize_module(stage, mesh, plan)
    stage.tie()
    stage.tp_group = mesh.get_group()


def _block_plan(block: Any) -> dict[str, Any]:
    plan: dict[str, Any] = {
        "input_layernorm": _on_slices(SEQUENCE),
        "post_attention_layernorm": _on_slices(SEQUENCE),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(SEQUENCE), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
    }
    if not isinstance(block.self_attn.q_norm, nn.Identity):
        heads = 2
        plan |= {"self_attn.q_norm": _on_slices(heads), "self_attn.k_norm": _on_slices(heads)}
    if not isinstance(block.mlp, SparseMoe):
        return plan | _feed_forward_plan("mlp")
    plan["mlp.gate"] = _LocalLinear()
    if block.mlp.shared_expert is not None:
        plan |= _feed_forward_plan("mlp.shared_expert") | {"mlp.shared_expert_gate": _LocalLinear()}
    return plan


def _feed_forward_plan(name: str) -> dict[str, Any]:
    return {
        name: PrepareModuleInput(input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),)),
        f"{name}.gate_proj": ColwiseParallel(),
        f"{name}.up_proj": ColwiseParallel(),
        f"{name}.down_proj": RowwiseParallel(output_layouts=Shard(SEQUENCE)),
    }


class _LocalLinear(ParallelStyle):
    """The style of a router: its weight is replicated, its input and output are the rank's slice of the sequence.

    As a DTensor the slices of several sequences could not be flattened for the product on torch 2.11.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, _replicate)


def _replicate(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the parameters of a module DTensors; every rank has the same values."""
    for key, parameter in module.named_parameters(recurse=False):
        placed = DTensor.from_local(parameter, mesh, [Replicate()], run_check=False)
        module.register_parameter(key, nn.Parameter(placed, requires_grad=parameter.requires_grad))


def _on_slices(dim: int) -> SequenceParallel:
    """Return the style of a module with replicated parameters and an input sharded along `dim`."""
    return SequenceParallel(sequence_dim=dim, use_local_output=True)
