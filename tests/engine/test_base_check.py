"""The live base model against the recorded one, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.adapters.peft_cases import SIZES, adapted, open_base, write_base

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


def test_verify_and_show_name_the_base(tmp_path: Path, base: Path) -> None:
    from click.testing import CliRunner

    from holdfast.cli.show import command as show
    from holdfast.cli.verify import command as verify

    assert holdfast.open(tmp_path / "x").verify().unchecked == (f"the base model of model, {base}",)
    assert f"not checked: the base model of model, {base}" in CliRunner().invoke(verify, [str(tmp_path / "x")]).output
    assert f"by reference: the base model of model, {base}" in CliRunner().invoke(show, [str(tmp_path / "x")]).output
