"""A decoder of the trainer, as its hand-written tensor parallelism cuts it and as a plan places it, one batch each."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from holdfast.train.layout import Layout
from holdfast.train.loss import MicroBatch, Objective
from holdfast.train.models.decoder import TIES, Decoder
from holdfast.train.models.initial import fill_initial
from holdfast.train.models.model_config import ModelConfig
from holdfast.train.parallel.gradients import finish_gradients
from holdfast.train.parallel.parallel_model import build
from tests.dist.train_cases import batches, model
from tests.spmd.listening import Listener


def whole_decoder(config: ModelConfig) -> Decoder:
    made = Decoder(config)
    fill_initial(made, config, 0, TIES if config.tie_word_embeddings else {})
    return made


def alone(config: ModelConfig, batch: MicroBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients on one device."""
    made = whole_decoder(config)
    loss = Objective(config, None)(made(batch.input_ids), batch.labels)
    loss.backward()
    return loss.item(), {key: p.grad for key, p in made.named_parameters() if p.grad is not None}


def by_hand(config: ModelConfig, batch: MicroBatch) -> Listener:
    """Listen to the trainer's own tensor parallelism."""
    replica = build(config, Layout(tp=dist.get_world_size()))
    with Listener(dist.get_world_size()) as heard:
        replica._objective(replica.module(batch.input_ids), batch.labels).backward()
        finish_gradients(replica.parameters(), replica._gradient_sums)
    return heard


def by_plan(config: ModelConfig, batch: MicroBatch, fields: dict[str, Any]) -> dict[str, Any]:
    """Listen to a model that a plan placed; and how far its loss and gradients are from those of one device."""
    import holdfast.spmd

    holdfast.spmd.enable()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    made = holdfast.spmd.distribute(whole_decoder(config), mesh, holdfast.spmd.Plan.from_dict(fields))
    with Listener(dist.get_world_size()) as heard:
        out = made(batch.input_ids)
        labels = distribute_tensor(batch.labels, mesh, [Replicate()], src_data_rank=None)
        kept = out if isinstance(out, tuple) else (out,)
        leaves = tuple(tensor.detach().requires_grad_() for tensor in kept)
        before = heard.bytes
        loss = Objective(config, None)(leaves if isinstance(out, tuple) else leaves[0], labels)
        loss.backward()
        of_loss = heard.bytes - before
        torch.autograd.backward(kept, [leaf.grad for leaf in leaves])
    expected, gradients = alone(config, batch)
    furthest = 0.0
    for key, parameter in made.named_parameters():
        gradient = parameter.grad
        assert isinstance(gradient, DTensor) and gradient.placements == parameter.placements, key
        difference = (gradient.full_tensor() - gradients[key]).abs().max() / gradients[key].abs().max()
        furthest = max(furthest, difference.item())
    return {
        "planned": heard.bytes,
        "loss bytes": of_loss,
        "heard": dict(heard.received),
        "loss": abs(loss.full_tensor().item() - expected) / abs(expected),
        "gradients": furthest,
    }


def compare(family: str, changes: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """On a rank: what each of both communicates, in bytes, and how exact the planned one is."""
    torch.set_num_threads(1)
    config, batch = model(family, **changes), batches(1)[0]
    hand = by_hand(config, batch)
    return {"hand": hand.bytes, "by hand": dict(hand.received), **by_plan(config, batch, fields)}


def compare_all(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """On a rank: every case in turn, so that DTensor learns each operator's sharding once."""
    return [compare(*case) for case in cases]
