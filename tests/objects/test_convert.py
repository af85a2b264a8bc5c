"""Conversions from and to an object store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.convert.mapping import MappingOptions
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import HoldfastError, InvalidArgument, Unsupported
from tests.convert.states import save, tensor_files
from tests.objects.test_branches import under

SMALL: dict[str, Any] = {"block_bytes": 4096, "max_shard_size": 20_000}


def test_there_with_a_mapping_and_back_to_the_same_bytes(root: str, tmp_path: Path) -> None:
    save(tmp_path / "a")
    statements = ["0.weight^T -> first.kernel", "2.weight -> last.a, last.b, axis=1"]
    there = under(root, "fused")
    convert(tmp_path / "a", there, ConvertOptions(mapping=MappingOptions(statements), **SMALL))
    assert holdfast.open(there).verify().good
    with pytest.raises(InvalidArgument, match="exists; choose another folder"):
        convert(tmp_path / "a", there, ConvertOptions(**SMALL))
    convert(there, tmp_path / "b", ConvertOptions(mapping=MappingOptions(statements, reverse=True), **SMALL))
    assert tensor_files(tmp_path / "b") == tensor_files(tmp_path / "a")


def test_a_plain_folder_on_an_object_store(root: str, tmp_path: Path) -> None:
    save(tmp_path / "a")
    convert(tmp_path / "a", under(root, "plain"), ConvertOptions(to="hf"))
    convert(under(root, "plain"), tmp_path / "b", ConvertOptions(**SMALL))
    models = {name: data for name, data in tensor_files(tmp_path / "a").items() if name.startswith("model-")}
    assert tensor_files(tmp_path / "b") == models


def test_a_dcp_folder_is_written_to_a_disk(root: str, tmp_path: Path) -> None:
    save(tmp_path / "a")
    with pytest.raises(Unsupported, match="the format dcp can only be written to a local folder"):
        convert(tmp_path / "a", under(root, "dcp"), ConvertOptions(to="dcp"))
    with pytest.raises(HoldfastError):
        holdfast.open(under(root, "dcp"))
