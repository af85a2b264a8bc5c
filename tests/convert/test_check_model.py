import sys
from importlib.util import find_spec

import pytest

from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import Conversion, ConvertOptions
from holdfast.core.errors import Mismatch
from holdfast.mapping.program import Mapping
from holdfast.sources import open_source
from tests.cli.calls import call
from tests.convert.megatron import CONFIG, write_hub, write_iteration

MAPPING = "llama-from-megatron-dist"
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="it builds the model of a config")


@pytest.fixture(params=[pytest.param("transformers", marks=needs_transformers), "none"], autouse=True)
def installed(request, monkeypatch):
    """With transformers, and without."""
    if request.param == "none":
        monkeypatch.setitem(sys.modules, "transformers", None)
    return request.param == "transformers"


def converted(source, config, **options):
    mapping = MappingOptions(options.pop("map", MAPPING), config=config)
    return Conversion(open_source(source), ConvertOptions(to="hf", mapping=mapping, **options))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return write_iteration(tmp_path_factory.mktemp("untied") / "iter_0000100", None)


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return write_iteration(tmp_path_factory.mktemp("tied") / "iter_0000100", None, tied=True)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}])
def test_a_tied_checkpoint_needs_a_config_that_says_so(tied, changes):
    with pytest.raises(Mismatch, match=r"it lacks lm_head\.weight; .* set tie_word_embeddings to true in config.json"):
        converted(tied, CONFIG | changes)
    assert converted(tied, CONFIG | {"tie_word_embeddings": True}).ready


def test_the_width_of_the_mlp_is_that_of_the_config(untied):
    with pytest.raises(Mismatch, match=r"other shapes: model\.layers\.0\.mlp\.\w+_proj\.weight is \[.*\], not \[.*64"):
        converted(untied, CONFIG | {"intermediate_size": 64})
    assert converted(untied, CONFIG).ready


@pytest.mark.parametrize(
    ("model_type", "architecture", "lacks", "more"),
    [("phi3", "Phi3ForCausalLM", "self_attn.qkv_proj.weight", 1), ("qwen2", "Qwen2ForCausalLM", "q_proj.bias", 3)],
)
def test_the_config_of_another_architecture(untied, installed, model_type, architecture, lacks, more):
    config = CONFIG | {"model_type": model_type, "architectures": [architecture], "pad_token_id": 0}
    if not installed:
        assert converted(untied, config)  # nothing tells their names
        return
    with pytest.raises(Mismatch) as error:
        converted(untied, config)
    assert lacks in str(error.value) and f" and {more} more" in str(error.value)
    assert f"model_type '{model_type}'" in str(error.value) and "--config" in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}, "tie_word_embeddings": True},
     {"model_type": "own", "architectures": ["OwnForCausalLM"]}, {"architectures": [3]}],
)  # fmt: skip
def test_models_of_custom_code_are_not_refused(untied, changes):
    assert converted(untied, CONFIG | changes)


def test_unexpected_keys_can_be_removed(untied, installed):
    config = CONFIG | {"architectures": ["LlamaModel"]}
    if installed:
        with pytest.raises(Mismatch, match=r"the model has no lm_head.weight; .*--remove PATTERN leaves keys out"):
            converted(untied, config)
    assert converted(untied, config, remove=("lm_head.weight",))


def test_other_results_are_not_compared(untied):
    wrong = CONFIG | {"tie_word_embeddings": True, "intermediate_size": 64}
    assert converted(untied, wrong, map=None, keep_names=True)
    mapping = MappingOptions(MAPPING, config=wrong)
    assert Conversion(open_source(untied), ConvertOptions(to="dcp", mapping=mapping))


def test_own_statements_for_the_names_of_megatron(tied):
    written = str(Mapping.parse(MAPPING, CONFIG))
    with pytest.raises(Mismatch, match=r"it lacks lm_head\.weight"):
        converted(tied, CONFIG, map=written)
    assert converted(tied, CONFIG | {"vocab_size": 128, "tie_word_embeddings": True}, map=written)


def test_a_dry_run_says_it_as_a_problem(tied, tmp_path):
    done = call("convert", tied, tmp_path / "out", "--to", "hf", "--map", MAPPING, "--config",
                write_hub(tmp_path / "hub"), "--dry-run")  # fmt: skip
    assert done.exit_code == 1 and f"fail: the result is not the model of {tmp_path}/hub/config.json" in done.output
