"""Comparisons against numpy: relative norms, exact counts, folded experts, other formats through a mapping."""

import math

import numpy as np
import pytest
from safetensors.numpy import save_file

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import InvalidArgument
from holdfast.sources import open_stored
from holdfast.storage.local import LocalStorage
from holdfast.web.open_steps import OpenStep
from holdfast.web.page_jobs import PageJob
from holdfast.web.tensor_changes import TensorChange, compare_steps, heat_map, mapped_side
from tests.web.sample_runs import model_arrays, write_step


def opened(root, step, arrays, **more):
    return OpenStep(Checkpoint(LocalStorage(root), write_step(root, step, {"model": arrays}, **more).name))


def compared(one, two, mapping=None):
    return compare_steps(PageJob("", 100), mapped_side(one, None), mapped_side(two, mapping), "model")


def test_the_change_of_each_cell_is_its_relative_norm(tmp_path):
    before, after = model_arrays(0), model_arrays(5, changed=(1, 3))
    after["added.weight"] = np.ones(3, np.float32)
    after["model.embed_tokens.weight"] = np.ones((2, 2), np.float32)
    found = compared(opened(tmp_path, 1, before), opened(tmp_path, 2, after))
    assert (found["same"], found["changed"]) == (6, 6)
    assert (found["added"], found["missing"]) == (["added.weight"], [])
    assert found["reshaped"] == [{"key": "model.embed_tokens.weight", "first": [64, 16], "second": [2, 2]}]
    assert found["layers"] == ["0", "1", "2", "3"]
    for layer, row in zip(found["layers"], found["cells"], strict=True):
        for column, cell in zip(found["columns"], row, strict=True):
            a, b = (arrays[f"model.layers.{layer}.{column}"].astype(np.float64) for arrays in (before, after))
            assert math.isclose(cell, np.linalg.norm(a - b) / np.linalg.norm(a), rel_tol=1e-9, abs_tol=0)
    first = found["most_changed"][0]
    a, b = (arrays[first["key"]] for arrays in (before, after))
    assert (first["elements"], math.isclose(first["max_abs"], np.abs(a - b).max(), rel_tol=1e-5)) == (
        (a != b).sum(),
        True,
    )
    assert [row["relative"] for row in found["most_changed"]] == sorted(
        (row["relative"] for row in found["most_changed"]), reverse=True
    )


def test_zeros_not_numbers_and_dtypes_are_compared_exactly(tmp_path):
    nan = np.array([np.nan, np.inf, 1.0, 0.0], np.float32)
    one = {"zero": np.zeros(3, np.float32), "nan": nan, "cast": np.ones(4, np.float32)}
    two = {"zero": np.ones(3, np.float32), "nan": nan.copy(), "cast": np.ones(4, np.float64)}
    found = compared(opened(tmp_path, 1, one), opened(tmp_path, 2, two))
    assert (found["same"], found["changed"], found["casts"]) == (2, 1, 1)
    assert {row["key"]: row["relative"] for row in found["rest"]} == {"zero": math.inf, "nan": 0.0, "cast": 0.0}


def test_numbered_parts_of_a_layer_share_a_column():
    changes = {
        f"model.layers.{layer}.mlp.experts.{expert}.up.weight": TensorChange(gap=expert, base=4.0)
        for layer in (0, 1, 10)
        for expert in range(3)
    }
    changes["lm_head.weight"] = TensorChange(gap=0.0, base=1.0)
    found = heat_map(changes)
    assert (found.layers, found.columns) == (["0", "1", "10"], ["mlp.experts.*.up.weight"])
    assert found.cells == [[math.sqrt(3 / 12)]] * 3
    assert found.rest == [{"key": "lm_head.weight", "relative": 0.0, "max_abs": 0.0}]


