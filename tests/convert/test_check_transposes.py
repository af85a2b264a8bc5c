import numpy as np
import pytest
import safetensors.numpy

from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Unsupported
from holdfast.sources import open_stored
from tests.cli.calls import call

PROJ = "model.layers.0.mlp.up_proj.weight"
SQUARE = "model.layers.0.self_attn.q_proj.weight"
TURN = [f"{PROJ}^T -> {PROJ}", f"{SQUARE}^T -> {SQUARE}"]


def weights(folder, *, turned=False, embedding=True):
    rng = np.random.default_rng(5)
    found = {PROJ: rng.normal(size=(6, 4)), SQUARE: rng.normal(size=(4, 4))}
    if turned:
        found = {key: np.ascontiguousarray(value.T) for key, value in found.items()}
    if embedding:
        found["model.embed_tokens.weight"] = rng.normal(size=(9, 4))
    folder.mkdir()
    safetensors.numpy.save_file(found, folder / "model.safetensors")
    return found


@pytest.mark.parametrize("embedding", [True, False])
def test_a_mapping_that_turns_to_paddles_orientation_is_refused(tmp_path, embedding):
    weights(tmp_path / "a", embedding=embedding)
    with pytest.raises(Unsupported, match=r"the mapping transposes .*omit the mapping"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="paddle", mapping=MappingOptions(TURN)))
    done = call("convert", tmp_path / "a", tmp_path / "b", "--to", "paddle", "--dry-run", "--map", TURN[0])
    assert done.exit_code == 1 and "would fail: model: the mapping transposes" in done.output
    assert not (tmp_path / "b").exists()
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(mapping=MappingOptions(TURN)))


def test_a_mapping_that_turns_to_hugging_faces_orientation_is_used(tmp_path):
    right = weights(tmp_path / "right")
    weights(tmp_path / "a", turned=True)
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="paddle", mapping=MappingOptions(TURN, reverse=True)))
    for key in (PROJ, SQUARE):
        assert np.array_equal(open_stored(tmp_path / "b").read(key), right[key])


def test_a_mapping_that_turns_nothing_is_there_and_back(tmp_path):
    right = weights(tmp_path / "a")
    rename = MappingOptions([f"{PROJ} -> model.layers.0.mlp.w1.up_proj.weight"])
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="paddle", mapping=rename))
    back = ConvertOptions(to="hf", mapping=MappingOptions(rename.written, reverse=True))
    convert(tmp_path / "b", tmp_path / "c", back)
    assert all(np.array_equal(open_stored(tmp_path / "c").read(key), value) for key, value in right.items())
