"""The picture of a program: well-formed, a box for each module, no text of the file as markup."""

from __future__ import annotations

from xml.etree import ElementTree

from holdfast.program.graph import Origin
from holdfast.program.module_counts import least_sizes, summarize
from holdfast.program.svg import draw
from tests.program.by_hand import program


def _drawn(made, depth=3):
    return ElementTree.fromstring(draw(made, summarize(made, least_sizes(made)), depth))


def test_a_box_for_each_module_and_arrows_between():
    found = _drawn(program())
    texts = [text.text for text in found.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "fc  Linear" and texts[1] == "1 operators, 10 parameters, 16 FLOPs"
    assert len(list(found.iter("{http://www.w3.org/2000/svg}rect"))) == 2
    assert len(list(found.iter("{http://www.w3.org/2000/svg}path"))) == 2  # the end of an arrow, and one arrow


def test_names_of_a_file_are_text():
    made = program()
    node = made.nodes[0]
    evil = type(node)(node.name, node.op, node.args, {}, node.type, Origin("<script>alert(1)</script>"))
    found = _drawn(program(nodes=(evil, *made.nodes[1:])))
    assert not list(found.iter("{http://www.w3.org/2000/svg}script"))
    assert any("<script>" in (text.text or "") for text in found.iter())
