"""Hostile programs: one clear error each, before anything is made of them."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import holdfast
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.sources.paddle.pir.exported_program import read_exported
from holdfast.sources.paddle.pir.pir_json import is_pir, read_pir
from tests.effort import at_most
from tests.sources.paddle.pir.exports import GOLDEN, operators_named, source_program

MUTATIONS = 400
STRANGE: tuple[Any, ...] = (None, True, -1, 0, 2**33, 1e300, "", "1.relu", [], {}, [[]], {"#": "NULL"})


def fields_of(name: str = "mlp") -> dict[str, Any]:
    return json.loads((GOLDEN / name / "model.json").read_bytes())


def read(fields: Any) -> Any:
    return read_pir(json.dumps(fields).encode(), "model.json")


def test_a_program_of_paddle() -> None:
    program = read(fields_of())
    assert (program.version, program.trainable, len(program.parameters)) == (3, True, 6)
    assert program.counts()["pd_op.matmul"] == 3
    assert program.parameters[0].key == "linear_2.b_0"


@pytest.mark.parametrize("version", [0, 5, 99, -1, "3", True, 3.0, None, 2**70])
def test_an_unknown_version_is_refused(tmp_path: Path, version: Any) -> None:
    fields = fields_of()
    fields["base_code"]["version"] = version
    (tmp_path / "model.json").write_text(json.dumps(fields))
    (tmp_path / "model.pdiparams").write_bytes((GOLDEN / "mlp" / "model.pdiparams").read_bytes())
    for path in (tmp_path, tmp_path / "model.json", tmp_path / "model.pdiparams"):
        with pytest.raises(Unsupported, match=r"a Paddle program of PIR version .*, but Holdfast knows 1 to 4"):
            holdfast.open(path)


@pytest.mark.parametrize("data", [b"{}", b"[]", b'{"base_code": {"magic": "other"}}', b'{"base_code": 1}', b"null"])
def test_other_json_is_not_a_program(data: bytes) -> None:
    assert read_pir(data, "x.json") is None
    assert not is_pir(data)


def first(operators: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return operators_named(operators, name)[0]


DAMAGE: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "two parameters of a name": (
        lambda ops: ops[1]["A"].__setitem__(3, ops[0]["A"][3]),
        "two parameters have this name",
    ),
    "a value twice": (lambda ops: first(ops, "1.relu")["O"][0].update({"%": 1}), "the value %1 is defined twice"),
    "use before definition": (
        lambda ops: first(ops, "1.relu")["I"][0].update({"%": 999}),
        "the value %999 is not defined before its use",
    ),
    "an operator before its input": (lambda ops: ops.insert(6, ops.pop(10)), "is not defined before its use"),
    "no number": (lambda ops: first(ops, "1.relu")["O"][0].update({"%": "1"}), "a value without a number"),
    "a number of 70 bits": (lambda ops: first(ops, "1.relu")["O"][0].update({"%": 2**70}), "a value without a number"),
    "an attribute twice": (
        lambda ops: first(ops, "1.gelu")["A"].append(first(ops, "1.gelu")["A"][0]),
        "an attribute without a name of its own",
    ),
    "a wrong kind": (
        lambda ops: first(ops, "1.gelu")["A"][0].update({"AT": {"#": "0.a_bool", "D": 3}}),
        "an attribute that is neither true nor false",
    ),
    "an integer of 40 bits": (
        lambda ops: first(ops, "1.gelu")["A"][0].update({"AT": {"#": "0.a_i32", "D": 2**40}}),
        "not an integer of 32 bits",
    ),
    "a special integer": (
        lambda ops: first(ops, "1.gelu")["A"][0].update({"AT": {"#": "0.a_i32", "VD": "NaN"}}),
        "an attribute of the kind '0.a_i32' with the value 'NaN'",
    ),
    "a huge size": (
        lambda ops: first(ops, "1.relu")["O"][0]["TT"]["D"].__setitem__(1, [2**60]),
        "a shape with an invalid size",
    ),
    "many dims": (
        lambda ops: first(ops, "1.relu")["O"][0]["TT"]["D"].__setitem__(1, [1] * 65),
        "not a list of at most 64 sizes",
    ),
    "a name of 300": (lambda ops: first(ops, "1.relu").update({"#": "1." + "a" * 300}), "an operator without a name"),
    "no name": (lambda ops: first(ops, "1.relu").update({"#": 3}), "an operator without a name"),
    "no inputs": (lambda ops: first(ops, "1.relu").pop("I"), "a field is missing or invalid: KeyError"),
    "inputs that are none": (lambda ops: first(ops, "1.relu").update({"I": None}), "not a list of at most"),
    "a parameter with an empty name": (lambda ops: ops[0]["A"].__setitem__(3, ""), "its name"),
    "an operator that is a text": (lambda ops: cast(list[Any], ops).insert(8, "relu"), "a field is missing or invalid"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str) -> None:
    edit, message = DAMAGE[name]
    fields = fields_of()
    edit(fields["program"]["regions"][0]["blocks"][0]["ops"])
    with pytest.raises(Damaged, match=message):
        read(fields)


@pytest.mark.parametrize("regions", [[], [{"blocks": []}], [{"blocks": [{}, {}]}], None, 3, [3]])
def test_not_one_block(regions: Any) -> None:
    fields = fields_of()
    fields["program"]["regions"] = regions
    with pytest.raises(Damaged, match=r"model\.json: "):
        read(fields)


def test_deep_nesting_is_refused_soon() -> None:
    begin, end = json.dumps(fields_of()).replace('"trainable"', '"deep": HERE, "trainable"').split("HERE")
    for depth in (200, 200_000):
        with at_most(2.0), pytest.raises(Damaged, match="nested"):
            read_pir((begin + "[" * depth + "]" * depth + end).encode(), "model.json")


def test_huge_counts_are_refused_before_memory_is_used() -> None:
    fields = fields_of()
    fields["program"]["regions"][0]["blocks"][0]["ops"] = [0] * 200_001
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="not a list of at most 200000"):
            read(fields)
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024**2
    finally:
        tracemalloc.stop()


def test_a_huge_tensor_is_only_described(tmp_path: Path) -> None:
    """A program may ask for any size: nothing of it is made when it is opened."""
    fields = fields_of("specials")
    operators = fields["program"]["regions"][0]["blocks"][0]["ops"]
    for operator in operators_named(operators, "1.full"):
        operator["O"][0]["TT"]["D"][1] = [2**40]
        operator["A"][0]["AT"]["D"] = [2**40]
    (tmp_path / "model.json").write_text(json.dumps(fields))
    tracemalloc.start()
    try:
        assert source_program(tmp_path / "model.json").operators["pd_op.full"] == 8
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024**2
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, 60, 500, 3_000])
def test_a_program_that_ends_early(size: int) -> None:
    data = (GOLDEN / "mlp" / "model.json").read_bytes()[:size]
    with pytest.raises(Damaged, match=r"model\.json"):
        read_pir(data, "model.json")


def test_a_mutated_program_is_an_error_of_holdfast_or_another_program() -> None:
    generator = random.Random(0)
    refused = opened = 0
    for name in ("mlp", "cnn", "decoder", "specials"):
        fields = fields_of(name)
        places = list(_places(fields))
        for _ in range(MUTATIONS // 4):
            container, key = generator.choice(places)
            kept = container[key]
            container[key] = generator.choice(
                [None, True, -1, 0, 2**33, 1e300, "", "1.relu", [], {}, [[]], {"#": "NULL"}]
            )
            try:
                opened += read_exported(json.dumps(fields).encode(), name) is not None
            except HoldfastError:
                refused += 1
            container[key] = kept
    assert refused > MUTATIONS // 10
    assert opened > MUTATIONS // 10


def _places(value: Any) -> Any:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _places(value[key])


def test_programs_are_read_without_torch_and_paddle() -> None:
    code = (
        "import sys, holdfast\n"
        f"checkpoint = holdfast.open({str(GOLDEN / 'cnn' / 'model.json')!r})\n"
        "assert len(checkpoint.program.nodes) == 14\n"
        "assert not {'torch', 'paddle', 'pickle5'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
