"""Hostile programs: nothing is imported, executed or opened, and nothing of torch is reached outside of the table."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import Damaged, HoldfastError, Mismatch, Program, Unsupported, load_program
from holdfast.adapters.program import torch_operators
from holdfast.program.operator_table import is_allowed
from tests.golden.make_programs import golden_model, inputs
from tests.program.make_operators import overloads
from tests.program.mutations import mutated_files

GOLDEN = sorted((Path(__file__).parents[1] / "golden" / "programs").glob("torch-*.json"))[-1]
CONSTANTS = {"tilt": torch.zeros(8)}
_WATCHED = (
    "import",
    "exec",
    "compile",
    "open",
    "os.",
    "subprocess.",
    "socket.",
    "shutil.",
    "pickle.",
    "ctypes.",
    "marshal.",
)
_FOUND: list[str] = []
_WATCHING = [False]


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _WATCHING[0] and event.startswith(_WATCHED):
        _FOUND.append(f"{event}{args!r:.200}")


sys.addaudithook(_hook)


@contextmanager
def audited() -> Iterator[list[str]]:
    """Collect what the interpreter reports of imports, code, files and processes."""
    _FOUND.clear()
    _WATCHING[0] = True
    try:
        yield _FOUND
    finally:
        _WATCHING[0] = False


def tree(dialect: str = "training") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_bytes())[dialect]
    return found


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    """Load what any read loads once: the table, modules of torch that are imported late."""
    with pytest.raises(Mismatch):
        load_program(Program.from_json(json.dumps(tree()).encode()), weights={})
    with pytest.raises(HoldfastError):
        Program.from_json(b"{}")


def test_the_hook_sees_what_it_is_for(tmp_path: Path) -> None:
    with audited() as events:
        (tmp_path / "x").write_text("x")
        compile("1", "x", "eval")
    assert any(event.startswith("open") for event in events) and any(event.startswith("compile") for event in events)


def test_every_overload_outside_of_the_table_is_refused() -> None:
    data = tree()
    position = next(index for index, node in enumerate(data["nodes"]) if node["op"].startswith("aten."))
    outside = [f"aten.{name}" for name in overloads() if not is_allowed(f"aten.{name}")]
    assert len(outside) > 1500
    plain = data["nodes"][position]["op"]
    with audited() as events:
        for op in outside:
            data["nodes"][position]["op"] = op
            with pytest.raises(Unsupported, match="outside of the operators that a program may call"):
                _read_node(data, position)
    data["nodes"][position]["op"] = plain
    assert events == []


def _read_node(data: dict[str, Any], position: int) -> Program:
    """Read a program of the nodes up to one: the rest would only take time."""
    short = {**data, "nodes": data["nodes"][: position + 1], "mutations": []}
    return Program.from_json(json.dumps(short).encode())


@pytest.mark.parametrize(
    "op",
    """prims.add.default torchvision.nms.default quantized.linear.default torch.os.system builtins.eval.x aten.linear
    aten.__class__.__init__ aten..default aten.linear.default.x higher_order.while_loop c10d.send.x""".split(),
)
def test_other_namespaces_are_refused(op: str) -> None:
    data = tree()
    data["nodes"][-1]["op"] = op
    with audited() as events, pytest.raises(Unsupported, match=r"outside of the operators|an unknown operation"):
        Program.from_json(json.dumps(data).encode())
    assert events == []


def _built(data: bytes) -> None:
    program = Program.from_json(data)
    fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
    load_program(Program(**{**fields, "constants": CONSTANTS}), device="meta")


def _refused_or_built(data: bytes) -> bool:
    try:
        _built(data)
    except HoldfastError:
        return True
    return False


def _check_mutated(count: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = torch_operators.overload_named

    def noting(op: str) -> Any:
        asked.append(op)
        return plain(op)

    monkeypatch.setattr("holdfast.adapters.program.operator_versions.overload_named", noting)
    refused = 0
    for dialect in ("training", "core"):
        files = list(mutated_files(tree(dialect), count // 2, seed))
        with audited() as events:
            for data in files:
                refused += _refused_or_built(data)
        assert events == []
    assert refused > count * 0.6
    assert asked and all(is_allowed(op) for op in asked)


def test_mutated_programs_are_refused_or_read_and_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    _check_mutated(300, 7, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_mutated_programs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _check_mutated(1000, seed, monkeypatch)


def _changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    data = tree()
    change(data)
    return json.dumps(data).encode()


def _many_modules(data: dict[str, Any]) -> None:
    """Weights whose keys would make 50 modules each: gigabytes from a few megabytes of text."""
    entry = {"kind": "buffer", "is": ["float32", [1]]}
    paths = ".".join("m" * 49)
    data["state"] += [{**entry, "name": f"bomb{index}", "key": f"{index}.{paths}.w"} for index in range(5000)]


def _arity(node: dict[str, Any]) -> None:
    node["args"] = node["args"] * 9


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "too many arguments": (lambda d: _arity(d["nodes"][2]), "positional arguments|takes"),
    "an unknown argument": (lambda d: d["nodes"][0].setdefault("kwargs", {}).update(evil=1), "no argument 'evil'"),
    "a text in place of a tensor": (lambda d: d["nodes"][2].update(args=["x"]), "takes|lacks"),
    "a schema that is code": (
        lambda d: d["operators"].update({"aten.linear.default": "__import__('os').system('true')"}),
        "is not the schema of an aten operator",
    ),
    "a schema of another operator": (
        lambda d: d["operators"].update({"aten.linear.default": "aten::relu(Tensor self) -> Tensor"}),
        r"the schema of aten\.linear\.default is that of aten\.relu\.default",
    ),
    "a guard that is text": (lambda d: d.update(guards=["__import__('os')"]), "not a condition|unknown symbol"),
    "a symbol that is code": (lambda d: d["symbols"].update({"a;b": [0, 1]}), "is not a name"),
    "a node with the name of a weight": (lambda d: d["nodes"][0].update(name=d["state"][0]["name"]), "defined twice"),
    "use before definition": (lambda d: d["nodes"].reverse(), "not defined before its use"),
    "a huge weight": (lambda d: d["state"][0]["is"][1].__setitem__(0, 2**64), "more than 64 bits"),
    "a weight whose bytes overflow": (
        lambda d: d["state"][0]["is"].__setitem__(1, [2**40, 2**40]),
        "more bytes than 64 bits",
    ),
    "an empty weight whose strides overflow": (
        lambda d: d["state"][0]["is"].__setitem__(1, [0, 2**62, 2**62]),
        "more bytes than 64 bits",
    ),
    "a key of 500 modules": (lambda d: d["state"][0].update(key=".".join("a" * 500)), "more than 64 modules in each"),
    "a key that only torch may have": (lambda d: d["state"][0].update(key="a.training"), "for their mode"),
    "a million modules": (_many_modules, "more than 200000 modules"),
    "a structure of many items": (lambda d: d.update(out={"tuple": [None] * 200_000}), "200000 items, more than"),
    "a deep structure": (lambda d: d.update(out=_deep()), "deeper"),
    "a deep argument": (lambda d: d["nodes"][2].update(args=[_deep_list()]), "deeper"),
}


SCHEMAS = {
    "nested brackets, by which torch's parser overflows the stack": "aten::linear(" + "(" * 4000,
    "nested types": "aten::linear(" + "Dict(str," * 400 + "int" + ")" * 400 + " x) -> Tensor",
    "nested results": "aten::linear(Tensor x) -> " + "(" * 3900,
    "nested lists": "aten::linear(Tensor" + "[]" * 2000 + " x) -> Tensor",
    "a nested default": "aten::linear(int[] x=" + "[" * 2000 + "]" * 1999 + "]) -> Tensor",
    "a number without end": "aten::linear(int x=" + "9" * 4000 + ") -> Tensor",
    "a float beyond all": "aten::linear(float x=1e999999) -> Tensor",
    "a length beyond all": "aten::linear(int[99999999999999999999] x) -> Tensor",
    "a class": "aten::linear(__torch__.os.system x) -> Tensor",
    "varargs": "aten::linear(...) -> (...)",
    "a text with escapes": 'aten::linear(str x="' + "\\" * 1000 + '") -> Tensor',
    "letters of another alphabet": "aten::linear(Tensor \u1234) -> Tensor",
    "a text that goes on": "aten::linear(Tensor x) -> (Tensor) -> (Tensor)",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_never_reaches_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(
        "holdfast.adapters.program.torch_operators.is_backward_compatible", lambda *args: asked.append(args)
    )
    data = _changed(lambda d: d["operators"].update({"aten.linear.default": SCHEMAS[name]}))
    with audited() as events, pytest.raises(Damaged, match=r"the schema of aten\.linear\.default"):
        _built(data)
    assert events == [] and asked == []


@pytest.mark.parametrize(
    "key", ["_checks", "_holders", "_tied", "_operators", "forward", "program", "program.constants.x", "a..b"]
)
def test_a_key_may_have_the_name_of_an_attribute(key: str) -> None:
    data = tree()
    data["state"][0]["key"] = key
    program = Program.from_json(json.dumps(data).encode())
    fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
    module = load_program(Program(**{**fields, "constants": CONSTANTS}), device="meta")
    assert key in module.state_dict()
    assert not module.train().eval().training and len(module._holders) == len(program.state)


def test_many_mutations_take_a_linear_time() -> None:
    count = 20_000
    entry = {"kind": "buffer", "is": ["float32", [1]]}
    data = tree()
    data["state"] += [{**entry, "name": f"s{index}", "key": f"s{index}"} for index in range(count)]
    data["mutations"] = [[f"s{index}", {"$": f"s{count - 1 - index}"}] for index in range(count)]
    begun = time.process_time()
    _built(json.dumps(data).encode())
    assert time.process_time() - begun < 60  # by position in a list it took minutes


def _deep() -> Any:
    value: Any = "*"
    for _ in range(60):
        value = {"list": [value]}
    return value


def _deep_list() -> Any:
    value: Any = 1
    for _ in range(60):
        value = [value]
    return value


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_refused_before_anything_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, message = HOSTILE[name]
    built: list[object] = []
    monkeypatch.setattr("holdfast.adapters.program.program_module._hold", lambda *args: built.append(args))
    data = _changed(change)
    with audited() as events, pytest.raises((Damaged, Unsupported), match=message):
        _built(data)
    assert events == [] and built == []


def test_a_huge_weight_takes_no_memory_until_it_is_loaded() -> None:
    data = tree()
    data["state"][0]["is"][1] = [2**40, 2**20]
    _built(json.dumps(data).encode())
    with pytest.raises(Mismatch):
        load_program(Program.from_json(json.dumps(data).encode()), weights=golden_model())


def test_running_a_program_imports_and_executes_nothing() -> None:
    made = json.loads(GOLDEN.read_bytes())
    program = Program.from_json(json.dumps(made["training"]).encode())
    constants = {key: torch.tensor(values) for key, values in made["constants"].items()}
    fields = {name: getattr(program, name) for name in program.__dataclass_fields__}
    module = load_program(Program(**{**fields, "constants": constants}), weights=golden_model())
    module(*inputs(2, 6))
    with audited() as events:
        module(*inputs(3, 7))
    assert events == []
