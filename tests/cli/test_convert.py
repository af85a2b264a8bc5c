import argparse
import io
import json
import os
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import holdfast
from holdfast.checkpoint.reading import Loading
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, HoldfastError, InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.mapping.program import Mapping
from holdfast.storage.local import LocalReader
from tests.cli.calls import call, process
from tests.convert.megatron import CONFIG, write_hub, write_iteration, write_run
from tests.sources.paddle.folders import states_of, write_group

MAPPING = "0.weight^T -> first.kernel  # Paddle's orientation\n2.weight -> last.a, last.b, axis=1\n"


@pytest.fixture
def source(tmp_path):
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer, "note": {"epoch": 2}}, step=9)
    (tmp_path / "m.aoa").write_text(MAPPING)
    return tmp_path / "a"


def test_a_conversion_says_what_it_wrote_and_how_to_open_it(source, tmp_path):
    done = process("convert", source, tmp_path / "b", "--map", tmp_path / "m.aoa")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    files = len(os.listdir(tmp_path / "b"))
    assert lines[0].startswith(f"wrote {tmp_path}/b: {files} files, ") and " in 0." in lines[0]
    assert lines[1] == f"open it with: holdfast show {tmp_path}/b"
    a, b = holdfast.open(source), holdfast.open(tmp_path / "b")
    assert np.array_equal(b.read("first.kernel"), a.read("0.weight").T)
    assert call("show", tmp_path / "b").exit_code == 0 and call("verify", tmp_path / "b").exit_code == 0


def test_there_and_back_is_the_same(source, tmp_path):
    assert call("convert", source, tmp_path / "b", "--map", tmp_path / "m.aoa").exit_code == 0
    assert call("convert", tmp_path / "b", tmp_path / "c", "--map", tmp_path / "m.aoa", "--reverse").exit_code == 0
    assert call("diff", source, tmp_path / "c").exit_code == 0


@pytest.mark.parametrize("name", ["fused", "llama-fused-grouped", "megatron", "llama-paddle"])
def test_a_built_in_mapping_by_its_name_there_and_back(tmp_path, name):
    transformers = pytest.importorskip("transformers", reason="its config says which family a model is of")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(5)[None], labels=torch.arange(5)[None]).loss.backward()
    optimizer.step()
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    assert call("convert", tmp_path / "a", tmp_path / "b", "--map", name).exit_code == 0
    assert call("diff", tmp_path / "a", tmp_path / "b").exit_code == 1
    assert call("convert", tmp_path / "b", tmp_path / "c", "--map", name, "--reverse").exit_code == 0
    assert call("diff", tmp_path / "a", tmp_path / "c").exit_code == 0


def test_json(source, tmp_path):
    fields = json.loads(call("convert", source, tmp_path / "b", "--to", "hf", "--only", "model", "--json").output)
    assert fields["path"] == str(tmp_path / "b") and fields["format"] == "hf" and fields["files"] == 1
    assert fields["bytes"] == (tmp_path / "b" / "model.safetensors").stat().st_size


def test_a_dry_run_is_a_table_and_writes_nothing(source, tmp_path):
    done = call("convert", source, tmp_path / "b", "--dry-run", "--map", tmp_path / "m.aoa", "--dtype", "bfloat16")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert lines[0].split() == ["group", "tensors", "files", "size", "dtypes"]
    assert lines[1].split()[:3] == ["model", "5", "1"] and lines[1].endswith("bfloat16 x5")
    assert lines[2].split()[:3] == ["optimizer", "15", "1"] and lines[2].endswith("float32 x15")
    assert "cast: 5 tensors of model, float32 to bfloat16" in lines
    assert "reshaped: 0 concatenated, 3 transposed" in lines
    assert lines[-1].startswith(f"from {source}: would write 2 tensor files, ")
    assert not (tmp_path / "b").exists()
    converted = json.loads(
        call("convert", source, tmp_path / "b", "--map", tmp_path / "m.aoa", "--dtype", "bfloat16", "--json").output
    )
    fields = json.loads(
        call(
            *("convert", source, tmp_path / "c", "--dry-run", "--json", "--map", tmp_path / "m.aoa"),
            *("--dtype", "bfloat16"),
        ).output
    )
    assert fields["problems"] == []
    assert fields["files"] == {path.name: path.stat().st_size for path in (tmp_path / "b").glob("*.safetensors")}
    assert fields["bytes"] < converted["bytes"]


