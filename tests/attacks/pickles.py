"""Smuggled pickles: each would leave a file behind, if anybody loaded it."""

from __future__ import annotations

import base64
import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.attack import Attack
from tests.attacks.forge import INDEX, MODEL, forge_file, index

PROOF = "the pickle was loaded"


class Touch:
    """Its pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def smuggled(folder: Path) -> bytes:
    """A pickle that leaves its proof beside the folder."""
    return pickle.dumps(Touch(folder.with_name(PROOF)))


def zipped(folder: Path) -> bytes:
    """The same as torch.save would pack it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("archive/data.pkl", smuggled(folder))
        archive.writestr("archive/version", "3\n")
    return packed.getvalue()


def _foreign(name: str, content: Callable[[Path], bytes]) -> Attack:
    def plant(folder: Path) -> None:
        (folder / name).write_bytes(content(folder))

    return Attack(f"foreign {name}, {content.__name__}", plant, on="foreign")


def _indexed(name: str) -> Attack:
    def plant(folder: Path) -> None:
        (folder / name).write_bytes(smuggled(folder))
        (folder / INDEX).write_bytes(index({"key": name}))

    return Attack(f"an index that names {name}", plant, on="foreign")


def _recorded(name: str, content: Callable[[Path], bytes]) -> Attack:
    return Attack(f"recorded {name}, {content.__name__}", lambda folder: forge_file(folder, name, content(folder)))


def _in_state(name: str, value: Callable[[str], Any]) -> Attack:
    """A value of state.json; what has an unknown tag must not become an object."""

    def plant(folder: Path) -> None:
        text = base64.b64encode(smuggled(folder)).decode()
        entries = {"note": {"kind": "json", "value": value(text)}}
        forge_file(folder, "state.json", json.dumps({"version": 1, "entries": entries}).encode())

    return Attack(name, plant)


ATTACKS = (
    *(_foreign(name, smuggled) for name in ("pytorch_model.bin", "model.pt", "model.pkl", "model.safetensors", INDEX)),
    *(_foreign(name, zipped) for name in ("pytorch_model.bin", "model.pt", "model.safetensors")),
    *(_indexed(name) for name in ("pytorch_model.bin", "model-00001-of-00001.safetensors")),
    *(_recorded(name, content) for name in (MODEL, INDEX, "state.json") for content in (smuggled, zipped)),
    _foreign("holdfast.json", smuggled),
    _in_state("a numpy object", lambda text: {"$numpy": ["object", "00" * 8]}),
    _in_state("a numpy void", lambda text: {"$numpy": ["void", "00" * 8]}),
    _in_state("a numpy structure", lambda text: {"$numpy": [[["a", "O"]], "00" * 8]}),
)
