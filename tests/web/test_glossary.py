"""The words of the page: the same sentences in docs/page.md, and no word that the page does not use."""

from __future__ import annotations

import re

from holdfast.web.static_files import read_static
from tests.house.sources import REPOSITORY


def words() -> dict[str, str]:
    text = read_static()["glossary.js"][0].decode()
    return dict(re.findall(r'\["([a-z ]+)", "([^"]+)"\]', text))


def test_the_docs_have_the_same_sentences() -> None:
    page = (REPOSITORY / "docs" / "page.md").read_text()
    section = page.partition("## Words\n")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| ([a-z ]+) \| (.+) \|$", section, re.MULTILINE)) == {"word": "meaning"} | words()
    assert len(words()) == 9


def test_every_word_is_one_of_the_page() -> None:
    others = " ".join(data.decode() for name, (data, _) in read_static().items() if name != "glossary.js").lower()
    for word in words():
        assert re.search(rf"\b{word}", others), word
