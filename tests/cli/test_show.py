import json
import os

import numpy as np
import safetensors.numpy
import torch

import holdfast
from holdfast.core.errors import NotFound
from tests.cli.calls import call


def test_the_tree_has_every_key_with_dtype_shape_and_size(step):
    done = call("show", step)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    at = lines.index("model (module): 4 tensors, 92 B (92 B float32)")
    assert lines[at + 1 : at + 7] == [
        "  0",
        "    bias  float32[3]  12 B",
        "    weight  float32[3, 4]  48 B",
        "  1",
        "    bias  float32[2]  8 B",
        "    weight  float32[2, 3]  24 B",
    ]
    assert "    weight  exp_avg, exp_avg_sq float32[3, 4]; step float32[]  100 B" in lines
    assert "    weight/exp_avg  float32[3, 4]  48 B" in call("show", step, "--all").output.splitlines()
    assert "  none  float32[0, 5]  0 B" in lines
    assert "  wave  complex128[2]  32 B" in lines


def test_the_head_has_step_totals_and_who_wrote_it(step):
    first, second, third = call("show", step).output.splitlines()[:3]
    manifest = holdfast.open(step).manifest
    assert first == str(step)
    assert second == f"step 100, {manifest.total_bytes / 1000:.2f} kB in 7 files"
    assert third.startswith(f"written {manifest.created} by holdfast {holdfast.__version__}, world 1, hosts 1")


def test_values_that_are_not_tensors_are_named_and_short_ones_shown(step, tmp_path):
    assert "note (json)" in call("show", step).output.partition("in state.json")[2]
    held = Counted(3)
    holdfast.save(tmp_path / "c", {"counted": held, "epoch": 3, "long": "x" * 200, "none": {"a": 1}})
    lines = call("show", tmp_path / "c").output.splitlines()
    assert "counted (stateful): 1 tensor, 24 B (24 B int64); the rest in state.json" in lines
    assert lines[-3:] == ["  epoch (json): 3", "  long (json)", '  none (json): {"a":1}']
    assert "epoch" not in call("show", tmp_path / "c", "--group", "counted").output


class Counted:
    def __init__(self, size):
        self.values = torch.arange(size)

    def state_dict(self):
        return {"values": self.values, "size": len(self.values)}

    def load_state_dict(self, state):
        self.values = state["values"]


def test_a_root_shows_its_newest_step(run, step):
    assert call("show", run).output == call("show", step).output


def test_a_root_shows_its_newest_readable_step(run, step):
    (step / "holdfast.json").write_bytes(b"")
    assert "\nstep 10, " in call("show", run).output


def test_one_group_is_shown_alone(step):
    output = call("show", step, "--group", "odd").output
    assert "odd (tensors): 5 tensors" in output
    assert "model (module)" not in output


def test_an_unknown_group_is_not_found_and_says_what_there_is(step):
    error = call("show", step, "--group", "none").exception
    assert isinstance(error, NotFound)
    assert "no group 'none'; it has model, odd, optimizer" in str(error)


def test_json_has_all_groups_and_tensors(step):
    fields = json.loads(call("show", step, "--json").output)
    assert (fields["step"], fields["parent"], fields["path"]) == (100, 10, str(step))
    assert list(fields["groups"]) == ["model", "odd", "optimizer"]
    assert fields["values"]["note"] == "json"
    model = fields["groups"]["model"]
    assert (model["kind"], model["bytes"], model["aliases"]) == ("module", 92, {})
    assert model["files"] == ["model-00001-of-00001.safetensors"]
    assert list(model["tensors"]) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert model["tensors"]["0.weight"] == {"dtype": "float32", "shape": [3, 4], "bytes": 48}


def test_json_of_one_group_has_that_group_only(step):
    assert list(json.loads(call("show", step, "--json", "--group", "odd").output)["groups"]) == ["odd"]


def test_a_key_is_shown_with_its_values(step):
    weight = safetensors.numpy.load_file(step / "model-00001-of-00001.safetensors")["0.weight"]
    facts = json.loads(call("show", step, "0.weight", "--json").output)
    assert facts["mean_abs"] == np.abs(weight.astype(np.float64)).mean()
    assert facts["max_abs"] == np.abs(weight).max()
    assert [float(value) for value in facts["first"]] == weight.reshape(-1)[:8].tolist()
    raw = (step / facts["file"]).read_bytes()
    assert raw[facts["offset"] : facts["offset"] + facts["bytes"]] == weight.tobytes()


