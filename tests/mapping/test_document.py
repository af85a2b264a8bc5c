"""docs/mapping.md says what is so: its examples parse, its tables name what there is."""

import re
from pathlib import Path

import pytest

from holdfast.mapping import Mapping
from holdfast.mapping.families import FAMILIES

TEXT = (Path(__file__).parents[2] / "docs" / "mapping.md").read_text()
EXAMPLES = re.findall(r"```mapping\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_parse_and_print_as_they_parse(example: str) -> None:
    mapping = Mapping.parse(example)
    assert mapping.statements
    assert Mapping.parse(str(mapping)) == mapping


def test_the_reverse_and_the_explanation_are_what_the_document_says() -> None:
    mapping = Mapping.parse("a.$LAYER_ID.w^T -> b.$LAYER_ID.w")
    assert str(mapping.reverse()) == "b.$LAYER_ID.w^T -> a.$LAYER_ID.w\n"
    assert "b.0.w: [6, 4] <- a.0.w" in mapping.explain({"a.0.w": (4, 6)})


def test_the_table_of_variants_is_complete() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| (.*) \|$", TEXT, re.MULTILINE))
    assert rows.keys() == {variant for family in FAMILIES for variant in family.programs}
    for variant, listed in rows.items():
        having = {family.name for family in FAMILIES if variant in family.programs}
        if not listed.startswith("all"):
            assert having == set(listed.split(", ")), variant
            continue
        lacking = {family.name for family in FAMILIES} - having
        assert lacking == set(re.findall(r"^all but ([\w-]+)", listed)), variant