def test_the_change_of_a_layer_is_that_of_all_its_tensors():
    """A small bias that was nearly zero changes by much of its own norm, and by little of its layer's."""
    bias, weight = "model.layers.{}.norm.bias", "model.layers.{}.mlp.weight"
    changes = {
        bias.format(0): TensorChange(gap=0.04, base=0.05),
        weight.format(0): TensorChange(gap=0.01, base=100.0),
        bias.format(1): TensorChange(gap=0.0, base=0.05),
        weight.format(1): TensorChange(gap=4.0, base=100.0),
    }
    found = heat_map(changes)
    assert found.layer_changes == [math.sqrt(0.05 / 100.05), math.sqrt(4.0 / 100.05)]
    assert max(found.cells[0][0] or 0.0, found.cells[0][1] or 0.0) > max(
        found.cells[1][0] or 0.0, found.cells[1][1] or 0.0
    )


def test_equal_files_are_not_read(tmp_path):
    arrays = model_arrays(0)
    one, two = opened(tmp_path, 1, arrays), opened(tmp_path, 2, arrays)
    for step in (1, 2):
        file = tmp_path / f"step-{step:012d}" / "model-00001-of-00001.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[:-64] + b"x" * 64)  # a damaged file that nobody reads
    found = compared(one, two)
    assert (found["same"], found["problems"]) == (len(arrays), [])


def test_damage_is_a_problem_of_its_tensor(tmp_path):
    one, two = opened(tmp_path, 1, model_arrays(0)), opened(tmp_path, 2, model_arrays(1, changed=(0,)))
    file = tmp_path / "step-000000000002" / "model-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    found = compared(one, two)
    assert (found["compared"], found["unread"]) == (0, len(model_arrays(0)))
    assert "digest" in found["problems"][0]["text"]


LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64, "head_dim": 4,
}  # fmt: skip


def hub_arrays():
    random = np.random.default_rng(3)
    arrays = {"model.embed_tokens.weight": random.normal(size=(64, 16)), "model.norm.weight": random.normal(size=16)}
    for layer in range(2):
        head = f"model.layers.{layer}"
        shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16)}
        shapes |= {
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (32, 16),
            "mlp.up_proj": (32, 16),
            "mlp.down_proj": (16, 32),
        }
        arrays |= {f"{head}.{name}.weight": random.normal(size=shape) for name, shape in shapes.items()}
        arrays |= {
            f"{head}.{name}.weight": random.normal(size=16) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return {key: array.astype(np.float32) for key, array in arrays.items()} | {
        "lm_head.weight": random.normal(size=(64, 16)).astype(np.float32)
    }


def test_a_step_and_a_hub_folder_are_compared_through_a_mapping(tmp_path):
    """The step has fused weights; the folder has the hub's. Fused by the mapping, they are equal but for one tensor."""
    import json

    hub = hub_arrays()
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    save_file(hub, folder / "model.safetensors", metadata={"format": "pt"})
    source = OpenStep(open_stored(folder))
    mapped = mapped_side(source, "llama-fused")
    reader = tensor_reader(mapped)
    fused = {key: reader(key) for key in mapped.keys("model")}
    assert fused.keys() != hub.keys()
    fused["model.norm.weight"] = fused["model.norm.weight"] * 2
    found = compared(opened(tmp_path / "run", 1, fused), source, "llama-fused")
    assert (found["added"], found["missing"], found["problems"]) == ([], [], [])
    assert [row["key"] for row in found["most_changed"]] == ["model.norm.weight"]
    assert math.isclose(found["most_changed"][0]["relative"], 0.5)
    plain = compared(opened(tmp_path / "plain", 1, fused), source)
    assert plain["missing_count"] > 0


def tensor_reader(side):
    checkpoint = side.opened.checkpoint

    def read(key):
        recipe = side.contents.find("model", key).recipe
        return checkpoint.read_recipe(recipe, list(side.contents.files), verify=False)

    return read


def test_only_names_of_mappings_are_taken(tmp_path):
    one = opened(tmp_path, 1, model_arrays(0))
    for text in ("/etc/passwd", "a -> b", "", "no-such-mapping"):
        with pytest.raises(InvalidArgument):
            mapped_side(one, text)
