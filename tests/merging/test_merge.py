import json
import os
import shutil
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.core.errors import Damaged, InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.format.digest import digest_hex
from tests.merging.models import indexed, make, same, tensors


def average(a, b, key):
    return ((tensors(a)[key].float() + tensors(b)[key].float()) / 2).bfloat16()


def test_a_merged_model_opens_and_computes_as_the_merged_weights_do(folder, tmp_path):
    transformers: Any = pytest.importorskip("transformers")
    a, b = folder(seed=1), folder(seed=2)
    done = holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    expected = make("llama", tied=False)
    expected.load_state_dict({key: average(a, b, key) for key in tensors(a)})
    ids = torch.arange(12)[None]
    assert torch.equal(found.float()(ids).logits, expected.float()(ids).logits)
    assert done.tensors == len(tensors(a)) and done.bytes == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())


def test_side_files_are_the_donors_byte_for_byte(folder, tmp_path):
    a, b = folder(seed=1), folder(seed=2)
    (b / "chat_template.jinja").write_text("{{ messages }}")
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], donor=str(b))
    expected = {file.name: file.read_bytes() for file in b.iterdir() if file.suffix != ".safetensors"}
    found = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir() if file.suffix != ".safetensors"}
    record = json.loads(found.pop("merge_record.json"))
    assert found == expected and "chat_template.jinja" in found
    assert record["donor"] == os.path.basename(b)


def test_the_record_names_inputs_digests_and_options(folder, tmp_path):
    a, b = folder(seed=1), folder(seed=2)
    holdfast.merge([a, {"path": b, "name": "second"}], tmp_path / "out", weights=[1, {"*.mlp.*": 2, "*": 1}])
    record = json.loads((tmp_path / "out" / "merge_record.json").read_text())
    assert record["method"] == "linear" and record["tensors"] == len(tensors(a))
    assert record["bytes"] == sum(value.nbytes for value in tensors(tmp_path / "out").values())
    assert [model["name"] for model in record["models"]] == [os.path.basename(a), "second"]
    assert record["models"][1]["parameters"] == {"weight": {"*.mlp.*": 2, "*": 1}}
    digest = digest_hex((a / "model.safetensors").read_bytes())
    assert record["models"][0]["digests"] == {"model.safetensors": digest}


@pytest.mark.parametrize("skip", [0, 1, 3])
@pytest.mark.parametrize("method", ["linear", "slerp", "ties", "dare_linear", "della", "task_arithmetic"])
def test_tensors_at_odd_bytes_of_a_file_are_merged(folder, tmp_path, method, skip):
    models = [shutil.copytree(folder(seed=seed), tmp_path / f"model-{seed}") for seed in (1, 2, 3)]
    options: dict[str, Any] = {"weights": [1, 1]} if method != "slerp" else {"parameters": {"t": 0.3}}
    given = models[:2] if method != "slerp" else models[:1]
    if method != "linear":
        options["base"] = models[2]
    holdfast.merge(given, tmp_path / "even", method=method, **options)
    for model in models:
        _move_tensors(model / "model.safetensors", skip)
    holdfast.merge(given, tmp_path / "odd", method=method, **options)
    assert same(tensors(tmp_path / "even"), {k: v for k, v in tensors(tmp_path / "odd").items() if k != "skipped"})


