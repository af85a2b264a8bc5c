"""Hostile names, in each place where a checkpoint has names: keys, file names, weight maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.attacks.attack import Attack
from tests.attacks.forge import INDEX, MODEL, OUTSIDE, forge_file, forge_manifest, index, tensor, tensor_file

NAMES: tuple[str, ...] = (
    "",
    ".",
    "..",
    "/",
    f"../{OUTSIDE}",
    f"./{OUTSIDE}",
    f"sub/../../{OUTSIDE}",
    f"..//{OUTSIDE}",
    "../../../../../../etc/passwd",
    "/etc/passwd",
    "//etc/passwd",
    "/dev/zero",
    "/proc/self/mem",
    "a/b/c.safetensors",
    "a.safetensors/",
    "a\0.safetensors",
    f"{MODEL}\0.txt",
    "a\nb.safetensors",
    "a\rb",
    "a\tb",
    "\x1b[2Ja",
    "a\x7f",
    "a\x9b",
    "n" * 201,
    "n" * 300,
    "n" * 100_000,
    "a\\b.safetensors",
    f"..\\{OUTSIDE}",
    "C:\\x",
    "C:x",
    "\\\\host\\share",
    f"%2e%2e/{OUTSIDE}",
    f"%2e%2e%2f{OUTSIDE}",
    "..%00",
    f"\uff0e\uff0e/{OUTSIDE}",
    f"\u2024\u2024/{OUTSIDE}",
    "a\u202eb",
    "a\ud800",
    "mod\u00e8le",
    ".hidden",
    "sub/.hidden",
    "-rf",
    "~/x",
    "$HOME",
    "a b",
    "a;b",
    "file:///etc/passwd",
    "https://host/x",
    "con",
    "NUL",
    "aux.safetensors",
    "COM1",
    "lpt9.safetensors",
)

WRITABLE = tuple(name for name in NAMES if name != "a\ud800")  # a manifest is UTF-8

BAD_KEYS: tuple[str, ...] = (
    "",
    "\0",
    "a\0",
    "\0a",
    "a\nb",
    "a\rb",
    "a\tb",
    "a\vb",
    "a\fb",
    "a\bb",
    "\x07",
    "\x1b[2J",
    "\x1b]0;title\x07",
    "a\x7f",
    "a\x80",
    "a\x85b",
    "a\x9b",
    "a\x9d0;title\x9c",
    "a\u2028",
    "a\u2029",
    "a\ud800",
    "\udc00a",
    "\udfff\ud800",
    "k" * 1025,
    "\u00e9" * 513,
    "\U0001f600" * 257,
    "k" * 100_000,
    "__metadata__",
)
PATH_KEYS: tuple[str, ...] = (
    ".",
    "..",
    "/",
    "../../etc/x",
    "/etc/passwd",
    f"../{OUTSIDE}",
    "a//b",
    "a/b/c/d",
    "~/x",
    "C:\\x",
    "..\\..\\x",
    "\\\\host\\share",
    "%2e%2e/x",
    "%00",
    "con",
    "NUL",
    "aux.weight",
    ".hidden",
    "-rf",
    "$HOME",
    "a b",
    "<script>alert(1)</script>",
    "'; DROP TABLE x; --",
    "a\u202eb",
    "\uff0e\uff0e/x",
    "k" * 300,
    "k" * 1024,
    "__proto__",
    "holdfast.json",
)


def _brief(name: str) -> str:
    return repr(name) if len(name) <= 40 else f"{name[:20]!r} of {len(name)}"


def _can_be_made(name: str) -> bool:
    """Whether a file may have the name inside its folder: then nothing but the name is wrong with it."""
    return name not in ("", ".", "..") and not set("/\0\ud800") & set(name) and len(name.encode()) <= 255


def _as_file(name: str) -> Callable[[Path], None]:
    """A checkpoint whose tensor file is called `name`, wherever its name is told."""

    def change(fields: Any) -> None:
        fields["files"][name] = fields["files"].pop(MODEL)
        fields["groups"]["model"]["files"] = [name]

    def plant(folder: Path) -> None:
        forge_file(folder, INDEX, index({"weight": name, "bias": name}))
        forge_manifest(folder, change)
        if _can_be_made(name):
            (folder / MODEL).rename(folder / name)

    return plant


def _with_twin(name: str) -> Callable[[Path], None]:
    """A checkpoint with a copy of state.json under a name that differs from another only by case."""

    def plant(folder: Path) -> None:
        if name != "holdfast.json":
            (folder / name).write_bytes((folder / "state.json").read_bytes())
        forge_manifest(folder, lambda fields: fields["files"].update({name: fields["files"]["state.json"]}))

    return plant


def _in_weight_map(weight_map: dict[str, str]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        for key, name in weight_map.items():
            if _can_be_made(name):
                (folder / name).write_bytes(tensor_file({key: tensor(0, 4)}, b"data"))
        (folder / INDEX).write_bytes(index(weight_map))

    return plant


def _keys(*keys: str) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        fields = {key: tensor(at * 4, at * 4 + 4) for at, key in enumerate(keys)}
        (folder / "model.safetensors").write_bytes(tensor_file(fields, b"data" * len(keys)))

    return plant


def _index_of_checkpoint(name: str) -> Callable[[Path], None]:
    return lambda folder: forge_file(folder, INDEX, index({"weight": name, "bias": MODEL}))


FILE_TWINS = ("STATE.JSON", "State.json", "HOLDFAST.json", "holdfast.json", MODEL.upper())

IN_KEYS = (
    *(Attack(f"key {_brief(key)}", _keys(key), on="foreign") for key in BAD_KEYS),
    *(Attack(f"key {_brief(key)}", _keys(key), on="foreign", harmless=True) for key in PATH_KEYS),
    Attack("keys that differ by case", _keys("Weight", "weight", "WEIGHT"), on="foreign", harmless=True),
    Attack("keys that look alike", _keys("a\u0301", "\u00e1", "\u0430"), on="foreign", harmless=True),
)
IN_FILES = (
    *(Attack(f"file {_brief(name)}", _as_file(name)) for name in WRITABLE),
    *(Attack(f"the file's twin {name!r}", _with_twin(name)) for name in FILE_TWINS),
)
IN_WEIGHT_MAP = (
    *(Attack(f"mapped to {_brief(name)}", _in_weight_map({"key": name}), on="foreign") for name in NAMES),
    *(Attack(f"mapped in a checkpoint to {_brief(name)}", _index_of_checkpoint(name)) for name in NAMES),
    *(Attack(f"mapped from {_brief(key)}", _in_weight_map({key: "a.safetensors"}), on="foreign") for key in BAD_KEYS),
    Attack("files that differ by case", _in_weight_map({"a": "a.safetensors", "b": "A.safetensors"}), on="foreign"),
    Attack("a folder's twins", _in_weight_map({"a": "x/a.safetensors", "b": "X/a.safetensors"}), on="foreign"),
)