def test_a_dry_run_reads_headers_alone(source, tmp_path, monkeypatch):
    ends = {}
    for path in source.glob("*.safetensors"):
        ends[path.name] = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    read = LocalReader.read_into

    def read_into(self, offset, buffers):
        if self.path.name in ends:
            assert offset + sum(buffer.nbytes for buffer in buffers) <= ends[self.path.name], "read tensors"
        read(self, offset, buffers)

    def refuse(*arguments, **options):
        raise AssertionError("read tensors")

    monkeypatch.setattr(LocalReader, "read_into", read_into)
    monkeypatch.setattr(LocalReader, "map", refuse)
    monkeypatch.setattr(Loading, "run_read", refuse)
    for form in ("holdfast", "hf", "dcp"):
        arguments = ("--dry-run", "--map", tmp_path / "m.aoa", "--to", form, "--dtype", "float16")
        done = call("convert", source, tmp_path / "b", *arguments)
        assert done.exit_code == 0, done.output


def test_a_dry_run_that_would_fail_says_everything_and_exits_with_1(source, tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").write_text("")
    (tmp_path / "bad.aoa").write_text("0.weight, 2.weight -> both, axis=0\n")
    done = call("convert", source, tmp_path / "b", "--dry-run", "--map", tmp_path / "bad.aoa")
    assert done.exit_code == 1
    problems = [line for line in done.output.splitlines() if line.startswith("would fail: ")]
    assert "b exists; choose another folder" in problems[0]
    assert "line 1" in problems[1] and "0.weight" in problems[1]
    done = call("convert", source, tmp_path / "c", "--dry-run", "--json", "--map", tmp_path / "bad.aoa")
    assert done.exit_code == 1 and len(json.loads(done.output)["problems"]) == 1


def test_what_is_wrong_with_a_call(source, tmp_path):
    def refused(error, match, *arguments):
        found = call("convert", *arguments).exception
        assert isinstance(found, error) and match in str(found), found

    refused(NotFound, "no such file or folder", tmp_path / "none", tmp_path / "b")
    refused(InvalidArgument, "--reverse needs a mapping", source, tmp_path / "b", "--reverse")
    refused(InvalidArgument, "unknown output format 'onnx'; the formats are holdfast, hf", source, "b", "--to", "onnx")
    refused(InvalidArgument, "not a size: 'five'", source, tmp_path / "b", "--max-shard-size", "five")
    refused(InvalidArgument, "matches the pattern 'nothing*'", source, tmp_path / "b", "--only", "nothing*")
    refused(InvalidArgument, "--dtype int8", source, tmp_path / "b", "--dtype", "int8")
    (tmp_path / "bad.aoa").write_text("# fine\n0.weight => 1.weight\n")
    refused(InvalidArgument, "line 2", source, tmp_path / "b", "--map", tmp_path / "bad.aoa")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "holdfast.json").write_text("{}")
    refused(InvalidArgument, "exists; choose another folder, or replace it with --force", source, tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "bad.aoa", "m.aoa"]


def test_damage_is_exit_code_1_and_no_verify_goes_on(source, tmp_path):
    path = source / "model-00001-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    done = process("convert", source, tmp_path / "b")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "is not the one in the manifest" in done.stderr
    assert isinstance(call("convert", source, tmp_path / "b").exception, Damaged)
    assert call("convert", source, tmp_path / "b", "--no-verify").exit_code == 0


def test_a_dry_run_says_what_a_mapping_does(source, tmp_path):
    (tmp_path / "m.aoa").write_text("0.weight^T -> kernel\n2.bias -> _\n")
    arguments = ("convert", source, tmp_path / "b", "--dry-run", "--map", tmp_path / "m.aoa")
    lines = call(*arguments).output.splitlines()
    assert "removed: 2.bias" in lines and "mapping: creates 3 tensors; see --explain for their sources" in lines
    lines = call(*arguments, "--explain").output.splitlines()
    assert "kernel: [6, 8] float32 <- 0.weight, dims [1, 0]" in lines and "removed: 2.bias" in lines
    found = json.loads(call(*arguments, "--explain", "--json").output)
    assert "removed: 2.bias" in found["mapping"]


