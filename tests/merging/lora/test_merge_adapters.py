"""Merges of adapters: refusals that name what is wrong, Holdfast steps with their base, ranks, side files, memory."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.core.errors import Damaged, HoldfastError, InvalidArgument, Mismatch, NotFound, Unsupported
from holdfast.merging.lora.merge_lora_call import merge_lora
from tests.cli.calls import call
from tests.merging.lora import adapters
from tests.merging.lora.test_beside_peft import LINEAR, compare

WEIGHTS = "adapter_model.safetensors"
TOKEN_ROWS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
CHANGED = "model.layers.0.self_attn.q_proj.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and an adapter of it."""
    folder = tmp_path_factory.mktemp("saved")
    base = adapters.llama(folder / "base")
    return base, adapters.adapter(base, folder / "adapter", target_modules=LINEAR)


@pytest.fixture
def changed(saved: tuple[Path, Path], tmp_path: Path) -> Path:
    """A copy of the adapter to damage."""
    path = tmp_path / "changed"
    path.mkdir()
    for file in saved[1].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def refused(base: Path, adapter: Path, tmp_path: Path, error: type[HoldfastError], match: str) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(error, match=match):
        merge_lora(adapter, tmp_path / "merged", base=base)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def with_tensors(adapter: Path, **tensors: torch.Tensor | None) -> None:
    found = load_file(adapter / WEIGHTS)
    every: dict[str, torch.Tensor | None] = {**found, **tensors}
    save_file({key: value for key, value in every.items() if value is not None}, adapter / WEIGHTS)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"peft_type": "LOHA"}, Unsupported, "peft_type is 'LOHA'; Holdfast merges LORA"),
        ({"peft_type": None}, Unsupported, "peft_type is 'None'"),
        ({"r": 10**9}, InvalidArgument, "expected a rank from 1 to 16384, got 1000000000"),
        ({"r": True}, InvalidArgument, "expected a rank"),
        ({"r": "4"}, InvalidArgument, "expected a rank from 1 to 16384, got '4'"),
        ({"r": 4}, Mismatch, r"have the shapes \[8, 96\] and \[96, 8\], expected \[4, 96\] and \[96, 4\]"),
        ({"rank_pattern": {"q_proj": 3}}, Mismatch, "the rank in the config is 3"),
        ({"rank_pattern": {"(a+)+x": 3}}, Unsupported, "may take forever to match"),
        ({"rank_pattern": {"(": 3}}, InvalidArgument, "is no regular expression"),
        ({"lora_alpha": 1e300}, InvalidArgument, "lora_alpha: expected a finite number"),
        ({"lora_alpha": "8"}, InvalidArgument, "lora_alpha: expected a finite number"),
        ({"use_dora": True}, Mismatch, "use_dora needs a lora_magnitude_vector of 96, got none"),
        ({"use_rslora": 3}, InvalidArgument, "use_rslora: expected true or false"),
        ({"target_parameters": ["x"]}, Unsupported, "cannot merge an adapter with 'target_parameters'"),
        ({"layer_replication": [[0, 1]]}, Unsupported, "'layer_replication'"),
        ({"a_field_of_the_future": 1}, Unsupported, "'a_field_of_the_future'"),
        ({"init_lora_weights": "pissa_niter_4"}, Unsupported, "'pissa_niter_4', which changes the base model too"),
        ({"trainable_token_indices": [1]}, Mismatch, "trains rows of the embeddings, but has no such tensor"),
        ({"trainable_token_indices": [-1]}, InvalidArgument, "different non-negative numbers"),
    ],
)
def test_a_config_that_cannot_be_merged_is_refused(
    saved: tuple[Path, Path], changed: Path, tmp_path: Path, fields: dict[str, Any], error: Any, match: str
) -> None:
    adapters.changed_config(changed, **fields)
    refused(saved[0], changed, tmp_path, error, match)


