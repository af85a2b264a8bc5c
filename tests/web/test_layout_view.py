"""Layouts under a mesh: the boxes cover the tensor, as the placements say; hostile meshes are refused."""

import numpy as np
import pytest

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.storage.local import LocalStorage
from holdfast.web.layout_view import layout_fields, mesh_text, parse_mesh
from holdfast.web.open_steps import OpenStep
from tests.web.sample_runs import write_step

KEY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    root = tmp_path_factory.mktemp("layout")
    ones = np.ones((6, 4), np.float32)
    model = {KEY: ones, "model.layers.1.mlp.down_proj.weight": ones, "model.norm.weight": np.ones(5, np.float32)}
    optimizer = {f"{KEY}/exp_avg": ones, f"{KEY}/step": np.array(1.0, np.float32)}
    path = write_step(root, 1, {"model": model, "optimizer": optimizer})
    return OpenStep(Checkpoint(LocalStorage(root), path.name))


@pytest.mark.parametrize("mesh", ["dp:1", "dp:4", "fsdp:4", "tp:2", "fsdp:2,tp:3", "dp:2,tp:2,pp:2", "fsdp:16"])
@pytest.mark.parametrize("key", [KEY, "model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_the_boxes_cover_the_tensor_on_every_copy(opened, mesh, key):
    found = layout_fields(opened, "model", key, mesh)
    shape = parse_mesh(mesh)
    held = np.zeros((shape.world, *found["shape"]), int)
    for box in found["boxes"]:
        where = tuple(slice(a, a + n) for a, n in zip(box["offsets"], box["sizes"], strict=True))
        for rank in box["ranks"]:
            held[(rank, *where)] += 1
    assert held.max() == 1
    covered = held.sum(axis=0)
    assert covered.min() == covered.max() >= 1
    wants = {row["rank"]: row["wants"] for row in found["restore"]}
    assert all(wants[rank] == 4 * held[rank].sum() for rank in wants)
    reads = [one for row in found["restore"] for one in row["reads"]]
    blocks = {(one["block_begin"], one["block_end"]) for one in reads}
    assert sum(one["end"] - one["begin"] for one in reads) == found["bytes"]
    assert len(reads) == len(blocks) == len(found["files"]) == 1


def test_placements_are_said_in_words(opened):
    assert layout_fields(opened, "model", KEY, "tp:2")["placements"] == "tp: sharded along dim 0"
    down = layout_fields(opened, "model", "model.layers.1.mlp.down_proj.weight", "dp:2,tp:2")
    assert down["placements"] == "dp: replicated, tp: sharded along dim 1"


def test_a_state_of_the_optimizer_is_placed_as_its_parameter(opened):
    state, parameter = (
        layout_fields(opened, *at, "fsdp:3,tp:2")["boxes"] for at in (("optimizer", f"{KEY}/exp_avg"), ("model", KEY))
    )
    assert state == parameter
    assert layout_fields(opened, "optimizer", f"{KEY}/step", "fsdp:3")["boxes"][0]["ranks"] == [0, 1, 2]


@pytest.mark.parametrize(
    "mesh",
    ["", "dp", "dp:0", "dp:-1", "dp:2;tp:2", "dp:99999", "tp:1000,dp:1000", "x:2", "dp:2,fsdp:2", "pp:3", "dp:1e3"],
)
def test_hostile_meshes_are_refused(opened, mesh):
    with pytest.raises(InvalidArgument):
        layout_fields(opened, "model", KEY, mesh)


@pytest.mark.parametrize("mesh", ["ep:2", "dp:2" + ",dp:9" * 2000, "__proto__:1", "dp:\u0662"])
def test_more_hostile_meshes_are_refused(opened, mesh):
    with pytest.raises(InvalidArgument):
        layout_fields(opened, "model", KEY, mesh)


def test_an_unknown_tensor_is_not_found(opened):
    with pytest.raises(NotFound):
        layout_fields(opened, "model", "nothing", "dp:1")


def test_the_mesh_of_a_step_is_the_first_one():
    assert mesh_text({"dp": 4, "tp": 2}) == "dp:4,tp:2"
    assert mesh_text({"<b>": 4, "tp": -1}) == mesh_text(None) == "dp:1"
