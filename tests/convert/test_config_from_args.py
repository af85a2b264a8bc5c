import argparse
import json

import pytest
import torch

from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import Conversion, ConvertOptions
from holdfast.core.errors import InvalidArgument
from holdfast.sources import open_source
from tests.cli.calls import call
from tests.convert.megatron import ARGS, write_hub, write_iteration
from tests.sources.made import torch_file

MAPPING = "llama-from-megatron-dist"
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "rms_norm_eps": 1e-3, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 3, "norm_topk_prob": True}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def args_of(*, tied, experts=False, scaled=False):
    """What a run of Megatron with such a model has in its args."""
    args = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "kv_channels": 16,
        "group_query_attention": True, "num_query_groups": 2, "vocab_size": 64, "max_position_embeddings": 128,
        "norm_epsilon": 1e-3, "rotary_base": 500, "untie_embeddings_and_output_weights": not tied, "swiglu": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0, "num_experts": None,
        "moe_router_topk": 2, "moe_router_pre_softmax": False, "use_rope_scaling": scaled, "rope_scaling_factor": 4.0,
        "window_size": None, "apply_layernorm_1p": False, "rotary_interleaved": False, "seq_length": 64,
    }  # fmt: skip
    return args | ({"num_experts": 4, "moe_router_topk": 3, "moe_ffn_hidden_size": 24} if experts else {})