def test_patterns_with_a_mapping_name_keys_of_the_target(source, tmp_path):
    found = call("convert", source, tmp_path / "b", "--map", "0.weight -> first.w", "--only", "0.weight").exception
    assert isinstance(found, InvalidArgument) and "it matches keys of the source, which the mapping renames" in str(
        found
    )
    found = call("convert", source, tmp_path / "b", "--map", "0.weight -> first.w", "--remove", "frist.w").exception
    assert isinstance(found, InvalidArgument) and "keys are, for example, first.w" in str(found)


def test_a_mapping_file_that_is_not_there_is_called_a_file(source, tmp_path):
    for name in ("maps/llama", "llama.aoa"):
        found = call("convert", source, tmp_path / "b", "--map", name).exception
        assert isinstance(found, NotFound) and str(found) == f"{name}: no such mapping file"


def test_the_option_that_tells_a_tp_degree_is_named(tmp_path):
    weights = {name: np.ones((4, 6), np.float32) for name in ("gate", "up")}
    safetensors.numpy.save_file(weights, tmp_path / "w.safetensors")
    arguments = ("convert", tmp_path / "w.safetensors", tmp_path / "b", "--map", "gate, up -> both, fused_ffn")
    assert "--tp-degree" in str(call(*arguments).exception)
    assert call(*arguments, "--tp-degree", "2").exit_code == 0


def test_a_config_can_be_given_for_built_in_names(tmp_path):
    config = {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 4}
    config |= {"num_hidden_layers": 1, "intermediate_size": 6, "vocab_size": 8}
    prefix = "model.layers.0"
    shapes = {f"{prefix}.self_attn.{n}_proj.weight": (4, 4) for n in "qkvo"}
    shapes |= {f"{prefix}.mlp.{n}_proj.weight": (6, 4) for n in ("gate", "up")}
    safetensors.numpy.save_file(
        {key: np.ones(shape, np.float32) for key, shape in shapes.items()}, tmp_path / "w.safetensors"
    )
    source = tmp_path / "w.safetensors"
    assert call("convert", source, tmp_path / "b", "--map", "fused").exit_code
    (tmp_path / "c.json").write_text(json.dumps(config))
    done = call("convert", source, tmp_path / "b", "--map", "fused", "--config", tmp_path / "c.json")
    assert done.exit_code == 0, done.exception
    assert f"{prefix}.self_attn.qkv_proj.weight" in holdfast.open(tmp_path / "b").keys()
    (tmp_path / "c.json").write_text("[]")
    for name, match in (("c.json", "expected a JSON object"), ("none.json", "No such file")):
        found = call("convert", source, tmp_path / "d", "--map", "fused", "--config", tmp_path / name).exception
        assert isinstance(found, HoldfastError) and match in str(found)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_of_megatron_with_padded_tokens_becomes_a_model_that_opens(tmp_path, tied):
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=61, tie_word_embeddings=tied,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    (tmp_path / "config.json").write_text(json.dumps(config.to_diff_dict() | {"architectures": ["LlamaForCausalLM"]}))
    hub = model.state_dict()
    padded = torch.cat([hub["model.embed_tokens.weight"], torch.ones(67, 32)])
    megatron: dict[str, Any] = {
        "embedding.word_embeddings.weight": padded,
        "output_layer.weight": padded if tied else torch.cat([hub["lm_head.weight"], torch.ones(67, 32)]),
        "decoder.final_layernorm.weight": hub["model.norm.weight"],
    }
    for n in range(2):
        ours, own = f"model.layers.{n}", f"decoder.layers.{n}"
        parts = [hub[f"{ours}.self_attn.{name}_proj.weight"].view(2, -1, 32) for name in "qkv"]
        up = [hub[f"{ours}.mlp.{name}_proj.weight"] for name in ("gate", "up")]
        megatron |= {
            f"{own}.self_attention.linear_qkv.weight": torch.cat(parts, 1).reshape(-1, 32),
            f"{own}.self_attention.linear_qkv.layer_norm_weight": hub[f"{ours}.input_layernorm.weight"],
            f"{own}.self_attention.linear_qkv._extra_state": torch.zeros(3, dtype=torch.uint8),
            f"{own}.self_attention.core_attention._extra_state": io.BytesIO(b"not used"),
            f"{own}.self_attention.linear_proj.weight": hub[f"{ours}.self_attn.o_proj.weight"],
            f"{own}.mlp.linear_fc1.weight": torch.cat(up),
            f"{own}.mlp.linear_fc1.layer_norm_weight": hub[f"{ours}.post_attention_layernorm.weight"],
            f"{own}.mlp.linear_fc2.weight": hub[f"{ours}.mlp.down_proj.weight"],
        }
    args = argparse.Namespace(num_layers=2, params_dtype=torch.float32)
    torch.save({"model": megatron, "args": args, "iteration": 7}, tmp_path / "model_optim_rng.pt")

    options = ("--map", "llama-from-megatron", "--config", tmp_path / "config.json", "--to", "hf")
    command = ("convert", tmp_path / "model_optim_rng.pt", tmp_path / "out", *options)
    assert "lm_head.weight: [61, 32] float32" in call(*command, "--dry-run", "--explain").output
    done = call(*command)
    assert done.exit_code == 0, done.exception
    assert "embedding.word_embeddings.weight: dropped rows 61 to 127" in done.output
    assert "dropped 2 _extra_state" in done.output and "open it with" in done.output

    opened, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(20)[None]
    assert torch.equal(opened(tokens).logits, model(tokens).logits)

    for source, names in ((tmp_path / "model_optim_rng.pt", ()), (tmp_path / "out", ("--map", "llama-megatron"))):
        unopened = tmp_path / f"megatron-{len(names)}"
        command = ("convert", source, unopened, "--config", tmp_path / "config.json", "--to", "hf", *names)
        found = call(*command).exception
        assert isinstance(found, Unsupported) and not unopened.exists()
        hint = "--to dcp is what Megatron loads" if names else "did you mean --map llama-from-megatron?"
        assert str(found).startswith("the names are Megatron's, with which from_pretrained would give every weight an")
        assert f"{hint} (--keep-names writes the names as they are, without config.json)" in str(found)
        said = call(*command, "--keep-names").output
        assert "config.json is left out" in said and "open it with" not in said
        assert not (unopened / "config.json").exists()  # from_pretrained fails, in place of a model of initial values


