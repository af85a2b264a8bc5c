"""The live base model against the recorded one, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.format import strictjson
from holdfast.format.digest import digest_hex
from tests.adapters.peft_cases import SIZES, adapted, open_base, quantized, write_base

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
pytest.importorskip("peft", reason="peft is not installed: make setup")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = write_base(tmp_path / "base")
    holdfast.save(tmp_path / "x", {"model": adapted(open_base(folder), "lora")})
    return folder


def other() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(9)
    return adapted(LlamaForCausalLM(LlamaConfig(**SIZES)), "lora", seed=7)


def require_untouched(path: Path, live: Any, error: type[Exception], match: str) -> None:
    """Require an error that leaves the live model as it is, and a note in its place in a load that is not strict."""
    before = {key: value.clone() for key, value in live.state_dict().items()}
    with pytest.raises(error, match=match):
        holdfast.load(path, {"model": live})
    assert all(torch.equal(before[key], value) for key, value in live.state_dict().items())
    report = holdfast.load(path, {"model": live}, strict=False)
    assert report.loaded and any(note for note in report.notes if "base model" in note)


def test_a_base_that_was_never_loaded_is_a_mismatch(tmp_path: Path, base: Path) -> None:
    require_untouched(tmp_path / "x", other(), holdfast.Mismatch, "of the live base model differs from .*/base")


def test_another_base_is_a_mismatch(tmp_path: Path, base: Path) -> None:
    live = adapted(open_base(write_base(tmp_path / "other", seed=5)), "lora", seed=7)
    require_untouched(tmp_path / "x", live, holdfast.Mismatch, "its base model changed: the digest of .*/other/model")


def test_a_missing_base_is_not_found(tmp_path: Path, base: Path) -> None:
    live = adapted(open_base(base), "lora", seed=7)
    base.rename(tmp_path / "moved")
    require_untouched(tmp_path / "x", live, holdfast.NotFound, "its base model .*/base is missing on this host")
    moved = adapted(open_base(tmp_path / "moved"), "lora", seed=7)
    assert not holdfast.load(tmp_path / "x", {"model": moved}).notes


KINDS = {
    "": "not quantized",
    "nf4": "bitsandbytes nf4 with double quantization",
    "8 bits": "bitsandbytes int8",
    "int8": "Int8Tensor",
}


def make(folder: Path, kind: str) -> Any:
    pytest.importorskip("torchao" if kind == "int8" else "bitsandbytes" if kind else "peft")
    model = open_base(folder)
    return adapted(quantized(model, kind) if kind else model, "lora", seed=7)


def adapter_of(model: Any) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in model.state_dict().items() if "lora" in key}


@pytest.mark.parametrize(
    ("trained", "live"), [("nf4", ""), ("8 bits", ""), ("int8", ""), ("", "nf4"), ("", "int8"), ("nf4", "8 bits")]
)
def test_a_base_that_is_quantized_otherwise_is_a_mismatch(tmp_path: Path, base: Path, trained: str, live: str) -> None:
    holdfast.save(tmp_path / "trained", {"model": make(base, trained)}, base="reference")
    match = f"trained on a base model that is .*{KINDS[trained]}.*, and the live one is .*{KINDS[live]}"
    other = make(base, live)
    before = {key: tensor.clone() for key, tensor in adapter_of(other).items()}
    with pytest.raises(holdfast.Mismatch, match=match):
        holdfast.load(tmp_path / "trained", {"model": other})
    assert all(torch.equal(before[key], tensor) for key, tensor in adapter_of(other).items())
    report = holdfast.load(tmp_path / "trained", {"model": other}, strict=False)
    assert report.loaded and any("trained on a base model" in note for note in report.notes)
    assert not holdfast.load(tmp_path / "trained", {"model": make(base, trained)}).notes


def test_the_quantization_of_a_base_that_is_not_stored_is_a_note(tmp_path: Path, base: Path) -> None:
    holdfast.save(tmp_path / "trained", {"model": make(base, "nf4")}, base="none")
    notes = holdfast.load(tmp_path / "trained", {"model": make(base, "")}).notes
    assert any(f"quantized as {KINDS['nf4']}, and the live one is not quantized" in note for note in notes)
    assert len(holdfast.load(tmp_path / "trained", {"model": make(base, "nf4")}).notes) == 1


def test_a_step_that_does_not_say_how_its_base_was_quantized_loads(tmp_path: Path, base: Path) -> None:
    manifest = tmp_path / "x" / "holdfast.json"
    fields = strictjson.loads(manifest.read_bytes(), "manifest")
    del fields["bases"]["model"]["quantized"], fields["digest"]
    fields["digest"] = digest_hex(strictjson.dumps(fields))
    manifest.write_bytes(strictjson.dumps(fields) + b"\n")
    assert not holdfast.load(tmp_path / "x", {"model": make(base, "nf4")}).notes


def test_verify_show_and_diff_name_the_quantization(tmp_path: Path, base: Path) -> None:
    from click.testing import CliRunner

    from holdfast.cli.diff import command as diff
    from holdfast.cli.show import command as show

    holdfast.save(tmp_path / "trained", {"model": make(base, "nf4")}, base="reference")
    text = f"the base model of model, {base}, quantized in memory as {KINDS['nf4']}"
    assert holdfast.open(tmp_path / "trained").verify().unchecked == (text,)
    assert text in CliRunner().invoke(show, [str(tmp_path / "trained")]).output
    output = CliRunner().invoke(diff, [str(tmp_path / "x"), str(tmp_path / "trained")]).output
    assert "the quantization of the base model differs" in output and KINDS["nf4"] in output


def test_verify_and_show_name_the_base(tmp_path: Path, base: Path) -> None:
    from click.testing import CliRunner

    from holdfast.cli.show import command as show
    from holdfast.cli.verify import command as verify

    assert holdfast.open(tmp_path / "x").verify().unchecked == (f"the base model of model, {base}",)
    assert f"not checked: the base model of model, {base}" in CliRunner().invoke(verify, [str(tmp_path / "x")]).output
    assert f"by reference: the base model of model, {base}" in CliRunner().invoke(show, [str(tmp_path / "x")]).output
