"""Prompts by side and by name; settings that cannot be are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast import InvalidArgument
from holdfast.train.embedding import EmbeddingSettings


def test_sides_take_the_prompts_of_the_hub() -> None:
    settings = EmbeddingSettings(prompts={"query": "q: ", "passage": "p: ", "corpus": "c: "}, default_prompt="corpus")
    names = ("query", "document", "passage", None)
    assert [settings.prompt(name) for name in names] == ["q: ", "p: ", "p: ", "c: "]
    assert [EmbeddingSettings().prompt(name) for name in ("query", "document", None)] == ["", "", ""]
    assert EmbeddingSettings(prompts={"document": "", "passage": "p: "}).prompt("document") == ""
    with pytest.raises(InvalidArgument, match="prompt 'title': the model has query, passage, corpus"):
        settings.prompt("title")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"pooling": "max"}, "pooling='max': choose one of lasttoken, mean, cls"),
        ({"similarity": "cos"}, "similarity='cos': choose one of cosine"),
        ({"prompts": {"query": 3}}, "prompts={'query': 3}: give texts by name"),
        ({"default_prompt": "query"}, "default_prompt='query' is not a name in prompts: there are none"),
        ({"max_length": 0}, "max_length=0 must be an integer of at least 1"),
        ({"truncate_dim": True}, "truncate_dim=True must be"),
        ({"dims": (8, 0)}, "dims=0 must be"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        EmbeddingSettings(**wrong)


@pytest.mark.parametrize("wrong", [{"dims": (8, 33)}, {"truncate_dim": 33}])
def test_dims_larger_than_the_vector_are_refused(wrong: dict[str, Any]) -> None:
    EmbeddingSettings(**wrong).check_width(33)
    with pytest.raises(InvalidArgument, match=f"{next(iter(wrong))}=33 is more than the 32 numbers of a vector"):
        EmbeddingSettings(**wrong).check_width(32)