def test_the_root_of_a_megatron_run_and_the_folder_of_its_config_are_enough(tmp_path):
    root, hub = write_run(tmp_path / "run", 50, 100), write_hub(tmp_path / "hub")
    command = ("convert", root, tmp_path / "out", "--to", "hf", "--map", "llama-from-megatron-dist", "--config", hub)
    done = call(*command)
    assert done.exit_code == 0, done.exception
    assert f"read from its newest iteration, {root}/iter_0000100" in done.output and "open it with" in done.output
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == CONFIG
    assert f"from {root}/iter_0000050: would write" in call(*command, "--step", 50, "--force", "--dry-run").output
    assert call("show", root).output.startswith(f"{root}/iter_0000100\nstep 100")
    found = call("show", root, "--step", 7).exception
    assert isinstance(found, NotFound) and str(found) == f"{root} has no step 7; it has 50, 100"
    found = call(*command[:-1], root).exception
    assert isinstance(found, NotFound) and str(found) == f"--config {root}: the folder has no config.json"


def test_a_config_of_another_model_is_refused_for_megatrons_names(tmp_path):
    source = write_iteration(tmp_path / "iter_0000100")
    options = ("--to", "hf", "--map", "llama-from-megatron-dist", "--config")
    hub = write_hub(tmp_path / "hub", num_attention_heads=8, num_key_value_heads=4, head_dim=4)  # the same shapes
    found = call("convert", source, tmp_path / "out", *options, hub).exception
    assert isinstance(found, Mismatch)
    assert "num_attention_heads is 8, and the checkpoint has 4; num_key_value_heads is 4, and the c" in str(found)
    (source / "common.pt").unlink()
    done = call("convert", source, tmp_path / "out", *options, hub)
    assert done.exit_code == 0 and "num_key_value_heads 4 of config.json are taken as they are" in done.output
    more = write_hub(tmp_path / "more", num_hidden_layers=3)
    assert "num_hidden_layers is 3" in call("convert", source, tmp_path / "o", *options, more, "--dry-run").output


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_theta": 5e5}, "rope_theta is 500000, and the args have rotary_base 10000"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps is 1e-05, and the args have norm_epsilon 1e-06"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is true, and the args have untie_embeddings_and_output_w"),
    ],
)
@pytest.mark.parametrize("own", [False, True])
def test_what_no_shape_shows_is_compared_with_the_args_of_the_run(tmp_path, changes, says, own):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub", **changes)
    (tmp_path / "own.map").write_text(str(Mapping.parse("llama-from-megatron-dist", CONFIG)))
    name = tmp_path / "own.map" if own else "llama-from-megatron-dist"
    found = call("convert", source, tmp_path / "out", "--to", "hf", "--map", name, "--config", hub).exception
    assert isinstance(found, Mismatch) and says in str(found)
    assert str(found).startswith(f"{hub}/config.json is not that of this checkpoint: ")
    assert not (tmp_path / "out").exists()


