import pytest

from holdfast.convert import effective_config as effective

FAMILIES = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
    "qwen3_moe": "Qwen3MoeConfig", "mixtral": "MixtralConfig", "deepseek_v3": "DeepseekV3Config",
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_missing_fields_have_the_values_of_transformers(model_type):
    transformers = pytest.importorskip("transformers", reason="its classes have the defaults")
    config, bare = getattr(transformers, FAMILIES[model_type])(), {"model_type": model_type}
    assert effective.rope_theta(bare) == config.rope_parameters["rope_theta"]
    assert effective.rope_type(bare) == config.rope_parameters["rope_type"]
    assert effective.epsilon(bare) == config.rms_norm_eps
    assert effective.is_tied(bare) is config.tie_word_embeddings
    assert effective.activation(bare) == config.hidden_act
    assert effective.window(bare) == config.sliding_window if hasattr(config, "sliding_window") else True
    if hasattr(config, "num_experts_per_tok"):
        assert effective.experts_per_token(bare) == config.num_experts_per_tok
        assert effective.experts(bare) == config.num_local_experts
    if model_type == "qwen3_moe":
        assert effective.normalizes_top_k(bare) is config.norm_topk_prob


def test_gpt2_has_values_of_its_own():
    transformers = pytest.importorskip("transformers", reason="its classes have the defaults")
    config, bare = transformers.GPT2Config(), {"model_type": "gpt2"}
    assert effective.epsilon(bare) == config.layer_norm_epsilon
    assert effective.epsilon_field(bare) == "layer_norm_epsilon"
    assert effective.is_tied(bare) is config.tie_word_embeddings
    assert effective.activation(bare) == config.activation_function
    assert effective.rope_theta(bare) is None and effective.rope_share(bare) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", "factor": 8.0}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", "factor": 8.0}},
        {"rope_theta": 1.0, "rope_parameters": {"rope_theta": 500000, "rope_type": "llama3", "factor": 8.0}},
    ],
)
def test_rotary_embeddings_of_both_versions_of_transformers(fields):
    config = {"model_type": "llama", **fields}
    assert effective.rope_theta(config) == 500000 and effective.rope_type(config) == "llama3"


def test_a_window_that_no_text_reaches_is_none():
    config = {"model_type": "mistral", "sliding_window": 4096, "max_position_embeddings": 32768}
    assert effective.window(config) == 4096
    assert effective.window({**config, "max_position_embeddings": 4096}) is None
    assert effective.window({**config, "sliding_window": None}) is None
    assert effective.window({**config, "model_type": "llama"}) is None
    qwen = {**config, "model_type": "qwen2"}
    assert effective.window(qwen) is None and effective.window({**qwen, "use_sliding_window": True}) == 4096


@pytest.mark.parametrize("value", ["8", [8], {"a": 8}, True, 10**400])
def test_values_that_are_no_numbers_are_not_known(value):
    config = {"model_type": "opt", "rope_theta": value, "rms_norm_eps": value, "num_experts": value}
    assert effective.rope_theta(config) is None and effective.epsilon(config) is None
    assert effective.experts(config) is None and effective.as_number(value) is None
    assert effective.is_tied({**config, "tie_word_embeddings": 1}) is None
    assert effective.activation({**config, "hidden_act": ["silu"]}) is None
