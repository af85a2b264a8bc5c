"""Every built-in mapping on the tensors that transformers stores, against torch, and back byte for byte."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import InvalidArgument, Mismatch
from holdfast.mapping import Mapping
from holdfast.mapping.families import FAMILIES, builtin_program, family_of, names
from tests.mapping.families import references
from tests.mapping.families.models import CASES, assert_same, mapped, mapping_of, sized, stored

pytestmark = pytest.mark.slow  # models of transformers


ROUND_TRIPS = [
    (case, variant)
    for case in CASES
    for family in [next(f for f in FAMILIES if case.split()[0] == f.name)]
    for variant in family.programs
    if not (case == "qwen3-moe with dense layers" and variant == "megatron-dist")  # layers that are not alike
]


@pytest.mark.parametrize(("case", "variant"), ROUND_TRIPS)
def test_there_and_back_is_byte_for_byte_what_transformers_stored(case: str, variant: str) -> None:
    model = stored(case)
    there = mapping_of(variant, model.config)
    made = mapped(there, model.tensors, source_tp=1)
    assert_same(mapped(mapping_of(f"from-{variant}", model.config), made, source_tp=1), model.tensors)


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt2"])
def test_fused_is_plain_concatenation(case: str) -> None:
    model = stored(case)
    expected = references.fused(model.tensors, model.config, by_group=False)
    assert any(key.endswith("gate_up_proj.weight") for key in expected)
    assert_same(mapped(mapping_of("fused", model.config), model.tensors), expected)


@pytest.mark.parametrize("case", [case for case in CASES if case not in ("gpt2", "deepseek-v3")])
def test_fused_grouped_is_what_megatron_cuts(case: str) -> None:
    model = stored(case)
    expected = references.fused(model.tensors, model.config, by_group=True)
    assert_same(mapped(mapping_of("fused-grouped", model.config), model.tensors), expected)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "qwen3-moe"])
def test_fused_needs_no_config_forward(case: str) -> None:
    model = stored(case)
    expected = references.fused(model.tensors, model.config, by_group=False)
    assert_same(mapped(mapping_of(f"{case}-fused", None), model.tensors), expected)


@pytest.mark.parametrize("case", ["qwen3-moe", "qwen3-moe with dense layers", "mixtral", "deepseek-v3"])
def test_stacked_is_the_state_that_transformers_has_in_memory(case: str) -> None:
    model = stored(case)
    assert not model.live.keys() <= model.tensors.keys()
    assert_same(mapped(mapping_of("stacked", model.config), model.tensors), model.live)
    assert_same(mapped(mapping_of(f"{family_of(model.config).name}-stacked", None), model.tensors), model.live)


@pytest.mark.parametrize("case", [case for case in CASES if case != "gpt2"])
@pytest.mark.parametrize(("variant", "engine"), [("megatron", True), ("megatron-local", False)])
def test_megatron_names_and_shapes(case: str, variant: str, engine: bool) -> None:
    model = stored(case)
    expected = references.megatron(model.tensors, model.config, engine=engine)
    assert_same(mapped(mapping_of(variant, model.config), model.tensors), expected)


@pytest.mark.parametrize("case", [case for case in CASES if "moe" in case or case in ("mixtral", "deepseek-v3")])
def test_megatron_stores_the_experts_of_a_layer_as_one_tensor(case: str) -> None:
    model = stored(case)
    expected = references.experts_stored(references.megatron(model.tensors, model.config, engine=True))
    assert any(key.endswith("mlp.experts.experts.linear_fc1.weight") for key in expected)
    assert_same(mapped(mapping_of("megatron-dist-layers", model.config), model.tensors), expected)


@pytest.mark.parametrize("case", ["llama", "llama with biases, tied", "qwen2", "qwen3", "qwen3-moe", "mixtral"])
def test_megatron_stores_layers_that_are_alike_as_one_tensor(case: str) -> None:
    model = stored(case)
    by_layer = references.experts_stored(references.megatron(model.tensors, model.config, engine=True))
    assert_same(mapped(mapping_of("megatron-dist", model.config), model.tensors), references.layers_stored(by_layer))


@pytest.mark.parametrize("variant", ["separate", "megatron", "megatron-local", "megatron-dist"])
def test_gpt2_is_turned_and_cut(variant: str) -> None:
    model = stored("gpt2")
    if variant == "separate":
        expected = references.gpt2_linear(model.tensors, model.config)
    else:
        expected = references.gpt2_megatron(model.tensors, model.config, engine=variant != "megatron-local")
    if variant == "megatron-dist":
        expected = references.layers_stored(expected)
    assert_same(mapped(mapping_of(f"gpt2-{variant}", model.config), model.tensors), expected)


def test_gpt2_of_the_hub_has_no_prefix_and_masks_that_are_no_weights() -> None:
    model = stored("gpt2")
    bare = {key.removeprefix("transformer."): value for key, value in model.tensors.items()}
    masks = {f"h.{number}.attn.bias": torch.ones(1, 1, 10, 10, dtype=torch.bfloat16) for number in range(3)}
    expected = references.gpt2_megatron(model.tensors, model.config, engine=True)
    there = mapping_of("megatron", model.config, bare)
    assert_same(mapped(there, bare | masks), expected)
    assert_same(mapped(mapping_of("from-megatron", model.config, bare), expected), bare)


@pytest.mark.parametrize("case", ["llama", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3"])
def test_paddle_turns_linear_weights_and_nothing_else(case: str) -> None:
    model = stored(case)
    linear = "_proj.weight", "_proj_with_mqa.weight", "mlp.gate.weight"
    expected = {key: value.T if key.endswith(linear) else value for key, value in model.tensors.items()}
    assert_same(mapped(mapping_of("paddle", model.config), model.tensors), expected)


def with_predictor(config: dict[str, object], tensors: dict[str, torch.Tensor]) -> tuple[dict, dict, dict]:
    """DeepSeek-V3 as the hub has it: one more layer, which predicts the next token but one."""
    inner = {f"model.layers.3.{key[15:]}": t + 1 for key, t in tensors.items() if key.startswith("model.layers.2.")}
    own = {name: torch.randn(16).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    outer = {f"model.layers.3.{name}.weight": value for name, value in own.items()}
    outer["model.layers.3.eh_proj.weight"] = torch.randn(16, 32).bfloat16()
    shared = {
        "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"],
    }
    return {**config, "num_nextn_predict_layers": 1}, {**inner, **outer}, shared


def test_deepseek_layers_that_predict_further_tokens_have_a_place_of_their_own() -> None:
    model = stored("deepseek-v3")
    config, more, shared = with_predictor(model.config, model.tensors)
    made = mapped(mapping_of("megatron", config), model.tensors | more | shared)
    plain = references.megatron(model.tensors, model.config, engine=True)
    assert {key: made[key] for key in plain}.keys() == plain.keys()
    rest = {key for key in made if key not in plain}
    assert all(key.startswith("mtp.layers.0.") for key in rest)
    assert torch.equal(made["mtp.layers.0.final_layernorm.weight"], more["model.layers.3.shared_head.norm.weight"])
    router = "mtp.layers.0.mtp_model_layer.mlp.router.weight"
    assert torch.equal(made[router], more["model.layers.3.mlp.gate.weight"])
    assert_same(mapped(mapping_of("from-megatron", config), made), model.tensors | more)


def test_deepseek_without_the_layers_that_its_config_tells_of() -> None:
    """transformers leaves them out of what it stores, and the config as it was."""
    model = stored("deepseek-v3")
    config = {**model.config, "num_nextn_predict_layers": 1}
    expected = references.megatron(model.tensors, model.config, engine=True)
    assert_same(mapped(mapping_of("megatron", config), model.tensors), expected)


@pytest.mark.parametrize("variant", ["megatron", "megatron-local", "megatron-dist-layers"])
@pytest.mark.parametrize("stored_too", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_deepseek_converts_back_offline_whatever_its_config_says_of_predictors(
    tmp_path: Path, variant: str, stored_too: bool, count: int
) -> None:
    model = stored("deepseek-v3")
    config, more, shared = with_predictor(model.config, model.tensors)
    config["num_nextn_predict_layers"] = count
    tensors = model.tensors | (more | shared if stored_too else {})
    source = tmp_path / "megatron"
    source.mkdir()
    save_file(mapped(mapping_of(variant, config), tensors), source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "back", ConvertOptions(to="hf", mapping=MappingOptions(f"deepseek-v3-from-{variant}")))
    found = {}
    for path in (tmp_path / "back").glob("*.safetensors"):
        found |= load_file(path)
    assert_same(found, model.tensors | (more if stored_too else {}))


def test_deepseek_predictors_under_the_name_that_megatron_keeps_on_disk() -> None:
    """Megatron-Core calls the inner layer mtp_model_layer, and its checkpoints and older versions transformer_layer."""
    model = stored("deepseek-v3")
    config, more, _ = with_predictor(model.config, model.tensors)
    made = mapped(mapping_of("megatron", config), model.tensors | more)
    on_disk = {key.replace(".mtp_model_layer.", ".transformer_layer."): value for key, value in made.items()}
    assert on_disk.keys() != made.keys()
    assert_same(mapped(mapping_of("from-megatron", config), on_disk), model.tensors | more)


def test_deepseek_biases_have_a_place_in_megatron() -> None:
    model = stored("deepseek-v3")
    names = ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")
    biases = {f"model.layers.1.self_attn.{name}.bias": torch.randn(4).bfloat16() for name in names}
    made = mapped(mapping_of("megatron", model.config), model.tensors | biases)
    assert not any(key.startswith("model.") for key in made)
    assert_same(mapped(mapping_of("from-megatron", model.config), made), model.tensors | biases)


@pytest.mark.parametrize("name", ["qwen3-moe-megatron-dist", "qwen3-moe-from-megatron-dist"])
@pytest.mark.parametrize("more", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}])
def test_layers_that_differ_are_not_stacked(name: str, more: dict[str, object]) -> None:
    config = {**stored("qwen3-moe").config, **more}
    with pytest.raises(InvalidArgument, match="are dense and others have experts; use qwen3-moe-megatron-dist-layers"):
        Mapping.parse(name, config)


def test_deepseek_experts_need_not_be_equally_many() -> None:
    model = stored("deepseek-v3")
    ragged = {key: value for key, value in model.tensors.items() if not key.startswith("model.layers.2.mlp.experts.3.")}
    made = mapped(mapping_of("stacked", model.config), ragged)
    assert made["model.layers.1.mlp.experts.gate_up_proj"].shape == (4, 24, 16)
    assert made["model.layers.2.mlp.experts.gate_up_proj"].shape == (3, 24, 16)
    assert_same(mapped(mapping_of("from-stacked", model.config), made), ragged)


def test_deepseek_scales_are_stacked_with_their_experts() -> None:
    model = stored("deepseek-v3")
    scales = {
        f"{key}_scale_inv": torch.randn(3, 2)
        for key in model.tensors
        if ".experts." in key and key.endswith("_proj.weight")
    }
    made = mapped(mapping_of("stacked", model.config), model.tensors | scales)
    expected = torch.stack(
        [
            torch.cat([scales[f"model.layers.2.mlp.experts.{n}.{x}_proj.weight_scale_inv"] for x in ("gate", "up")])
            for n in range(4)
        ]
    )
    assert torch.equal(made["model.layers.2.mlp.experts.gate_up_proj_scale_inv"], expected)
    assert_same(mapped(mapping_of("from-stacked", model.config), made), model.tensors | scales)


def test_a_base_model_without_its_head_has_no_prefix() -> None:
    model = stored("qwen3")
    bare = {k.removeprefix("model."): value for k, value in model.tensors.items() if k != "lm_head.weight"}
    made = mapped(mapping_of("fused", model.config, bare), bare)
    assert "layers.0.self_attn.qkv_proj.weight" in made


@pytest.mark.parametrize("case", CASES)
def test_the_family_is_found_from_the_config(case: str) -> None:
    config = stored(case).config
    assert family_of(config).name == case.split(maxsplit=1)[0]
    assert family_of({"architectures": config["architectures"]}) is family_of(config)


def test_every_name_is_found_with_and_without_its_family() -> None:
    for name in names():
        family = next(f for f in FAMILIES if name.startswith(f"{f.name}-") and name[len(f.name) + 1 :] in f.programs)
        config = next(stored(case).config for case in CASES if case == family.name)
        variant = name[len(family.name) + 1 :]
        assert builtin_program(name, config).text == builtin_program(variant, config).text
        assert builtin_program(f"{family.name}-from-{variant}", config).reversed
        assert not builtin_program(name, config).reversed


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        ("fusd", None, "did you mean fused"),
        ("stacked", None, "qwen3-moe-stacked, mixtral-stacked, deepseek-v3-stacked"),
        ("llama-stacked", None, "its mappings are llama-fused"),
        ("llama-megatron", None, "needs num_attention_heads from the model's config.json, which was not given"),
        ("llama-megatron", {"model_type": "llama"}, "which lacks"),
        ("megatron", {"model_type": "opt"}, "a family without built-in mappings"),
        ("deepseek-v3-megatron", {"num_hidden_layers": 10**9}, "expected an integer"),
        ("deepseek-v3-megatron", {"num_hidden_layers": "61"}, "num_hidden_layers is '61'"),
        ("qwen3-moe-megatron", {"mlp_only_layers": [-1]}, "expected a list of integers"),
    ],
)
def test_what_cannot_be_found_or_filled_in_is_said(name: str, config: dict[str, object] | None, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        builtin_program(name, config)


def test_a_word_that_is_no_name_is_told_the_nearest_names() -> None:
    with pytest.raises(InvalidArgument, match=r"did you mean .*llama-fused"):
        Mapping.parse("llama-fusd")
    for typo, name in (
        ("llama-from-megtron-dist", "llama-from-megatron-dist"), ("llama-megtron-dist", "llama-megatron-dist"),
        ("from_megtron_dist", "from-megatron-dist"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=rf"did you mean {name}\?"):
            Mapping.parse(typo)


def test_errors_name_the_mapping_and_the_statement() -> None:
    model = stored("llama")
    partial = {key: value for key, value in model.tensors.items() if "layers.1.self_attn.k_proj" not in key}
    with pytest.raises(
        Mismatch, match=r"llama-fused, line 1, .*'model.layers.1.self_attn.q_proj.weight' exists, but not"
    ):
        mapped(mapping_of("llama-fused", model.config), partial)


def test_a_head_count_that_does_not_fit_is_refused() -> None:
    model = stored("qwen3")
    with pytest.raises(Mismatch, match="heads of different sizes"):
        mapped(mapping_of("megatron", {**model.config, "num_key_value_heads": 1}), model.tensors)


def test_names_can_be_explained() -> None:
    model = stored("qwen3-moe")
    told = mapping_of("stacked", model.config).explain({key: sized(value) for key, value in model.tensors.items()})
    line = "[1:2, 0:12, 0:16] <- model.layers.0.mlp.experts.1.gate_proj.weight [0:12, 0:16], dims [new, 0, 1]"
    assert line in told
