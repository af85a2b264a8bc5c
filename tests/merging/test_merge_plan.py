import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.core.errors import InvalidArgument, Mismatch, NotFound


@pytest.fixture
def stored(tmp_path):
    def write(name, **values):
        (tmp_path / name).mkdir()
        safetensors.torch.save_file(values, tmp_path / name / "model.safetensors")
        return tmp_path / name

    return write


@pytest.fixture
def plain(stored):
    return stored("plain", w=torch.ones(4, 3), b=torch.ones(4))


def refused(models, out, error=Mismatch, **options):
    with pytest.raises(error) as caught:
        holdfast.merge(models, out, **{"weights": [1] * len(models), **options})
    assert not out.exists()
    return str(caught.value)


def test_all_mismatches_are_listed_at_once(stored, plain, tmp_path):
    other = stored("other", w=torch.ones(4, 2), extra=torch.ones(1))
    text = refused([plain, other], tmp_path / "out")
    assert f"{other} has no 'b'" in text
    assert f"'w' of {other} has the shape [4, 2], in {plain} [4, 3]" in text
    assert f"{other} has 'extra'" in text


def test_vocabularies_of_different_sizes_are_refused(stored, plain, tmp_path):
    other = stored("other", w=torch.ones(5, 3), b=torch.ones(4))
    assert "--tokens union" in refused([plain, other], tmp_path / "out")


def test_keys_that_are_removed_need_not_fit(stored, plain, tmp_path):
    other = stored("other", w=torch.ones(4, 2), b=torch.zeros(4), extra=torch.ones(1))
    holdfast.merge([plain, other], tmp_path / "out", weights=[1, 1], remove=["w", "extra"])
    assert list(safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")) == ["b"]


def test_an_integer_tensor_is_not_merged_with_floats(stored, plain, tmp_path):
    other = stored("other", w=torch.ones(4, 3, dtype=torch.int64), b=torch.ones(4))
    assert "'w' is int64" in refused([plain, other], tmp_path / "out")


def test_patterns_without_a_match_are_mistakes(plain, tmp_path):
    assert "no key matches" in refused([plain], tmp_path / "out", InvalidArgument, remove=["v*"])
    assert "no tensor is left" in refused([plain], tmp_path / "out", NotFound, remove=["*"])


def test_parameters_must_exist_and_be_given(plain, stored, tmp_path):
    other = stored("other", w=torch.zeros(4, 3), b=torch.zeros(4))
    both, out = [plain, other], tmp_path / "out"
    text = refused(both, out, InvalidArgument, parameters={"scale": 1})
    assert "linear has no parameter 'scale'" in text and "passthrough" in text
    based = {"method": "task_arithmetic", "base": plain}
    assert "needs weight" in refused(both, out, InvalidArgument, weights=None, **based)
    assert "needs a base" in refused(both, out, InvalidArgument, method="ties")
    assert "add up to 0" in refused(both, out, InvalidArgument, weights=[1, -1])
    assert "one value for each of the 2 models, got 1" in refused(both, out, InvalidArgument, weights=[1])
    once = [{"path": plain, "normalize": False}, other]
    assert "not one for each model" in refused(once, out, InvalidArgument)
    assert "unknown merge method 'average'" in refused(both, out, InvalidArgument, method="average")
    assert "at most 1" in refused(both, out, InvalidArgument, method="passthrough", weights=None)
    assert "not a model of this merge" in refused(both, out, InvalidArgument, donor="third")


def test_a_pattern_that_leaves_a_key_without_a_value_is_refused(plain, stored, tmp_path):
    models = [{"path": plain, "t": 0.5}]
    assert "'t'" in refused(models, tmp_path / "out", InvalidArgument)
    options = {"method": "slerp", "base": stored("other", w=torch.zeros(4, 3), b=torch.zeros(4)), "weights": None}
    text = refused([plain], tmp_path / "out", InvalidArgument, parameters={"t": {"w": 1}}, **options)
    assert "needs t" in text and "tensor is b" in text


def test_a_tied_model_lends_its_input_embedding_to_an_untied_donor(folder, tmp_path):
    tied, untied = folder(seed=1, tied=True), folder(seed=2, tied=False)
    holdfast.merge([untied, tied], tmp_path / "out", weights=[0, 1])
    found = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])
    assert "has 'lm_head.weight'" in refused([tied, untied], tmp_path / "no")


@pytest.mark.parametrize("method", ["linear", "passthrough"])
def test_a_base_that_the_method_does_not_use_is_refused(plain, stored, tmp_path, method):
    base = stored("base", w=torch.full((4, 3), 9.0), b=torch.full((4,), 9.0))
    text = refused([plain], tmp_path / "out", InvalidArgument, method=method, base=base, weights=None)
    assert f"{method} has no base, and {base} is not among the models" in text


def test_a_base_among_the_models_is_averaged_once(plain, stored, tmp_path):
    base = stored("base", w=torch.full((4, 3), 9.0), b=torch.full((4,), 9.0))
    holdfast.merge([plain, base], tmp_path / "out", base=base)
    assert safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")["w"].unique().tolist() == [5.0]


@pytest.mark.parametrize("scope", ["models", "parameters"])
def test_a_key_pattern_of_a_parameter_that_matches_nothing_is_a_mistake(plain, stored, tmp_path, scope):
    other = stored("other", w=torch.ones(4, 3), b=torch.ones(4))
    weight = {"wieght": 0.2, "*": 1}
    given = {"weights": [1, weight]} if scope == "models" else {"weights": None, "parameters": {"weight": weight}}
    text = refused([plain, other], tmp_path / "out", InvalidArgument, **given)
    assert "weight: no key matches 'wieght'; keys are, for example, b, w" in text
    holdfast.merge([plain, other], tmp_path / "out", weights=[1, {"w": 3}], remove=["w"])  # removed keys count