def _move_tensors(path, skip):
    """Put a tensor of `skip` bytes before all others."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for entry in header.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + skip for offset in entry["data_offsets"]]
    header["skipped"] = {"dtype": "U8", "shape": [skip], "data_offsets": [0, skip]}
    written = json.dumps(header).encode()
    path.write_bytes(len(written).to_bytes(8, "little") + written + bytes(skip) + data[8 + size :])


def test_chunks_and_files_do_not_change_the_result(folder, tmp_path, monkeypatch):
    a, b = folder(seed=1), folder(seed=2)
    holdfast.merge([a, b], tmp_path / "one", weights=[0.3, 0.7])
    monkeypatch.setattr("holdfast.merging.methods.base.CHUNK_ELEMENTS", 37)
    monkeypatch.setattr("holdfast.merging.merge.BLOCK_BYTES", 1000)
    holdfast.merge([a, b], tmp_path / "many", weights=[0.3, 0.7], max_shard_size=5000)
    assert same(tensors(tmp_path / "one"), tensors(tmp_path / "many"))
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 5
    indexed(tmp_path / "many")


def test_removed_keys_are_reported_with_their_bytes(folder, tmp_path):
    a, b = folder(seed=1), folder(seed=2)
    done = holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], remove=["lm_head.*", "*.layers.2.*"])
    gone = {key for key in tensors(a) if key.startswith("lm_head.") or ".layers.2." in key}
    assert set(done.removed) == gone and tensors(tmp_path / "out").keys() == tensors(a).keys() - gone
    assert done.removed_bytes == sum(tensors(a)[key].nbytes for key in gone)
    indexed(tmp_path / "out")


def test_another_dtype_changes_only_that_field_of_the_config(folder, tmp_path):
    a, b = folder(seed=1), folder(seed=2)
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], out_dtype="float16")
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.float16}
    before, after = (path / "config.json" for path in (a, tmp_path / "out"))
    assert after.read_text() == before.read_text().replace('"bfloat16"', '"float16"')
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == (a / "generation_config.json").read_bytes()


def test_steps_of_a_run_are_merged_as_they_are(tmp_path):
    models = [torch.nn.Linear(8, 4) for _ in range(2)]
    for step, model in enumerate(models):
        holdfast.save(tmp_path / "run" / f"step-{step:012d}", {"model": model}, step=step)
    steps = sorted((tmp_path / "run").iterdir())
    holdfast.merge(steps, tmp_path / "out", weights=[1, 3])
    expected = (models[0].weight.double() + 3 * models[1].weight.double()) / 4
    found = tensors(tmp_path / "out")
    assert torch.allclose(found["weight"].double(), expected, atol=1e-7) and found.keys() == {"weight", "bias"}
    record = json.loads((tmp_path / "out" / "merge_record.json").read_text())
    assert record["models"][1]["step"] == 1
    assert record["models"][1]["digests"] == {"holdfast.json": digest_hex((steps[1] / "holdfast.json").read_bytes())}


def test_a_mapping_gives_the_names_of_the_other_model(tmp_path):
    a, b = ({"a.w": torch.randn(5, 3), "a.b": torch.randn(5)} for _ in range(2))
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    safetensors.torch.save_file(a, tmp_path / "a" / "model.safetensors")
    renamed = {"kernel": b["a.w"].T.contiguous(), "bias": b["a.b"]}
    safetensors.torch.save_file(renamed, tmp_path / "b" / "model.safetensors")
    mapping = "kernel^T -> a.w\nbias -> a.b\n"
    holdfast.merge([tmp_path / "a", {"path": tmp_path / "b", "mapping": mapping}], tmp_path / "out", weights=[1, 1])
    assert torch.equal(tensors(tmp_path / "out")["a.w"], (a["a.w"] + b["a.w"]) / 2)


def stored(path, **values):
    path.mkdir()
    safetensors.torch.save_file(values, path / "model.safetensors")
    return path


def test_integers_are_copied_if_all_models_agree(tmp_path):
    a = stored(tmp_path / "a", w=torch.ones(3), ids=torch.arange(4))
    b = stored(tmp_path / "b", w=torch.zeros(3), ids=torch.arange(4))
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    assert torch.equal(tensors(tmp_path / "out")["ids"], torch.arange(4))
    c = stored(tmp_path / "c", w=torch.zeros(3), ids=torch.ones(4, dtype=torch.int64))
    with pytest.raises(Mismatch, match=r"'ids' is int64.*differs"):
        holdfast.merge([a, c], tmp_path / "no", weights=[1, 1])
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "out"]


def test_a_damaged_input_leaves_the_target_as_it_was(tmp_path):
    steps = []
    for number in range(2):
        steps.append(tmp_path / f"step-{number:012d}")
        holdfast.save(steps[-1], {"model": torch.nn.Linear(64, 64)}, step=number)
    file = next(steps[1].glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match="the digest"):
        holdfast.merge(steps, tmp_path / "out", weights=[1, 1])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".attempt*"))
    holdfast.merge(steps, tmp_path / "out", weights=[1, 1], verify=False)


def test_the_target_must_be_free_and_apart_from_the_models(folder, tmp_path):
    a, b = folder(seed=1), folder(seed=2)
    with pytest.raises(InvalidArgument, match="is the source"):
        holdfast.merge([a, b], b / "inside", weights=[1, 1])
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    with pytest.raises(InvalidArgument, match="exists"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 0], force=True)
    assert same(tensors(tmp_path / "out"), tensors(a))


def test_what_cannot_be_merged_is_refused_by_name(tmp_path):
    a = stored(tmp_path / "a", w=torch.ones(3).to(torch.float8_e4m3fn))
    with pytest.raises(Unsupported, match="'w' is float8_e4m3fn"):
        holdfast.merge([a], tmp_path / "out", method="passthrough")
    with pytest.raises(NotFound):
        holdfast.merge([tmp_path / "nothing"], tmp_path / "out", method="passthrough")


@pytest.mark.parametrize("method", ["dare_ties", "della", "ties"])
def test_neither_order_nor_removed_keys_nor_files_change_what_is_random(folder, tmp_path, method):
    base, a, b = folder(), {"path": folder(seed=1), "weight": 0.7}, {"path": folder(seed=2), "weight": 0.6}
    options: dict[str, Any] = {"method": method, "base": base, "densities": [0.5, 0.5], "seed": 3}
    holdfast.merge([a, b], tmp_path / "one", **options)
    holdfast.merge([b, a], tmp_path / "two", remove=["*.layers.0.*"], max_shard_size=5000, **options)
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert two.keys() == {key for key in one if ".layers.0." not in key}
    assert same({key: one[key] for key in two}, two)
    holdfast.merge([a, b], tmp_path / "other", **{**options, "seed": 4})
    assert same(tensors(tmp_path / "other"), one) == (method == "ties")


def test_the_sequence_of_mergekit_goes_through_blocks_and_chunks(folder, tmp_path, monkeypatch):
    base, models = folder(), [folder(seed=1), folder(seed=2)]
    options: dict[str, Any] = {
        "method": "della",
        "base": base,
        "weights": [1, 1],
        "densities": [0.5, 0.4],
        "rng": "mergekit",
    }
    holdfast.merge(models, tmp_path / "one", **options)
    monkeypatch.setattr("holdfast.merging.methods.base.CHUNK_ELEMENTS", 37)
    monkeypatch.setattr("holdfast.merging.merge.BLOCK_BYTES", 1000)
    holdfast.merge(models, tmp_path / "many", **options)
    assert same(tensors(tmp_path / "one"), tensors(tmp_path / "many"))


def test_layers_of_two_models_make_a_deeper_one(folder, tmp_path):
    transformers: Any = pytest.importorskip("transformers")
    a, b = folder("qwen2", seed=1), folder("qwen2", seed=2)
    text = f"method: passthrough\nslices:\n- models: [{{path: {a}, layers: [0, 3]}}]\n"
    (tmp_path / "deep.yaml").write_text(text + f"- models: [{{path: {b}, layers: [1, 3]}}]\n")
    holdfast.merge(tmp_path / "deep.yaml", tmp_path / "out")
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and len(found.model.layers) == 5
    merged = tensors(tmp_path / "out")
    assert torch.equal(merged["model.layers.4.mlp.up_proj.weight"], tensors(b)["model.layers.2.mlp.up_proj.weight"])
    assert torch.equal(merged["lm_head.weight"], tensors(b)["lm_head.weight"])
    assert torch.equal(merged["model.embed_tokens.weight"], tensors(a)["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 5 and len(config["layer_types"]) == 5
    record = json.loads((tmp_path / "out" / "merge_record.json").read_text())
    assert record["layers"][3] == [os.path.basename(b), 1]


def test_layers_that_a_model_does_not_have_are_refused(folder, tmp_path):
    text = f"method: passthrough\nslices:\n- models: [{{path: {folder(seed=1)}, layers: [1, 4]}}]\n"
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match="it has 3 layers"):
        holdfast.merge(tmp_path / "deep.yaml", tmp_path / "out")


def test_steps_are_averaged_by_their_numbers(tmp_path):
    models = [torch.nn.Linear(8, 4) for _ in range(3)]
    for step, model in enumerate(models):
        holdfast.save(tmp_path / "run" / f"step-{step:012d}", {"model": model}, step=step)
    holdfast.merge([tmp_path / "run"], tmp_path / "out", steps=[0, 2])
    assert torch.equal(tensors(tmp_path / "out")["weight"], (models[0].weight + models[2].weight) / 2)
    with pytest.raises(InvalidArgument, match="one run"):
        holdfast.merge([tmp_path / "run"] * 2, tmp_path / "no", steps=[0, 2])


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "dare_ties"])
def test_elements_that_are_not_finite_are_counted_by_key(folder, tmp_path, method):
    a, b, base = folder(seed=1), folder(seed=2), folder(seed=3)
    values, key = tensors(a), "model.layers.0.mlp.up_proj.weight"
    values[key][0, :2] = torch.tensor([torch.nan, torch.inf])
    safetensors.torch.save_file(values, a / "model.safetensors", metadata={"format": "pt"})
    based = {} if method == "linear" else {"base": base}
    done = holdfast.merge([a, b], tmp_path / "out", method=method, weights=[1, 1], **based)
    count = int((~tensors(tmp_path / "out")[key].isfinite()).sum())
    assert count >= 2 and f"elements are NaN or infinite in {key} ({count:,})" in done.notes
    assert json.loads((tmp_path / "out" / "merge_record.json").read_text())["not_finite"] == {key: count}


OTHERS: dict[str, Any] = {
    "steps": [1], "method": "ties", "base": "x", "weights": [3, 4], "densities": [1, 1], "parameters": {"lambda": 3},
    "donor": "z", "dtype": "float32", "out_dtype": "float16", "remove": ["*"], "max_shard_size": 9, "tokens": "union",
    "seed": 3, "rng": "mergekit",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_an_option_beside_a_file_is_refused(folder, tmp_path, name):
    models = [str(folder(seed=1)), str(folder(seed=2))]
    (tmp_path / "own.toml").write_text(f"models = {models}")
    with pytest.raises(InvalidArgument, match=f"{name}: with a file, write it into the file"):
        holdfast.merge(tmp_path / "own.toml", tmp_path / "out", **{name: OTHERS[name]})
    assert holdfast.merge(tmp_path / "own.toml", tmp_path / "out", verify=False).tensors


def test_a_file_of_mergekit_takes_what_it_has_no_fields_for(folder, tmp_path):
    a, b, base = (str(folder(seed=seed)) for seed in (1, 2, 3))
    fields = {"merge_method": "dare_linear", "base_model": base, "parameters": {"density": 0.5, "weight": 1}}
    (tmp_path / "mk.yaml").write_text(json.dumps({**fields, "models": [{"model": a}, {"model": b}]}))
    beside: dict[str, Any] = {"seed": 5, "rng": "mergekit", "max_shard_size": 5000, "tokens": "rows"}
    options: dict[str, Any] = {"method": "dare_linear", "weights": [1, 1], "densities": [0.5, 0.5], **beside}
    holdfast.merge([a, b], tmp_path / "flags", base=base, **options)
    holdfast.merge(tmp_path / "mk.yaml", tmp_path / "file", **beside)
    assert (
        same(tensors(tmp_path / "flags"), tensors(tmp_path / "file"))
        and len(list((tmp_path / "file").glob("*.safetensors"))) > 1
    )
    with pytest.raises(InvalidArgument, match="tokens: with a file"):  # it has a source of its own
        (tmp_path / "own.yaml").write_text(json.dumps({**fields, "models": [{"model": a}], "tokenizer_source": "base"}))
        holdfast.merge(tmp_path / "own.yaml", tmp_path / "no", tokens="rows")
    with pytest.raises(InvalidArgument, match="dtype: with a file"):
        holdfast.merge(tmp_path / "mk.yaml", tmp_path / "no", dtype="float32")


def test_a_folder_in_place_of_a_list_is_named(folder, tmp_path):
    with pytest.raises(InvalidArgument, match="is a folder: give the models as a list"):
        holdfast.merge(folder(seed=1), tmp_path / "out")