@pytest.mark.parametrize(
    ("tensors", "error", "match"),
    [
        ({f"{Q}.lora_B.weight": None}, Mismatch, r"q_proj' has '.*lora_A.weight', but no lora_B.weight"),
        ({f"{Q}.lora_A.weight": torch.ones(8, 95)}, Mismatch, r"\[8, 95\] and \[96, 8\], expected \[8, 96\]"),
        ({f"{Q}.lora_A.weight": torch.ones(8, 96).int()}, Unsupported, "a tensor of the adapter is int32"),
        ({f"{Q}.lora_A.weight": torch.ones(8, 96, 1, 1)}, Unsupported, "has 4 dims|have 4 dims"),
        ({f"{Q}.lora_magnitude_vector": torch.ones(96)}, Mismatch, "lora_magnitude_vector': no other tensor or option"),
        ({f"{Q}.lora_B.bias": torch.ones(96)}, Mismatch, "has a lora_B.bias, but the base has no such bias"),
        ({"base_model.model.extra.lora_A.weight": torch.ones(2)}, Mismatch, "has no weight of 'extra'"),
        ({"base_model.model.extra.weight": torch.ones(2)}, Mismatch, r"the base .* has no 'extra\.weight'"),
        ({"base_model.model.lm_head.weight": torch.ones(200, 96)}, Mismatch, r"shape \[200, 96\], the base's"),
        ({"base_model.model.lm_head.weight": torch.ones(301, 96)}, Mismatch, "grow lm_head.weight to 301 rows, but"),
        ({TOKEN_ROWS: torch.ones(1, 96)}, Mismatch, "has 0 rows"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_listed(
    saved: tuple[Path, Path], changed: Path, tmp_path: Path, tensors: dict[str, Any], error: Any, match: str
) -> None:
    with_tensors(changed, **tensors)
    refused(saved[0], changed, tmp_path, Mismatch, match)
    assert error in (Mismatch, Unsupported)


def test_tokens_that_leave_rows_without_values_are_refused(
    saved: tuple[Path, Path], changed: Path, tmp_path: Path
) -> None:
    with_tensors(changed, **{TOKEN_ROWS: torch.ones(2, 96)})
    adapters.changed_config(changed, trainable_token_indices=[300, 302])
    refused(saved[0], changed, tmp_path, Mismatch, "adds rows to 300 of the base, but not 301")
    adapters.changed_config(changed, trainable_token_indices=[300, 2**31 - 1])
    refused(saved[0], changed, tmp_path, Mismatch, "adds rows to 300 of the base, but not 301")


def test_pickles_and_folders_without_an_adapter_are_refused(
    saved: tuple[Path, Path], changed: Path, tmp_path: Path
) -> None:
    (changed / WEIGHTS).unlink()
    torch.save({}, changed / "adapter_model.bin")
    refused(saved[0], changed, tmp_path, Unsupported, r"is a pickle, adapter_model\.bin.*safe_serialization")
    refused(saved[0], saved[0], tmp_path, NotFound, "has no adapter, but model")
    (changed / "adapter_model.bin").unlink()
    (changed / WEIGHTS).write_bytes((2**40).to_bytes(8, "little") + b"{")
    refused(saved[0], changed, tmp_path, Damaged, "header")


def test_a_tied_head_that_was_trained_alone_is_untied(tmp_path: Path) -> None:
    """PEFT merges it into both embeddings. The adapter itself changes the output only, and so does the result."""
    base = adapters.llama(tmp_path / "base", torch.float32, tied=True)
    added = adapters.adapter(base, tmp_path / "adapter", target_modules=["q_proj", "lm_head"])
    merge_lora(added, tmp_path / "merged", base=base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tuned: Any = PeftModel.from_pretrained(adapters.opened(base), added)
    tokens = torch.arange(9)[None]
    with torch.no_grad():
        found, wanted = adapters.opened(tmp_path / "merged")(tokens).logits, tuned(tokens).logits
    assert torch.allclose(found, wanted, atol=1e-5)
    with_tensors(added, **{"base_model.model.lm_head.base_layer.weight": None})
    merge_lora(added, tmp_path / "again", base=base)
    compare(tmp_path / "again", adapters.opened(tmp_path / "merged").state_dict())


def test_a_quantized_base_is_refused(saved: tuple[Path, Path], tmp_path: Path) -> None:
    from holdfast.convert.quantize import QuantizeOptions
    from holdfast.convert.run import ConvertOptions, convert

    convert(saved[0], tmp_path / "fp8", ConvertOptions(to="hf", quantize=QuantizeOptions()))
    refused(tmp_path / "fp8", saved[1], tmp_path, Mismatch, "is float8_e4m3fn; dequantize the base first")


def train_step(root: Path, base: Path, mode: str, *, step: int = 1, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model: Any = get_peft_model(
        adapters.opened(base), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    with holdfast.Checkpointer(root, base=mode) as checkpointer:
        checkpointer.save(step, {"model": model}).result()
    return model.merge_and_unload().state_dict()


def test_steps_of_an_adapter_are_refused_without_lora_and_averaged_with_it(
    saved: tuple[Path, Path], tmp_path: Path
) -> None:
    """The average of the matrices A and B is not that of the products B A."""
    run = tmp_path / "run"
    first = train_step(run, saved[0], "reference")
    second = train_step(run, saved[0], "reference", step=2, seed=4)
    with pytest.raises(Unsupported, match=r"not that of the models.*DST --lora .*0001`.*1/n each"):
        holdfast.merge([run], tmp_path / "merged", steps=[1, 2])
    steps = [f"{run}/step-{step}" for step in (1, 2)]
    refused_too = call("merge", tmp_path / "merged", "--lora", run, "--steps", "1,2")
    assert "--lora runs/lora/step-900" in str(refused_too.exception)
    assert not (tmp_path / "merged").exists()
    weighted = ["--lora", steps[0], "--weight", 0.5, "--lora", steps[1], "--weight", 0.5]
    assert call("merge", tmp_path / "merged", *weighted).exit_code == 0
    state = adapters.opened(tmp_path / "merged").state_dict()
    for key, value in first.items():
        mean = (value.float() + second[key].float()) / 2
        assert torch.allclose(state[key].float(), mean, rtol=2**-7, atol=1e-3), key
    assert not torch.equal(first[CHANGED], second[CHANGED])


@pytest.mark.parametrize("mode", ["reference", "full"])
def test_a_training_step_knows_its_base(saved: tuple[Path, Path], tmp_path: Path, mode: str) -> None:
    wanted = train_step(tmp_path / "run", saved[0], mode)
    done = merge_lora(tmp_path / "run", tmp_path / "merged")
    assert done.adapters == 1
    compare(tmp_path / "merged", wanted)
    record = json.loads((tmp_path / "merged" / "merge_record.json").read_text())
    assert record["adapters"][0]["step"] == 1
    assert record["adapters"][0]["digests"].keys() == {"holdfast.json"}


def test_a_base_that_changed_since_the_training_is_refused(tmp_path: Path) -> None:
    base = adapters.llama(tmp_path / "base")
    train_step(tmp_path / "run", base, "reference")
    file = next(base.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Mismatch, match="its base model changed"):
        merge_lora(tmp_path / "run", tmp_path / "merged")
    for file in base.iterdir():
        file.unlink()
    base.rmdir()
    with pytest.raises(NotFound, match="is missing on this host; name the base"):
        merge_lora(tmp_path / "run", tmp_path / "merged")


def test_damage_of_an_adapter_is_found(saved: tuple[Path, Path], tmp_path: Path) -> None:
    train_step(tmp_path / "run", saved[0], "reference")
    file = next((tmp_path / "run").rglob(WEIGHTS))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Damaged, match="the digest of the block"):
        merge_lora(tmp_path / "run", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_elements_that_are_not_finite_are_counted_by_key(
    saved: tuple[Path, Path], changed: Path, tmp_path: Path
) -> None:
    """As in a merge of models: in a note, and in the record. PEFT's merge has the same elements."""
    tensors = load_file(changed / WEIGHTS)
    tensors[f"{Q}.lora_B.weight"][5, 0] = float("nan")
    norm = torch.ones(96)
    norm[[1, 2]] = float("inf")
    with_tensors(changed, **{f"{Q}.lora_B.weight": tensors[f"{Q}.lora_B.weight"]})
    with_tensors(changed, **{"base_model.model.model.norm.weight": norm})
    done = merge_lora(changed, tmp_path / "merged", base=saved[0])
    assert f"elements are NaN or infinite in {CHANGED} (96), model.norm.weight (2)" in done.notes
    record = json.loads((tmp_path / "merged" / "merge_record.json").read_text())
    assert record["not_finite"] == {CHANGED: 96, "model.norm.weight": 2}
    state, wanted = adapters.opened(tmp_path / "merged").state_dict(), adapters.merged_by_peft(saved[0], changed)
    assert torch.equal(state[CHANGED].isnan(), wanted[CHANGED].isnan())
    assert done.notes == merge_lora(changed, tmp_path / "again", base=saved[0]).notes
    assert "elements are NaN" in call("merge", saved[0], tmp_path / "c", "--lora", changed).output


@pytest.mark.parametrize(
    ("dropped", "match"),
    [
        (".layers.1.", "target_modules has .*layers.1.* and 2 more, for which the adapter has no matrices"),
        (".k_proj.", "target_modules has .*layers.0.self_attn.k_proj'.*incomplete"),
        ("model.norm.", "modules_to_save has 'model.norm.weight', for which the adapter has no tensor"),
    ],
)
def test_an_adapter_that_lacks_tensors_of_its_config_is_refused(
    saved: tuple[Path, Path], tmp_path: Path, dropped: str, match: str
) -> None:
    """PEFT leaves modules without matrices as they were, and says nothing."""
    added = adapters.adapter(saved[0], tmp_path / "adapter", target_modules=LINEAR, modules_to_save=["model.norm"])
    tensors = load_file(added / WEIGHTS)
    kept = {key: value for key, value in tensors.items() if dropped not in key}
    assert 0 < len(kept) < len(tensors)
    save_file(kept, added / WEIGHTS)
    refused(saved[0], added, tmp_path, Mismatch, match)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": LINEAR, "layers_to_transform": [1]},
        {"target_modules": [*LINEAR, "query", "c_attn"]},
        {"target_modules": LINEAR, "exclude_modules": ["layers.0.self_attn.q_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r"model\.layers\.1\..*_proj"},
        {"target_modules": ["model.layers.0.self_attn.q_proj"], "modules_to_save": ["layers.1.mlp"]},
    ],
)
def test_modules_that_the_config_does_not_mean_may_be_absent(
    saved: tuple[Path, Path], tmp_path: Path, options: dict[str, Any]
) -> None:
    added = adapters.adapter(saved[0], tmp_path / "adapter", **options)
    merge_lora(added, tmp_path / "merged", base=saved[0])
    compare(tmp_path / "merged", adapters.merged_by_peft(saved[0], added))


def test_the_record_has_inputs_digests_and_weights(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, added = saved
    merge_lora([added], tmp_path / "merged", base=base, weights=[0.5])
    record = json.loads((tmp_path / "merged" / "merge_record.json").read_text())
    assert record["method"] == "lora"
    assert record["adapters"][0]["path"] == str(added)
    assert record["adapters"][0]["weight"] == 0.5
    assert len(record["base"]["digests"]) == len(list(base.glob("*.safetensors")))
    merge_lora([added], tmp_path / "again", base=base, weights=[0.5])
    for file in (tmp_path / "merged").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_the_command_line(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, added = saved
    done = call("merge", base, tmp_path / "a", "--lora", added)
    assert "10 of 21 tensors changed by 1 adapter" in done.output
    compare(tmp_path / "a", adapters.merged_by_peft(base, added))
    adapters.changed_config(added, base_model_name_or_path=str(base))
    fields = json.loads(call("merge", tmp_path / "b", "--lora", added, "--weight", 0.5, "--json").output)
    assert (fields["adapters"], fields["base"]) == (1, str(base))
    for arguments, match in [
        ((base, tmp_path / "c", "--lora", added, "--method", "ties"), "--method has no effect on a merge of adapters"),
        ((base, base, tmp_path / "c", "--lora", added), "merges adapters into one base"),
        ((base, tmp_path / "c", "--lora", added, "--weight", "x"), "--weight x: expected a number"),
        (
            (base, tmp_path / "c", "--lora", added, "--weight", 1, "--weight", 1),
            "one weight for each of the 1 adapters",
        ),
        ((tmp_path / "c",), "name them before DST"),
    ]:
        assert match in str(call("merge", *arguments).exception)


def test_a_dry_run_says_what_would_change_and_writes_nothing(saved: tuple[Path, Path], tmp_path: Path) -> None:
    base, added = saved
    before = sorted(tmp_path.iterdir())
    done = call("merge", base, tmp_path / "a", "--lora", added, "--dry-run")
    assert done.exit_code == 0 and sorted(tmp_path.iterdir()) == before
    assert f"{added} into {base}" in done.output and "would change 10 of 21 tensors and write" in done.output
    fields = json.loads(call("merge", base, tmp_path / "a", "--lora", added, "--dry-run", "--json").output)
    assert fields["problems"] == [] and len(fields["changed"]) == 10
    merge_lora([added], tmp_path / "a", base=base)
    assert fields["bytes"] == sum(file.stat().st_size for file in (tmp_path / "a").glob("*.safetensors"))
    adapters.changed_config(added, use_dora=True)
    failing = call("merge", base, tmp_path / "a", "--lora", added, "--dry-run")
    assert failing.exit_code == 1
    assert failing.output.count("would fail: ") == 2 and "exists" in failing.output, "the folder, and the adapter"


PEAK = """
import resource, sys, torch
from holdfast.merging.lora.merge_lora_call import merge_lora
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
merge_lora(sys.argv[2], sys.argv[3], base=sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.full
def test_the_peak_is_that_of_the_chunks(tmp_path: Path) -> None:
    """An embedding table of 1 GB, changed by an adapter."""
    rows, columns = 1 << 18, 1 << 11
    (tmp_path / "base").mkdir()
    key = "model.embed_tokens"
    save_file(
        {f"{key}.weight": torch.ones(rows, columns, dtype=torch.bfloat16)}, tmp_path / "base" / "model.safetensors"
    )
    (tmp_path / "adapter").mkdir()
    parts = {"lora_embedding_A": torch.ones(8, rows), "lora_embedding_B": torch.ones(columns, 8)}
    save_file(
        {f"base_model.model.{key}.{name}": value for name, value in parts.items()}, tmp_path / "adapter" / WEIGHTS
    )
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    arguments = [str(tmp_path / name) for name in ("base", "adapter", "merged")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200 << 10, f"{int(done.stdout) >> 10} MiB"


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused(tmp_path, weight):
    with pytest.raises(InvalidArgument, match="weight: expected a finite number"):
        merge_lora("adapter", tmp_path / "out", base="base", weights=[weight])
