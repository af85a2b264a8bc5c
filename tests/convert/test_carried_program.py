"""The program of a source in a conversion: carried along, renamed, or left out with a note."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.quantize import QuantizeOptions
from holdfast.convert.run import Converted, ConvertOptions, convert
from tests.adapters.program.models import Everything, everything_inputs


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    model = Everything().eval()
    args, kwargs = everything_inputs()
    path = tmp_path_factory.mktemp("run") / "step-000000000005"
    program = holdfast.export_program(model, args, example_kwargs=kwargs)
    holdfast.save(path, {"model": model, "note": 3}, program=program)
    return path, model


def run(path: Path, target: Path, *, to: str = "holdfast", mapping: tuple[str, ...] = (), **options: Any) -> Converted:
    chosen = MappingOptions(mapping or None)
    return convert(path, target, ConvertOptions(to=to, mapping=chosen, **options))


def require_runs(target: Path, model: Any) -> None:
    assert holdfast.open(target).verify().good
    args, kwargs = everything_inputs()
    assert torch.equal(holdfast.load_program(target)(*args, **kwargs)["logits"], model(*args, **kwargs)["logits"])


def test_a_program_is_carried_along_with_its_constants(step: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = step
    made = run(path, tmp_path / "b", max_shard_size=600)
    assert not any("program" in note for note in made.notes)
    assert holdfast.open(tmp_path / "b").program == holdfast.open(path).program
    require_runs(tmp_path / "b", model)


def test_the_keys_follow_the_mapping(step: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = step
    run(
        path,
        tmp_path / "b",
        mapping=("emb.weight -> tokens.table", "proj.weight -> inner.weight", "proj.bias -> inner.bias"),
    )
    program = holdfast.open(tmp_path / "b").program
    assert program is not None and {"tokens.table", "inner.weight", "inner.bias"} <= set(program.keys())
    require_runs(tmp_path / "b", model)


def test_the_constants_come_along_where_only_the_model_is_chosen(step: tuple[Path, Any], tmp_path: Path) -> None:
    path, model = step
    run(path, tmp_path / "b", only=("model",))
    require_runs(tmp_path / "b", model)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mapping": ("proj.weight -> a, b, axis=0",)}, r"leaves out its weights proj\.weight;"),
        ({"mapping": ("proj.weight^T -> proj.weight",)}, r"leaves out its weights proj\.weight;"),
        ({"remove": ("bn.*",)}, r"leaves out its weights bn\.weight, bn\.bias"),
        ({"dtype": "bfloat16"}, r"leaves out its weights emb\.weight, proj\.weight.*and 2 more"),
        ({"to": "hf"}, "the format hf has no place for it"),
    ],
)
def test_a_program_that_does_not_fit_is_left_out_and_the_report_says_so(
    step: tuple[Path, Any], tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    made = run(step[0], tmp_path / "b", **options)
    (note,) = [note for note in made.notes if "program" in note]
    assert note.startswith("the program is left out: ")
    assert re.search(reason, note), note
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert not any(name.startswith("program") for name in names)
    assert (note.endswith("holdfast.add_program")) is (options.get("to") != "hf")


def test_quantized_weights_have_no_program(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(128, 128))
    program = holdfast.export_program(model, (torch.ones(1, 128),))
    holdfast.save(tmp_path / "a", {"model": model}, program=program)
    made = run(tmp_path / "a", tmp_path / "b", quantize=QuantizeOptions())
    assert any("the program is left out" in note for note in made.notes), made.notes
    assert holdfast.open(tmp_path / "b").program is None


def test_a_file_of_another_tool_does_not_become_a_program(tmp_path: Path) -> None:
    from tests.faults.rows_operations import model, write

    write(tmp_path / "hub", {**model()})
    (tmp_path / "hub" / "program.json").write_text("{}")
    run(tmp_path / "hub", tmp_path / "b")
    assert not (tmp_path / "b" / "program.json").exists()
    assert holdfast.open(tmp_path / "b").program is None