def test_a_config_of_another_family_is_noted(tmp_path):
    source = write_iteration(tmp_path / "iter_0000100")
    hub = write_hub(tmp_path / "hub", model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    done = call("convert", source, tmp_path / "out", "--to", "hf", "--map", "llama-from-megatron-dist", "--config", hub)
    assert done.exit_code == 0, done.exception
    assert "note: config.json has model_type 'mistral', and the mapping llama-from-megatron-dist gives" in done.output
    assert "has model_type" not in call("convert", source, tmp_path / "o", "--map", "llama-from-megatron-dist",
                                        "--config", write_hub(tmp_path / "own"), "--dry-run").output  # fmt: skip


def test_the_mapping_is_named_where_it_was_left_out_or_is_another(tmp_path):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    command = ("convert", source, tmp_path / "out", "--dry-run")
    assert "did you mean --map from-megatron-dist --config FOLDER" in call(*command).output
    assert "did you mean" not in call(*command, "--to", "dcp").output
    assert "did you mean --map llama-from-megatron-dist?" in call(*command, "--to", "hf", "--config", hub).output
    for name in ("llama-from-megatron", "from_megatron", "gpt2-from-megatron"):
        done = call(*command, "--to", "hf", "--config", hub, "--map", name)
        assert "did you mean --map llama-from-megatron-dist?" in done.output
    fits = call(*command, "--to", "hf", "--config", hub, "--map", "from-megatron-dist")
    assert fits.exit_code == 0 and "did you mean" not in fits.output


def test_the_hint_for_a_mapping_comes_first_and_asks_for_no_config_that_was_given(tmp_path):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    for options in ((), ("--config", hub)):
        command = ("convert", source, tmp_path / "out", "--dry-run", "--to", "hf", *options)
        done = call(*command)
        problems = [line for line in done.output.splitlines() if line.startswith("would fail: ")]
        assert done.exit_code == 1 and len(problems) == 1 and "did you mean --map" in problems[0]
        first, *others = [line for line in call(*command, "--keep-names").output.splitlines() if "note: " in line]
        assert "config.json is left out" in first and not any("has no config.json" in note for note in others)


def test_weights_without_a_name_of_the_given_model_are_refused(tmp_path):
    pytest.importorskip("transformers", reason="it builds the model of a config")
    hub = write_hub(tmp_path / "hub")
    layers = {f"layers.{n}.attention.{name}.weight": torch.ones(32, 32) for n in range(2) for name in ("wq", "wo")}
    torch.save({"tok_embeddings.weight": torch.ones(61, 32)} | layers, tmp_path / "titan.pt")
    command = ("convert", tmp_path / "titan.pt", tmp_path / "out", "--to", "hf", "--config", hub)
    found = call(*command).exception
    assert isinstance(found, Unsupported)
    assert f"no weight has a name of the model of {hub}/config.json (model_type 'llama'), which has mode" in str(found)
    assert "the source has tok_embeddings.weight, layers.0.attention.wq.weight" in str(found)
    assert call(*command, "--keep-names").exit_code == 0 and not (tmp_path / "out" / "config.json").exists()
    assert call(*command[:-2], "--force").exit_code == 0  # without a config.json nothing says which model it is
    torch.save({"model.norm.weight": torch.ones(32)}, tmp_path / "part.pt")
    assert call("convert", tmp_path / "part.pt", tmp_path / "part", *command[3:]).exit_code == 0


def test_what_only_megatron_reads_is_not_copied(tmp_path):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    (source / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (source / "tokenizer.json").write_text("{}")
    options = ("--to", "hf", "--map", "llama-from-megatron-dist", "--config", hub)
    assert call("convert", source, tmp_path / "out", *options).exit_code == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors", "tokenizer.json"]
    for number, text in enumerate(('{"mine": 1}', "[]", "{")):  # another file of this name belongs to the user
        (source / "metadata.json").write_text(text)
        assert call("convert", source, tmp_path / f"{number}", *options).exit_code == 0
        assert (tmp_path / f"{number}" / "metadata.json").read_text() == text


def test_a_mapping_in_the_wrong_direction_gets_the_other_one_as_a_hint(tmp_path):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    names = ("--map", "llama-from-megatron-dist")
    assert call("convert", source, tmp_path / "out", "--to", "hf", "--config", hub, *names).exit_code == 0

    def said(path, *options):
        return str(call("convert", path, tmp_path / "back", *options).exception)

    hint = "did you mean --map llama-from-megatron-dist?"
    text = said(source, "--config", hub, "--map", "llama-megatron-dist")
    assert f"; {hint}\n" in text and text.endswith("^") and "add optional" not in text
    assert "mapping, llama-from-megatron, line " in said(source, "--config", hub, "--map", "llama-from-megatron")
    assert said(source, *names).startswith("the mapping 'llama-from-megatron-dist' needs num_attention_heads")
    assert said(source, "--config", hub, *names, "--reverse").endswith(f"{hint} (without --reverse)")
    hint = "the names are already the hub's: did you mean --map llama-megatron-dist?"
    assert "; " + hint in said(tmp_path / "out", *names)
    assert said(tmp_path / "out", "--map", "llama-megatron-dist", "--reverse").endswith(f"{hint} (without --reverse)")
    assert said(tmp_path / "out", "--map", "from-megatron-dist").endswith("did you mean --map megatron-dist?")


def test_the_way_back_says_how_rows_are_padded(tmp_path):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    out, names = tmp_path / "out", ("--map", "llama-from-megatron-dist")
    done = call("convert", source, out, "--to", "hf", "--config", hub, *names)
    assert "resize-vocab" not in done.output
    done = call("convert", out, tmp_path / "back", "--to", "dcp", "--map", "llama-megatron-dist")
    assert (
        done.exit_code == 0 and "note: embedding.word_embeddings.weight and output_layer.weight: 61 ro" in done.output
    )
    done = call("convert", out, tmp_path / "reverse", *names, "--reverse")
    assert done.exit_code == 0 and "holdfast resize-vocab SRC PADDED --size 61 --pad-to N" in done.output
    assert call("resize-vocab", out, tmp_path / "padded", "--size", 61, "--pad-to", 1024).exit_code == 0
    done = call("convert", tmp_path / "padded", tmp_path / "whole", "--map", "llama-megatron-dist")
    assert done.exit_code == 0 and "resize-vocab" not in done.output
    done = call("convert", out, tmp_path / "fused", "--map", "llama-fused")
    assert done.exit_code == 0 and "resize-vocab" not in done.output


def test_the_step_that_was_read_is_named(tmp_path, run):
    root = write_run(tmp_path / "megatron", 50, 100)
    done = call("convert", root, tmp_path / "a", "--to", "dcp", "--step", 50)
    assert f"\nread {root}/iter_0000050\nwrote {tmp_path}/a: " in done.output
    assert f"read {run}/step-000000000100\n" in call("convert", run, tmp_path / "b", "--only", "model").output
    assert "read " not in call("convert", tmp_path / "b", tmp_path / "c").output
    found = json.loads(call("convert", run, tmp_path / "d", "--only", "model", "--json").output)
    assert found["source"] == f"{run}/step-000000000100"


def test_waiting_for_a_library_is_no_part_of_the_rate(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="what is waited for")
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    waits = []

    def compared(contents, selected, config, name, on_wait):
        on_wait()
        time.sleep(1.2)

    monkeypatch.setattr("holdfast.convert.run.check_model", compared)
    options = ConvertOptions(
        "hf", mapping=MappingOptions("llama-from-megatron-dist", config=CONFIG), on_wait=waits.append
    )
    began = time.monotonic()
    done = convert(source, tmp_path / "out", options)
    took_s = time.monotonic() - began
    assert waits == ["comparing with transformers' model"]
    assert done.waits["comparing with transformers' model"] >= 1.2 and done.seconds <= took_s - 1.2
    names = ("--to", "hf", "--map", "llama-from-megatron-dist", "--config", hub)
    line = call("convert", source, tmp_path / "b", *names).output.splitlines()[-2]
    assert line.startswith("wrote ") and ", after 1." in line and line.endswith(" s comparing with transformers' model")


def test_the_way_back_refuses_a_config_that_is_not_the_sources(tmp_path):
    source, hub = write_iteration(tmp_path / "iter_0000100"), write_hub(tmp_path / "hub")
    out = tmp_path / "out"
    assert call("convert", source, out, "--to", "hf", "--config", hub, "--map", "from-megatron-dist").exit_code == 0
    other = write_hub(tmp_path / "other", num_attention_heads=8, num_key_value_heads=4, head_dim=4)  # the same shapes
    back = ("convert", out, tmp_path / "back", "--map", "llama-megatron-dist", "--config")
    found = call(*back, other).exception
    assert isinstance(found, Mismatch) and "num_attention_heads is 8, and SRC's is 4; num_key_value" in str(found)
    assert call(*back, hub).exit_code == 0


def test_how_to_open_it_is_said_where_that_works(tmp_path):
    (tmp_path / "hub").mkdir()
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "hub" / "model.safetensors")
    assert "open it with" not in call("convert", tmp_path / "hub", tmp_path / "a", "--to", "hf").output
    (tmp_path / "hub" / "config.json").write_text("{}")
    assert "from_pretrained" in call("convert", tmp_path / "hub", tmp_path / "b", "--to", "hf").output
    renamed = call("convert", tmp_path / "hub", tmp_path / "c", "--to", "hf", "--map", "w -> v")
    assert renamed.exit_code == 0 and "open it with" not in renamed.output
    back = call("convert", tmp_path / "hub", tmp_path / "d", "--to", "hf", "--map", "v -> w", "--reverse")
    assert "from_pretrained" in back.output


def test_an_odd_environment_is_a_message(source, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    found = call("convert", source, tmp_path / "b").exception
    assert isinstance(found, InvalidArgument) and "WORLD_SIZE='abc'" in str(found)


def test_a_rank_without_a_world_is_no_other_rank(source, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert "would write" in call("convert", source, tmp_path / "b", "--dry-run").output
    assert isinstance(call("convert", source, tmp_path / "b", "--reverse").exception, InvalidArgument)


def test_dtype_takes_the_masters_where_they_are_as_wide(tmp_path):
    key, master = "model.norm.weight", np.array([1 + 2**-12, 2, 3], np.float32)
    weight = master.astype(ml_dtypes.bfloat16).astype(np.float32)
    write_group(tmp_path / "a", "model", {key: master.astype(ml_dtypes.bfloat16).view(np.uint16)})
    write_group(tmp_path / "a", "master_weights", {key: master})
    write_group(tmp_path / "a", "optimizer", states_of({key: master}), master_weights=True)
    arguments = ("convert", tmp_path / "a", tmp_path / "b", "--to", "hf", "--only", "model")
    assert call(*arguments, "--dtype", "float32").exit_code == 0
    assert np.array_equal(holdfast.open(tmp_path / "b").read(key), master)
    assert call(*arguments, "--dtype", "float64", "--force").exit_code == 0
    assert np.array_equal(holdfast.open(tmp_path / "b").read(key), weight)


def test_help_teaches():
    text = call("convert", "--help").output
    assert "holdfast convert runs/llama exported --to hf --dtype bfloat16" in text
    assert "torchrun --nproc-per-node 8 -m holdfast convert SRC DST" in text
    assert all(form in text for form in ("holdfast", "hf", "dcp"))


def test_torch_is_not_imported(source, tmp_path):
    code = (
        "import sys; sys.argv = ['holdfast', 'convert', *sys.argv[1:]]\n"
        "from holdfast.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code, source, tmp_path / "b"], check=True, timeout=60)


def test_a_dry_run_refuses_the_destinations_that_a_conversion_refuses(source, tmp_path):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    for destination, match in (
        (source / "sub", "contains it or is inside it"),
        (tmp_path / "code", "is not a checkpoint"),
    ):
        done = call("convert", source, destination, "--dry-run", "--force")
        assert done.exit_code == 1 and match in done.output
