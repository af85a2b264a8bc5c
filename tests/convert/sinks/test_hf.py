import json
import os

import numpy as np
import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import InvalidArgument, NotFound, Unsupported
from tests.convert.states import save


def llama():
    transformers = pytest.importorskip("transformers", reason="transformers opens what was written")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    return transformers, transformers.LlamaForCausalLM(config)


def test_a_plain_folder_without_a_manifest_that_transformers_opens(tmp_path):
    transformers, model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    holdfast.save(tmp_path / "a", {"model": model, "optimizer": optimizer})
    done = convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    assert sorted(os.listdir(tmp_path / "b")) == ["config.json", "generation_config.json", "model.safetensors"]
    assert done.notes == ("a Hugging Face folder stores only the model: omitted optimizer",)
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b")
    assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), model.parameters(), strict=True))


def test_dtype_shards_and_removal(tmp_path):
    transformers, model = llama()
    holdfast.save(tmp_path / "a", {"model": model})
    options = ConvertOptions(to="hf", dtype="bfloat16", max_shard_size=8000, remove=("*.up_proj.weight",))
    convert(tmp_path / "a", tmp_path / "b", options)
    index = json.loads((tmp_path / "b" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2 and not any("up_proj" in key for key in index["weight_map"])
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    read = holdfast.open(tmp_path / "b").read("model.norm.weight")
    assert read.dtype.name == "bfloat16"
    convert(tmp_path / "a", tmp_path / "c", ConvertOptions(to="hf", dtype="bfloat16"))
    opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "c")
    assert opened.dtype == torch.bfloat16


def test_a_plain_folder_converts_back(tmp_path):
    save(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    convert(tmp_path / "b", tmp_path / "c", ConvertOptions())
    a, c = holdfast.open(tmp_path / "a"), holdfast.open(tmp_path / "c")
    assert c.groups == ("model",) and c.verify().good
    assert all(np.array_equal(a.read(key, "model"), c.read(key, "model")) for key in a.keys("model"))


def test_one_model_or_an_error_that_lists_them(tmp_path):
    modules = {"actor": torch.nn.Linear(2, 2), "critic": torch.nn.Linear(2, 1)}
    holdfast.save(tmp_path / "a", modules)
    with pytest.raises(NotFound, match="several modules: actor, critic; choose one with --only"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf", only=("critic",)))
    assert holdfast.open(tmp_path / "b").read("weight").shape == (1, 2)


def test_a_dtype_that_the_format_cannot_say_is_refused(tmp_path):
    holdfast.save(tmp_path / "a", {"model": {"wave": torch.zeros(2, dtype=torch.complex128)}})
    with pytest.raises(Unsupported, match="cannot store 'wave' with the dtype complex128"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))


def test_an_unknown_format_lists_those_there_are(tmp_path):
    save(tmp_path / "a")
    with pytest.raises(InvalidArgument, match="unknown output format 'onnx'; the formats are holdfast, hf, dcp"):
        convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="onnx"))


@pytest.mark.parametrize("tied", [True, False, None])
def test_a_tied_weight_is_written_where_the_config_does_not_tie_it(tmp_path, tied):
    transformers, model = llama()
    (tmp_path / "a").mkdir()
    torch.save(model.state_dict(), tmp_path / "a" / "pytorch_model.bin")  # the head shares the embedding's bytes
    fields = model.config.to_dict()
    fields.pop("tie_word_embeddings")
    (tmp_path / "a" / "config.json").write_text(
        json.dumps(fields | ({} if tied is None else {"tie_word_embeddings": tied}))
    )
    done = convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    assert ("lm_head.weight" in holdfast.open(tmp_path / "b").keys()) == (tied is False)
    assert any("tied to" in note for note in done.notes) == (tied is None)
    if tied is not None:
        opened = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "b")
        assert torch.equal(opened.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("named", [True, False])
def test_code_goes_along_where_the_config_names_it(tmp_path, named):
    (tmp_path / "a").mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "a" / "model.safetensors")
    config = {"auto_map": {"AutoModel": "modeling_mine.Mine"}} if named else {}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    (tmp_path / "a" / "modeling_mine.py").write_text("class Mine: ...")
    done = convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf"))
    assert (tmp_path / "b" / "modeling_mine.py").exists() == named
    assert any("modeling_mine.py" in note for note in done.notes) != named
    convert(tmp_path / "a", tmp_path / "b", ConvertOptions(to="hf", force=True))
