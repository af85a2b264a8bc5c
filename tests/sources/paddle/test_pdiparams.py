"""`.pdiparams`: tensors without names, named by the program beside them, bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import holdfast
from holdfast.convert.run import ConvertOptions, convert
from holdfast.core.errors import Damaged, HoldfastError, Unsupported
from holdfast.sources import open_stored
from tests.sources.paddle.folders import GOLDEN

TYPES = {"float32": 5, "bfloat16": 22, "int64": 3, "float16": 4, "bool": 0, "uint8": 20}


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def described(array: np.ndarray) -> bytes:
    return field(1, TYPES[array.dtype.name]) + b"".join(field(2, size) for size in array.shape)


def stream(arrays: Mapping[str, np.ndarray], levels: tuple[bytes, ...] = ()) -> bytes:
    out = b""
    for _, array in sorted(arrays.items()):
        out += struct.pack("<IQ", 0, len(levels)) + b"".join(struct.pack("<Q", len(level)) + level for level in levels)
        desc = described(array)
        out += struct.pack("<Ii", 0, len(desc)) + desc + array.tobytes()
    return out


def model_description(arrays: Mapping[str, np.ndarray]) -> bytes:
    """A ProgramDesc as Paddle 2 writes it, with a feed and an activation beside the parameters."""
    variables = [field(1, b"feed") + field(2, field(1, 9)) + field(3, 1)]
    variables.append(field(1, b"x") + field(2, field(1, 7) + field(3, field(1, field(1, 5) + field(2, -1)))))
    for name, array in arrays.items():
        kind = field(1, 7) + field(3, field(1, described(array)))
        variables.append(field(1, name.encode()) + field(2, kind) + field(3, 1))
    return field(1, field(1, 0) + field(2, -1) + b"".join(field(3, variable) for variable in variables))


def arrays() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "linear_10.w_0": generator.standard_normal((3, 4)).astype(np.float32),
        "linear_2.w_0": generator.standard_normal((2, 2)).astype(ml_dtypes.bfloat16),
        "steps": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float16),
        "mask": np.array([True, False, True]),
        "a.b": np.arange(5, dtype=np.uint8),
    }


def written(folder: Path, found: Mapping[str, np.ndarray] | None = None) -> Path:
    found = arrays() if found is None else found
    folder.mkdir(exist_ok=True)
    (folder / "m.pdiparams").write_bytes(stream(found))
    (folder / "m.pdmodel").write_bytes(model_description(found))
    return folder


@pytest.mark.parametrize("name", ["inference", "inference/model.pdiparams"])
def test_what_paddle_3_exported_has_its_true_values(name: str) -> None:
    truth = np.load(GOLDEN / "truth_inference.npz")
    checkpoint = open_stored(GOLDEN / name)
    assert set(checkpoint.keys("model")) == set(truth)
    for key in truth:
        assert checkpoint.read(key).shape == truth[key].shape
        assert checkpoint.read(key).tobytes() == truth[key].tobytes()
    assert "names are those of the variables of model.json" in checkpoint.notes[0]


@pytest.mark.parametrize("single", [False, True])
def test_an_older_program_names_tensors_of_every_dtype(tmp_path: Path, single: bool) -> None:
    folder = written(tmp_path)
    checkpoint = open_stored(folder / "m.pdiparams" if single else folder)
    assert set(checkpoint.keys("model")) == set(arrays())
    for key, array in arrays().items():
        assert checkpoint.read(key).tobytes() == array.tobytes()
        assert checkpoint.read(key).shape == array.shape


def test_levels_of_detail_are_skipped(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "m.pdiparams").write_bytes(stream(arrays(), levels=(b"\0" * 16, b"\1" * 24)))
    assert open_stored(folder).read("steps") == 7


def test_it_converts(tmp_path: Path) -> None:
    convert(written(tmp_path / "source"), tmp_path / "out", ConvertOptions())
    checkpoint = holdfast.open(tmp_path / "out")
    assert checkpoint.read("linear_10.w_0").tobytes() == arrays()["linear_10.w_0"].tobytes()


def test_without_its_program_the_tensors_have_no_names(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "inference" / "model.pdiparams", tmp_path)
    with pytest.raises(Unsupported, match=r"have no names; put the program .* model\.json or model\.pdmodel"):
        open_stored(tmp_path)
    (tmp_path / "model.json").write_text(json.dumps({"not": "a program"}))
    with pytest.raises(Unsupported, match="its tensors have no names"):
        open_stored(tmp_path)


def test_several_models_in_one_folder(tmp_path: Path) -> None:
    shutil.copy(written(tmp_path) / "m.pdiparams", tmp_path / "n.pdiparams")
    with pytest.raises(Unsupported, match=r"several models: m\.pdiparams, n\.pdiparams; open one"):
        open_stored(tmp_path)


def test_a_program_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path)
    more = {**arrays(), "extra": np.zeros(2, np.float32)}
    (folder / "m.pdmodel").write_bytes(model_description(more))
    with pytest.raises(Damaged, match=r"6 tensors, but m\.pdmodel names 7"):
        open_stored(folder)
    (folder / "m.pdmodel").write_bytes(model_description({**arrays(), "mask": np.zeros(2, bool)}))
    with pytest.raises(Damaged, match=r"has the shape \[3\], but m\.pdmodel says \[2\] for 'mask'"):
        open_stored(folder)


@pytest.mark.parametrize("cut", [1, 3, 11, 13, 20])
def test_a_stream_that_ends_early(tmp_path: Path, cut: int) -> None:
    folder = written(tmp_path)
    path = folder / "m.pdiparams"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(Damaged, match=r"m\.pdiparams"):
        open_stored(folder)


def test_a_changed_byte_is_an_error_or_another_value(tmp_path: Path) -> None:
    """No header leads anywhere but to a HoldfastError."""
    folder = written(tmp_path)
    opened = tried = 0
    for name in ("m.pdiparams", "m.pdmodel"):
        good = (folder / name).read_bytes()
        for at in range(len(good)):
            (folder / name).write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
            tried += 1
            with contextlib.suppress(HoldfastError):
                open_stored(folder)
                opened += 1
        (folder / name).write_bytes(good)
    assert 0 < opened < tried