@pytest.mark.parametrize(
    ("name", "family", "variant", "more"),
    [
        ("Llama", "llama", "megatron-dist", {"rope_parameters": {"rope_theta": 500.0, **LLAMA3}}),
        ("Llama", "llama", "megatron", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Qwen2", "qwen2", "megatron-dist", {"head_dim": 8, "num_attention_heads": 4}),
        ("Qwen3", "qwen3", "megatron-dist", {}),
        ("Mixtral", "mixtral", "megatron-dist", {**EXPERTS, "intermediate_size": 24}),
        ("Qwen3Moe", "qwen3-moe", "megatron-dist", {**EXPERTS, "moe_intermediate_size": 24}),
    ],
)
def test_the_model_computes_what_the_run_computed(tmp_path, name, family, variant, more):
    """A model of the hub, as Megatron stores it, without its config.json: the logits are those of the model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    fields = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}} | more
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(tmp_path / "hub")
    run, out = tmp_path / "iter_0000010", tmp_path / "out"
    done = call("convert", tmp_path / "hub", run, "--map", f"{family}-{variant}", "--to", "dcp")
    assert done.exit_code == 0, done.exception
    tied = bool(fields.get("tie_word_embeddings"))
    args = args_of(tied=tied, experts="num_experts" in more, scaled="factor" in fields["rope_parameters"])
    args |= {"kv_channels": 8} if name == "Qwen2" else {}
    (run / "common.pt").write_bytes(torch_file({"args": argparse.Namespace(**args), "iteration": 10}))
    options = ("--to", "hf", "--map", f"{family}-from-{variant}", "--config", "from-args")
    done = call("convert", run, out, *options)
    assert done.exit_code == 0, done.exception
    assert "note: config.json is made of the run's args: model_type " in done.output
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(opened) is type(model)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(40)[None] * 7 % 64
    with torch.no_grad():
        assert torch.equal(opened(tokens).logits, model(tokens).logits)


def test_every_field_is_noted_with_its_arg(tmp_path):
    source = write_iteration(tmp_path / "iter_0000100")
    options = ConvertOptions(to="holdfast", mapping=MappingOptions(MAPPING, config_from_args=True))
    conversion = Conversion(open_source(source), options)
    (note,) = [text for text in conversion.notes if text.startswith("config.json is made of")]
    for part in ("num_key_value_heads 2 (num_query_groups)", "rms_norm_eps 1e-06 (norm_epsilon)",
                 "rope_theta 10000 (rotary_base)", "tie_word_embeddings False (untie_embeddings_and_output_weights)",
                 "torch_dtype float32 (the stored weights)", "add what args do not have, such as bos_"):  # fmt: skip
        assert part in note


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm_epsilon": None, "rotary_base": "x"}, "norm_epsilon (for rms_norm_eps), rotary_base (for rope_theta)"),
        (
            {"untie_embeddings_and_output_weights": None},
            "untie_embeddings_and_output_weights (for tie_word_embeddings)",
        ),
        ({"swiglu": False}, "have otherwise than llama, swiglu (for hidden_act)"),
        ({"group_query_attention": True, "num_query_groups": None}, "num_query_groups (for num_key_value_heads)"),
        ({"vocab_size": None, "padded_vocab_size": None}, "vocab_size (for vocab_size)"),
    ],
)
def test_an_arg_that_is_missing_is_named(tmp_path, changes, says):
    source = write_iteration(tmp_path / "iter_0000100")
    args = argparse.Namespace(**(ARGS | changes))
    (source / "common.pt").write_bytes(torch_file({"args": args, "iteration": 100}))
    done = call("convert", source, tmp_path / "out", "--to", "hf", "--map", MAPPING, "--config", "from-args")
    assert isinstance(done.exception, InvalidArgument) and says in str(done.exception)


def test_a_layout_that_the_family_does_not_have_is_refused(tmp_path):
    source = write_iteration(tmp_path / "iter_0000100", ARGS | {"rotary_percent": 0.5})
    found = call("convert", source, tmp_path / "out", "--to", "hf", "--map", MAPPING, "--config", "from-args").exception
    assert str(found).startswith(
        "the config.json of --config from-args is not that of this checkpoint: partial_rotary_"
    )


@pytest.mark.parametrize(
    ("names", "says"),
    [
        ((), "needs a built-in mapping from Megatron's names, with its family"),
        (("--map", "from-megatron-dist"), "needs a built-in mapping from Megatron's names, with its family"),
        (("--map", "llama-megatron-dist"), "needs a built-in mapping from Megatron's names, with its family"),
        (("--map", "llama-from-fused"), "needs a built-in mapping from Megatron's names, with its family"),
        (("--map", "a -> b"), "needs a built-in mapping from Megatron's names, with its family"),
        (("--map", "gpt2-from-megatron-dist"), "knows llama, qwen2, qwen3, mixtral, qwen3-moe, not gpt2"),
    ],
)
def test_which_mappings_it_is_for(tmp_path, names, says):
    source = write_iteration(tmp_path / "iter_0000100")
    found = call("convert", source, tmp_path / "out", "--to", "hf", *names, "--config", "from-args").exception
    assert isinstance(found, InvalidArgument) and says in str(found)


def test_a_source_without_args_or_with_a_config_of_its_own(tmp_path):
    source = write_iteration(tmp_path / "iter_0000100", None)
    options = ("--to", "hf", "--map", MAPPING, "--config", "from-args")
    assert "has no args of Megatron" in str(call("convert", source, tmp_path / "out", *options).exception)
    (source / "config.json").write_text((write_hub(tmp_path / "hub") / "config.json").read_text())
    assert "has a config.json; omit --config" in str(call("convert", source, tmp_path / "out", *options).exception)


def test_it_is_suggested_where_a_config_is_missing_and_args_are_there(tmp_path):
    source = write_iteration(tmp_path / "iter_0000100")
    found = str(call("convert", source, tmp_path / "out", "--to", "hf", "--map", MAPPING).exception)
    assert found.endswith("; --config from-args makes one of the run's args")
    found = str(call("convert", source, tmp_path / "out", "--to", "hf").exception)
    assert "if there is none, --map llama-from-megatron-dist --config from-args makes it of the run's args" in found
    (source / "common.pt").unlink()
    for names in ((), ("--map", MAPPING)):
        assert "from-args" not in str(call("convert", source, tmp_path / "out", "--to", "hf", *names).exception)


def test_a_folder_of_that_name_is_meant_by_a_path(tmp_path, monkeypatch):
    source = write_iteration(tmp_path / "iter_0000100")
    write_hub(tmp_path / "from-args", rms_norm_eps=1e-6)
    monkeypatch.chdir(tmp_path)
    done = call("convert", source, tmp_path / "out", "--to", "hf", "--map", MAPPING, "--config", "./from-args")
    assert done.exit_code == 0, done.exception
    assert "made of the run's args" not in done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_attention_heads"] == 4
