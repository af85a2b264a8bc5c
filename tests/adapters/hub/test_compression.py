"""Statements with ids: exact on both sides, in an order that works, and small for large models."""

from __future__ import annotations

import math
from typing import Any

import torch

from holdfast.adapters.hub.compression import mapping_text
from holdfast.adapters.hub.hub_statements import components
from holdfast.adapters.hub.traced_tensor import TracedTensor, TracedValue
from holdfast.format.dtypes import dtype_named
from holdfast.mapping import Mapping
from holdfast.plan.files import TensorSpec

SHAPE = (2, 3)


def renamed(names: dict[str, str]) -> dict[str, TracedValue]:
    """Outputs that are sources under other names, given by target."""
    return {target: TracedTensor.source(source, SHAPE).value for target, source in names.items()}


def compiled(text: str, sources: list[str]) -> dict[str, str]:
    """What a text of renames makes of these sources: the source of every target."""
    dtype = dtype_named("float32")
    program = Mapping.parse(text) if text else Mapping()
    specs = {key: TensorSpec(key, dtype, SHAPE) for key in sources}
    return {target: recipe.sources()[0] for target, recipe in program.compile(specs).recipes.items()}


def assert_exact(names: dict[str, str]) -> str:
    """Check a text in both directions; return it."""
    text = mapping_text(components(renamed(names)), names.values(), names)
    assert compiled(text, list(names.values())) == names
    back = str(Mapping.parse(text).reverse()) if text else ""
    assert compiled(back, list(names)) == {source: target for target, source in names.items()}
    return text


def test_layers_share_a_statement() -> None:
    text = assert_exact({f"h.{n}.attn.w": f"layers.{n}.self.w" for n in range(12)})
    assert text == "layers.$LAYER_ID.self.w -> h.$LAYER_ID.attn.w\n"


def test_keys_that_stay_need_no_statement() -> None:
    assert assert_exact({f"layers.{n}.w": f"layers.{n}.w" for n in range(3)}) == ""


def test_an_id_that_would_match_a_key_that_stays_is_written_out() -> None:
    names = {f"h.{n}.w": f"layers.{n}.w" for n in range(2)} | {"layers.7.w": "layers.7.w"}
    assert assert_exact(names).count("\n") == 2


def test_a_target_that_would_match_a_key_that_stays_is_written_out() -> None:
    names = {f"h.{n}.w": f"layers.{n}.w" for n in range(2)} | {"h.7.w": "h.7.w"}
    assert assert_exact(names).count("\n") == 2


def test_chained_names_are_read_before_they_are_made() -> None:
    assert_exact(
        {f"l.{n}.norm0.w": f"l.{n}.norm1.w" for n in range(3)} | {f"l.{n}.norm1.w": f"l.{n}.norm2.w" for n in range(3)}
    )


def test_exchanged_names_go_by_others() -> None:
    assert_exact({"a.w": "b.w", "b.w": "a.w", "layers.0.x": "y"})


def test_numbers_that_change_are_written_out() -> None:
    assert_exact({f"stage.{n + 1}.w": f"layers.{n}.w" for n in range(4)})


def test_keys_with_strange_characters_are_quoted() -> None:
    assert_exact({"a$1:b c": "plain", 'q"uote': "x.y", "star*": "z"})


def test_experts_of_a_large_model_need_a_few_lines() -> None:
    outputs: dict[str, Any] = {}
    expert: Any
    for layer in range(60):
        fused = TracedTensor.source(f"m.layers.{layer}.experts.gate_up", (160, 8, 4))
        for name, part in zip(("gate", "up"), torch.chunk(fused, 2, dim=1), strict=True):
            for number, expert in enumerate(torch.chunk(part, 160, dim=0)):
                outputs[f"m.layers.{layer}.experts.{number}.{name}"] = expert.squeeze().value
    sources = [f"m.layers.{layer}.experts.gate_up" for layer in range(60)]
    text = mapping_text(components(outputs), sources, outputs)
    assert len(text) < 1000 and text.count("\n") == 3
    specs = {key: TensorSpec(key, dtype_named("float32"), (160, 8, 4)) for key in sources}
    made = Mapping.parse(text).compile(specs).recipes
    assert made.keys() == outputs.keys()
    term = made["m.layers.7.experts.3.up"].terms[0]
    assert (term.source, term.part.offsets, term.part.sizes) == ("m.layers.7.experts.gate_up", (3, 4, 0), (1, 4, 4))


def test_rotary_rows_are_permuted_as_torch_permutes_them() -> None:
    rows, columns, heads = 16, 3, 2
    source = TracedTensor.source("q.w", (rows, columns))
    moved: Any = source.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    text = mapping_text(components({"p.w": moved.value}), ["q.w"], ["p.w"])
    spec = TensorSpec("q.w", dtype_named("float32"), (rows, columns))
    recipe = Mapping.parse(text).compile({"q.w": spec}).recipes["p.w"]
    values = torch.arange(math.prod(spec.shape)).reshape(spec.shape)
    expected = values.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)
    out = torch.zeros_like(values)
    for term in recipe.terms:
        part = tuple(slice(a, a + b) for a, b in zip(term.part.offsets, term.part.sizes, strict=True))
        box = tuple(slice(a, a + b) for a, b in zip(term.box.offsets, term.box.sizes, strict=True))
        out[box] = values[part].reshape(term.box.sizes)
    assert torch.equal(out, expected)
