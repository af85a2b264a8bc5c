import pytest

from holdfast.convert.megatron_pairs import Pair, pairs
from tests.convert.megatron import ARGS, CONFIG

MOE = {"num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_pre_softmax": False,
       "moe_router_score_function": "softmax", "moe_router_topk_scaling_factor": None}  # fmt: skip
MIXTRAL = CONFIG | {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "intermediate_size": 24}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
QWEN3_MOE = MIXTRAL | {"model_type": "qwen3_moe", "architectures": [], "moe_intermediate_size": 24, "num_experts": 8}
QWEN3_MOE |= {"norm_topk_prob": True}


def differing(args, config):
    return [pair.name for pair in pairs(args, config) if pair.differs()]


def test_a_pair_differs_only_if_both_values_are_known():
    assert (
        Pair("a", "b", 1, 2).differs() and Pair("a", "b", "x", "y").differs() and Pair("a", "b", True, False).differs()
    )
    assert not Pair("a", "b", None, 2).differs() and not Pair("a", "b", 2, None).differs()
    assert not Pair("a", "b", 1e-5, 1.0000000001e-5).differs() and Pair("a", "b", 0.0, 1e-6).differs()


@pytest.mark.parametrize(("config", "args"), [(CONFIG, ARGS), (MIXTRAL, ARGS | MOE), (QWEN3_MOE, ARGS | MOE)])
def test_a_config_of_the_run_has_no_difference(config, args):
    assert differing(args, config) == []
    assert differing({}, config) == []


@pytest.mark.parametrize(
    ("changes", "args", "name"),
    [
        ({"rope_theta": 5e5}, {}, "rope_theta"),
        ({}, {"rotary_base": 500000}, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 5e5}}, {}, "rope_theta"),
        ({"rms_norm_eps": 1e-5}, {}, "rms_norm_eps"),
        ({}, {"norm_epsilon": 1e-5}, "rms_norm_eps"),
        ({"intermediate_size": 64}, {}, "intermediate_size"),
        ({"hidden_act": "gelu"}, {}, "hidden_act"),
        ({}, {"swiglu": False}, "hidden_act"),
        ({}, {"normalization": "LayerNorm"}, "the norm of model_type llama"),
        ({}, {"position_embedding_type": "learned_absolute"}, "the position embedding of model_type llama"),
        ({"partial_rotary_factor": 0.5}, {"rotary_percent": 1.0}, "partial_rotary_factor"),
        ({}, {"rotary_percent": 0.5}, "partial_rotary_factor"),
        ({}, {"use_rope_scaling": True, "rope_scaling_factor": 8.0}, "the factor of llama3 in rope_scaling"),
        ({}, {"use_rope_scaling": True}, "the factor of llama3 in rope_scaling"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {"use_rope_scaling": False},
         "the factor of llama3 in rope_scaling"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rotary_seq_len_interpolation_factor": None},
         "the factor of linear in rope_scaling"),
        ({}, {"rotary_seq_len_interpolation_factor": 4}, "the factor of linear in rope_scaling"),
    ],
)  # fmt: skip
def test_what_decides_the_values_of_a_dense_model(changes, args, name):
    assert differing(ARGS | args, CONFIG | changes) == [name]


@pytest.mark.parametrize(
    ("changes", "args"),
    [
        ({"hidden_act": "swish"}, {}),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rotary_seq_len_interpolation_factor": 4}),
        ({}, {"rotary_base": "10000", "norm_epsilon": None, "swiglu": "yes", "ffn_hidden_size": 10**400}),
        ({"model_type": "opt", "architectures": []}, {"normalization": "LayerNorm", "rotary_base": 5}),
    ],
)
def test_what_is_the_same_or_not_known(changes, args):
    assert differing(ARGS | args, CONFIG | changes) == []


@pytest.mark.parametrize(
    ("config", "args", "name"),
    [
        (MIXTRAL, {"num_experts": 4}, "num_local_experts"),
        (MIXTRAL, {"num_experts": None}, "num_local_experts"),
        (QWEN3_MOE, {"num_experts": 16}, "num_experts"),
        (MIXTRAL, {"moe_router_topk": 4}, "num_experts_per_tok"),
        (MIXTRAL, {"moe_ffn_hidden_size": 48}, "intermediate_size"),
        (MIXTRAL, {"moe_ffn_hidden_size": None}, "intermediate_size"),  # then it is ffn_hidden_size
        (QWEN3_MOE, {"moe_ffn_hidden_size": 48}, "moe_intermediate_size"),
        (MIXTRAL, {"moe_router_pre_softmax": True}, "norm_topk_prob"),
        (QWEN3_MOE, {"moe_router_pre_softmax": True}, "norm_topk_prob"),
        (QWEN3_MOE | {"norm_topk_prob": False}, {}, "norm_topk_prob"),
        (MIXTRAL, {"moe_router_score_function": "sigmoid"}, "the scores of model_type mixtral"),
        (MIXTRAL, {"moe_router_topk_scaling_factor": 2.5}, "routed_scaling_factor"),
    ],
)
def test_what_decides_the_values_of_a_mixture_of_experts(config, args, name):
    assert differing(ARGS | MOE | args, config) == [name]


def test_latent_attention_has_yarn():
    config = {"model_type": "deepseek_v3", "rms_norm_eps": 1e-6, "rope_scaling": {"type": "yarn", "factor": 40}}
    args = {"multi_latent_attention": True, "rotary_scaling_factor": 40.0, "norm_epsilon": 1e-6}
    assert differing(args, config) == []
    assert differing(args, config | {"rope_scaling": None}) == ["the factor of yarn in rope_scaling"]
    assert differing(args | {"rope_type": "rope"}, config) == ["the factor of yarn in rope_scaling"]


def test_gpt2_has_learned_positions_and_layer_norms():
    config = {"model_type": "gpt2"}
    args = {"normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "swiglu": False,
            "norm_epsilon": 1e-5, "rotary_base": 10000}  # fmt: skip
    assert differing(args, config) == []
    assert differing(args | {"position_embedding_type": "rope"}, config) == [
        "the position embedding of model_type gpt2"
    ]


def test_the_base_is_compared_without_a_kind_of_positions():
    args = {name: value for name, value in ARGS.items() if name != "position_embedding_type"}
    assert differing(args | {"rotary_base": 5}, CONFIG) == ["rope_theta"]