def test_a_key_is_shown_as_lines_for_people(step):
    output = call("show", step, "nested.values").output
    assert "group      odd\n" in output
    assert "shape      [4]\n" in output
    assert "not_finite 2\n" in output
    assert "max_abs    3.0\n" in output
    assert "first      [1.0, 'nan', -3.0, 'inf']\n" in output


def test_a_complex_key_is_shown_as_complex(step):
    facts = json.loads(call("show", step, "wave", "--json").output)
    assert (facts["dtype"], facts["shape"], facts["max_abs"], facts["mean_abs"]) == ("complex128", [2], 5.0, 2.5)


def test_an_empty_key_has_no_mean(step):
    facts = json.loads(call("show", step, "none", "--json").output)
    assert (facts["shape"], facts["mean_abs"], facts["max_abs"], facts["first"]) == ([0, 5], None, None, [])


def test_a_key_of_a_group_is_found_in_that_group_only(step):
    assert call("show", step, "0.weight/exp_avg", "--group", "optimizer").exit_code == 0
    assert isinstance(call("show", step, "0.weight", "--group", "optimizer").exception, NotFound)


def test_an_unknown_key_is_not_found(step):
    error = call("show", step, "0.wait").exception
    assert isinstance(error, NotFound)
    assert "has no key '0.wait'" in str(error)


def test_a_hugging_face_folder_is_shown(tmp_path):
    safetensors.numpy.save_file({"a.b": np.ones((2, 2), np.float16)}, tmp_path / "model.safetensors")
    output = call("show", tmp_path).output
    assert "format Hugging Face, without digests" in output
    assert "    b  float16[2, 2]  8 B" in output


def test_nothing_at_the_path_is_not_found(tmp_path):
    assert isinstance(call("show", tmp_path / "none").exception, NotFound)


def test_a_key_that_turns_text_around_is_made_visible(step):
    output = call("show", step).output
    assert output.replace("\n", "").isprintable()
    assert r"  right\x202eleft  int64[3]  24 B" in output


def test_control_characters_of_a_path_are_made_visible(step):
    hostile = step.with_name("\x1b[31mred\x07\x9b")
    os.rename(step, hostile)
    output = call("show", hostile).output
    assert output.replace("\n", "").isprintable()
    assert r"\x1b[31mred\x07\x9b" in output


def test_a_key_that_is_not_there_names_its_likes(step):
    assert "did you mean 0.weight?" in str(call("show", step, "module.0.weight").exception)
    assert "did you mean" in str(call("show", step, "0.wieght", "--group", "model").exception)
    assert "did you mean" not in str(call("show", step, "zzz").exception)


def test_layers_that_are_alike_are_printed_once_unless_all_are_wanted(tmp_path):
    layers = {f"layers.{n}.mlp.weight": np.ones((4, 4), np.float32) for n in range(12)}
    layers["layers.7.mlp.weight"] = np.ones((4, 5), np.float32)
    safetensors.numpy.save_file(layers | {"head.weight": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    lines = call("show", tmp_path).output.splitlines()
    assert lines[lines.index("  layers") + 1 :] == [
        "    0-6  (7 alike)",
        "      mlp",
        "        weight  float32[4, 4]  64 B",
        "    7",
        "      mlp",
        "        weight  float32[4, 5]  80 B",
        "    8-11  (4 alike)",
        "      mlp",
        "        weight  float32[4, 4]  64 B",
    ]
    everything = call("show", tmp_path, "--all").output
    assert " alike)" not in everything
    assert everything.count("weight  float32") == 13
    assert len(json.loads(call("show", tmp_path, "--json").output)["groups"]["model"]["tensors"]) == 13


def test_a_value_that_is_asked_for_as_a_group_is_named_as_one(tmp_path):
    holdfast.save(tmp_path / "s", {"note": {"a": 1}, "w": {"x": torch.ones(2)}})
    done = call("show", tmp_path / "s", "--group", "note")
    assert isinstance(done.exception, NotFound)
    assert f"it is a value: holdfast show {tmp_path / 's'} note" in str(done.exception)
