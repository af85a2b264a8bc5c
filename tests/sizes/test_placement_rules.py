"""Roles of tensors by their keys: stages, tensor-parallel dims, experts."""

import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.format.dtypes import dtype_named
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.placement_rules import PlacementRules, TensorRole
from holdfast.sizes.run_shape import RunShape
from holdfast.sizes.run_spreads import RunSpreads

BF16 = dtype_named("bfloat16")


def tensor(key, *shape):
    return ModelTensor(key, BF16, BF16, shape)


def role(key, *shape, **run):
    made = tensor(key, *shape)
    return PlacementRules([made], {}, RunShape(**run)).role(made)


@pytest.mark.parametrize(
    ("key", "shape", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", (8, 4), 0),
        ("model.layers.0.self_attn.q_proj.bias", (8,), 0),
        ("model.layers.0.self_attn.o_proj.weight", (4, 8), 1),
        ("model.layers.0.mlp.down_proj.bias", (4,), None),
        ("model.layers.0.input_layernorm.weight", (4,), None),
        ("model.embed_tokens.weight", (64, 4), 0),
        ("transformer.h.0.attn.c_attn.weight", (4, 12), 1),
        ("transformer.h.0.attn.c_attn.bias", (12,), 0),
        ("transformer.h.0.attn.c_proj.weight", (4, 4), 0),
        ("transformer.h.0.attn.c_proj.bias", (4,), None),
        ("decoder.block.0.layer.1.EncDecAttention.q.weight", (8, 4), 0),
        ("decoder.block.0.layer.2.DenseReluDense.wo.weight", (4, 8), 1),
        ("model.layers.0.self_attn.q_proj.qweight", (1, 8), 1),
        ("model.layers.0.mlp.down_proj.scales", (2, 8), 0),
        ("model.layers.0.mlp.down_proj.weight_scale", (8, 1), None),
    ],
)
def test_tensor_parallel_dims(key, shape, dim):
    assert role(key, *shape, tp=2) == TensorRole((0,), tensor_dim=dim)
    assert role(key, *shape) == TensorRole((0,))


def test_stages():
    keys = ["embed_tokens.weight", *(f"layers.{n}.up_proj.weight" for n in range(5)), "norm.weight", "lm_head.weight"]
    tensors = [tensor(key, 4, 4) for key in keys]
    rules = PlacementRules(tensors, {"lm_head.weight": "embed_tokens.weight"}, RunShape(pp=2))
    assert [rules.role(each).stages for each in tensors] == [(0, 1), (0,), (0,), (1,), (1,), (1,), (1,), (1,)]


def test_numbers_inside_a_layer_are_no_layers():
    keys = [f"decoder.block.{n}.layer.{part}.q.weight" for n in range(4) for part in range(3)]
    tensors = [tensor(key, 4, 4) for key in keys]
    rules = PlacementRules(tensors, {}, RunShape(pp=4))
    assert [rules.role(each).stages for each in tensors] == [(n,) for n in range(4) for _ in range(3)]


def test_a_vision_tower_with_more_tensors_than_the_text_is_on_the_first_stage():
    text = [tensor(f"model.language_model.layers.{n}.up_proj.weight", 64, 64) for n in range(4)]
    names = [f"blocks.{n}.{part}" for n in range(8) for part in ("norm1", "norm2", "attn.qkv")]
    vision = [tensor(f"model.visual.{name}.weight", 4, 4) for name in (*names, "patch_embed.proj", "merger.fc1")]
    rules = PlacementRules([*vision, *text], {}, RunShape(pp=2))
    assert [rules.role(each).stages for each in text] == [(0,), (0,), (1,), (1,)]
    assert {rules.role(each).stages for each in vision} == {(0,)}


@pytest.mark.parametrize(
    ("key", "stage"),
    [
        ("model.encoder.conv1.weight", 0),
        ("model.encoder.layer_norm.weight", 0),
        ("multi_modal_projector.linear_1.weight", 0),
        ("model.mtp.layers.0.up_proj.weight", 1),
        ("model.mtp.norm.weight", 1),
        ("model.decoder.layer_norm.weight", 1),
        ("score.weight", 1),
    ],
)
def test_what_is_outside_of_the_layers(key, stage):
    stacks = {"encoder": 4, "decoder": 8}
    layers = [tensor(f"model.{name}.layers.{n}.fc1.weight", size, 4) for name, size in stacks.items() for n in range(4)]
    made = tensor(key, 4, 4)
    assert PlacementRules([*layers, made], {}, RunShape(pp=2)).role(made).stages == (stage,)


def test_experts_are_dealt_to_owners():
    tensors = [tensor(f"layers.0.mlp.experts.{n}.up_proj.weight", 4, 4) for n in range(8)]
    shape = RunShape(dp=4, tp=2, ep=2)
    rules = PlacementRules(tensors, {}, shape)
    assert [rules.role(each).expert_owner for each in tensors] == [0, 0, 1, 1, 2, 2, 3, 3]
    held = RunSpreads(tensors, rules, shape).of(tensors[2]).parameter  # the second rank of the tensor group
    assert held.ranks == {1, 5}
    with pytest.raises(InvalidArgument, match="8 experts cannot be dealt to 3 ranks"):
        PlacementRules(tensors, {}, RunShape(dp=3, ep=3)).role(tensors[0])


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_stacked_experts_are_dealt_along_their_first_dim(zero):
    stacked = tensor("layers.0.mlp.experts.gate_up_proj", 8, 6, 4)
    shape = RunShape(dp=4, tp=2, ep=2, zero=zero)
    spreads = RunSpreads([stacked], PlacementRules([stacked], {}, shape), shape).of(stacked)
    for spread, shards in ((spreads.parameter, zero == 3), (spreads.gradient, zero > 1), (spreads.state, zero > 0)):
        volumes = {}
        for rank, box in spread.boxes(stacked.shape):
            volumes[rank] = volumes.get(rank, 0) + box.volume
            assert box.offsets[0] // 2 == rank % 4  # two experts for each of four owners, twice
        assert volumes == dict.fromkeys(range(8), 2 * 6 * 4 // (2 if shards else 1))
    with pytest.raises(InvalidArgument, match="cannot be dealt"):
        role("layers.0.mlp.experts.gate_up_proj", 6, 4, 4, dp=4, ep=4)


def test_copies_are_of_weights_that_layers_multiply_with():
    names = {
        "layers.0.up_proj.weight": (32, 16),
        "layers.0.experts.gate_up_proj": (3, 32, 16),
        "layers.0.up_proj.bias": (32,),
        "layers.0.odd_proj.weight": (32, 15),
        "layers.0.mlp.gate.weight": (32, 16),
        "lm_head.weight": (32, 16),
        "embed_tokens.weight": (32, 16),
    }
    tensors = [tensor(key, *shape) for key, shape in names.items()]
    rules = PlacementRules(tensors, {}, RunShape())
    assert [rules.is_computed(each) for each in tensors] == [True, True, False, False, False, False, False]
