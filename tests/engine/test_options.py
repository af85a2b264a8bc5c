"""Options: each wrong value is refused by name, where it is given."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast
from holdfast.engine.options import BackgroundOptions, LoadOptions, SaveOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_shard_size": "5 apples"}, "5 apples"),
        ({"block_bytes": 1000}, "block_bytes=1000"),
        ({"block_bytes": 0}, "block_bytes=0"),
        ({"model_dtype": "float33"}, "float33"),
        ({"ties": {"a": 1}}, "ties="),
        ({"ties": ["a"]}, "ties="),
        ({"replicas": "last"}, "replicas='last'"),
    ],
)
def test_save_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(holdfast.HoldfastError, match=message):
        SaveOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 3}, "keep=3 is not a policy"),
        ({"on_busy": "queue"}, "on_busy='queue'"),
        ({"deadline_s": 0}, "deadline_s=0"),
        ({"grace_s": True}, "grace_s=True"),
        ({"silence_s": "60"}, "silence_s='60'"),
        ({"writer_threads": 0}, "writer_threads=0"),
        ({"arena_bytes": "much"}, "much"),
    ],
)
def test_background_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(holdfast.HoldfastError, match=message):
        BackgroundOptions(**options)


@pytest.mark.parametrize(
    "read_once", ["always", 1, None, {"storage": "1GB"}, {"storage": "1GB", "network": "fast"}, {"disk": 1, "net": 1}]
)
def test_read_once_is_checked(read_once: Any) -> None:
    with pytest.raises(holdfast.InvalidArgument, match=r"read_once=|not a size: 'fast'"):
        LoadOptions(read_once=read_once)
    speed = LoadOptions(read_once={"storage": "1GB", "network": 5 * 10**9}).bandwidths
    assert speed is not None and (speed.storage, speed.network) == (1e9, 5e9)


def test_options_are_keyword_only_values() -> None:
    with pytest.raises(TypeError):
        SaveOptions("5GB")  # type: ignore[call-arg]
    assert SaveOptions(max_shard_size="1MB").max_shard_bytes == 1_000_000
    assert BackgroundOptions(arena_bytes="1KB").arena_limit_bytes == 1000
    assert BackgroundOptions().arena_limit_bytes is None
    assert SaveOptions() == SaveOptions() and BackgroundOptions() == BackgroundOptions()


def test_a_string_is_not_a_list_of_patterns() -> None:
    selection = LoadOptions(only=["0.*"], ignore=["*.bias"]).key_selection()
    assert selection.only == ("0.*",) and selection.ignore == ("*.bias",)
    with pytest.raises(holdfast.InvalidArgument, match=r"\['0\.\*'\]"):
        LoadOptions(ignore="0.*").key_selection()
