"""Models of transformers and of our own as programs in both dialects: outputs, gradients and origins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Program, Unsupported, export_program, load_program
from tests.adapters.program.architectures import ARCHITECTURES, NOT_DECOMPOSED
from tests.adapters.program.exported_architectures import Exported, count_origins, export_architecture
from tests.adapters.program.origins_table import PAGE, rows_of_page, table_row, versions

pytest.importorskip("transformers", reason="transformers is not installed: make setup")
pytestmark = pytest.mark.slow

# Without --full: a model of our own in training mode, a mixture of experts.
QUICK = ("cnn", "mixtral")
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Gradients of indexing, as of experts that are chosen, are summed in any order by torch's threads otherwise."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in ARCHITECTURES],
)
def exported(request: pytest.FixtureRequest) -> Exported:
    return export_architecture(request.param)


def _run(model, inputs):
    """Outputs, and gradients of every parameter by its key."""
    outputs = model(**inputs)
    named = {"output": outputs} if isinstance(outputs, torch.Tensor) else outputs
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    model.zero_grad()
    sum(value.float().square().mean() for value in tensors.values() if value.requires_grad).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return {name: value.detach() for name, value in tensors.items()}, gradients


def _assert_equal(found, expected, outputs=EXACT, gradients=EXACT):
    for own, wanted, tolerance in zip(found, expected, (outputs, gradients), strict=True):
        assert own.keys() == wanted.keys() != set()
        for name, value in wanted.items():
            torch.testing.assert_close({name: own[name]}, {name: value}, **tolerance)


CLOSE: dict[str, Any] = {"outputs": {"rtol": 0, "atol": 1e-6}, "gradients": {"rtol": 1e-3, "atol": 1e-6}}


def test_the_training_dialect_is_the_model(exported):
    module = load_program(exported.training, weights=exported.model)
    _assert_equal(_run(module, exported.example), _run(exported.model, exported.example))
    _assert_equal(_run(module, exported.other), _run(exported.model, exported.other), **CLOSE)


def test_core_aten_is_what_torch_makes_of_it(exported):
    """Bit-equal to torch's own decomposed module at the example sizes, and close to the model at these and others."""
    if exported.core is None:
        _refused_by_torch(exported)
        return
    module = load_program(exported.core, weights=exported.model)
    found = _run(module, exported.example)
    truth = exported.torch_core.module()
    if exported.core.mutations:  # torch's module writes statistics that autograd has saved: it has no gradients
        torch.testing.assert_close(found[0], {"output": truth(**exported.example).detach()}, **EXACT)
    else:
        _assert_equal(found, _run(truth, exported.example))
    _assert_equal(found, _run(exported.model, exported.example), **CLOSE)
    _assert_equal(_run(module, exported.other), _run(exported.model, exported.other), **CLOSE)


def _refused_by_torch(exported):
    """The reason in the table holds; "gpt2, eager attention" is the way out that the message says."""
    model, example, _, sizes = ARCHITECTURES[exported.name]()
    with pytest.raises(Unsupported, match=r"torch cannot decompose.*Cannot view.*set_attn_implementation\('eager'\)"):
        export_program(model, example, sizes, decompose=True)
    print(f"{exported.name} in core aten: {NOT_DECOMPOSED[exported.name]}")


@pytest.mark.parametrize("dialect", ["training", "core"])
def test_the_program_of_a_step_runs_the_weights_of_another(exported, dialect, tmp_path):
    program = exported.program(dialect)
    if program is None:
        pytest.skip(NOT_DECOMPOSED[exported.name])
    torch.manual_seed(1)
    model = ARCHITECTURES[exported.name]()[0]
    holdfast.save(tmp_path / "step-1", {"model": model}, program=program)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = _run(load_program(tmp_path / "step-1"), exported.example)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    holdfast.save(tmp_path / "step-2", {"model": model})
    module = load_program(tmp_path / "step-1", weights=tmp_path / "step-2")
    outputs, gradients = _run(module, exported.example)
    pairs = zip(module.program.state, program.state, strict=True)
    names = {stored.key: entry.key for stored, entry in pairs}  # the hub's names are those of some files
    found = outputs, {names.get(key, key): gradient for key, gradient in gradients.items()}
    close = {"outputs": {"rtol": 1e-5, "atol": 1e-6}, "gradients": {"rtol": 1e-3, "atol": 1e-5}}
    _assert_equal(found, _run(model, exported.example), **({} if dialect == "training" else close))
    assert any(not torch.equal(before[0][name], value) for name, value in found[0].items())


@pytest.mark.parametrize("dialect", ["training", "core"])
def test_every_operator_has_its_origin(exported, dialect):
    program = exported.program(dialect)
    if program is None:
        pytest.skip(NOT_DECOMPOSED[exported.name])
    assert Program.from_json(program.to_json()) == program
    counts = count_origins(exported, dialect)
    assert counts.modules == counts.lines == counts.operators > 0
    assert counts.composites == (counts.operators if dialect == "core" else 0)


def test_the_table_of_the_page_is_as_it_is_counted(exported):
    if versions() not in PAGE.read_text(encoding="utf-8"):
        pytest.skip(f"docs/program.md has the counts of other versions than {versions()}")
    assert rows_of_page()[exported.name] == table_row(exported)


def test_the_table_of_the_page_has_every_architecture():
    assert list(rows_of_page()) == list(ARCHITECTURES)
