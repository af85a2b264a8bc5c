"""Names of keys, groups, files and folders: the allowed ones, natural order, names of steps and set-aside steps.

A file name read from a checkpoint is plain, short, and never leads outside of its folder.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from holdfast.core import limits
from holdfast.core.errors import Damaged, Unsupported

MANIFEST = "holdfast.json"  # its presence commits the checkpoint
_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*|\.metadata")  # torch's is the only hidden file
_DEVICES = frozenset({"con", "prn", "aux", "nul"} | {f"{d}{n}" for d in ("com", "lpt") for n in range(1, 10)})
STATE = "state.json"
TRAINER_BEST = "trainer_best"  # a metric of Trainer's saves: the step if it was the best so far, else -1
PROGRAM, PROGRAM_GROUP = "program.json", "program"  # the model as a program, and the group of its constants
MASTERS = "master_weights"
ADAPTER, BASE, BUFFERS = "adapter", "base", "buffers"  # kinds of groups of a model with PEFT adapters
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's names: the exception to the numbered tensor files
ADAPTER_CONFIG = "adapter_config.json"
MASTER_STATES = frozenset({"master", "master_param", "master_weight", MASTERS})  # names used by optimizers
_DIGITS = re.compile(rb"([0-9]+)")
_TENSOR_FILE = re.compile(r"(?P<group>.+)-(?P<number>[0-9]{5,})-of-(?P<count>[0-9]{5,})\.safetensors")
_PICKLES = (
    ".bin",
    ".ckpt",
    ".dill",
    ".joblib",
    ".npy",
    ".npz",
    ".pdopt",
    ".pdparams",
    ".pickle",
    ".pk",
    ".pkl",
    ".pt",
    ".pth",
)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_GROUP_CHARS = 100
_ASIDE = re.compile(r"(abandoned|damaged)-step-([0-9]{12,})(?:-[0-9]+)?")
_STEP = re.compile(r"step-([0-9]{12,})")
_ITERATION = re.compile(r"iter_(?P<step>[0-9]{7,18})")


def is_plain(name: str) -> bool:
    """Return True if `name` consists of one or two harmless components."""
    parts = name.split("/")
    return len(name) <= limits.FILE_NAME_BYTES and len(parts) <= 2 and all(map(_is_harmless, parts))


def _is_harmless(part: str) -> bool:
    """Return True if the part is a file name on every system; "aux.json" is a device on some."""
    return _COMPONENT.fullmatch(part) is not None and part.partition(".")[0].lower() not in _DEVICES


def check_file(name: str, where: str) -> None:
    """Raise Damaged unless `name` is a plain file name that stays inside its folder."""
    if not is_plain(name):
        raise Damaged(f"{where}: {name[:80]!r} is not an allowed file name")


def manifest_attempt(manifest: bytes) -> str:
    """Return the attempt recorded in a manifest, which may be damaged; "" if there is none."""
    try:
        fields = json.loads(manifest)
    except (ValueError, RecursionError):
        return ""
    attempt = fields.get("attempt") if isinstance(fields, dict) else None
    return attempt if isinstance(attempt, str) else ""


def case_collision(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names that are equal on case-insensitive file systems, or None."""
    folded: dict[str, str] = {}
    for name in names:
        if name.lower() in folded:
            return folded[name.lower()], name
        folded[name.lower()] = name
    return None


def check_case_collisions(names: Iterable[str], where: str) -> None:
    """Raise Damaged if two file names differ only by case: on some systems they are the same file."""
    collision = case_collision(names)
    if collision is not None:
        raise Damaged(f"{where}: the file names {collision[0]!r} and {collision[1]!r} differ only by case")


NaturalKey = tuple[tuple[bytes | int, ...], bytes]


def natural_key(key: str) -> NaturalKey:
    """Return a sort key for natural order: runs of digits as integers, then the UTF-8 bytes."""
    raw = key.encode()
    parts: list[bytes | int] = list(_DIGITS.split(raw))
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts), raw


def key_problem(key: object) -> str | None:
    """Return why `key` may not name a tensor, or None if it may."""
    if not isinstance(key, str) or not key:
        return "is not a non-empty string"
    if key == "__metadata__":
        return "is reserved by safetensors"
    if _CONTROL.search(key):
        return "has control characters"
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "is not valid UTF-8"
    if size > limits.KEY_BYTES:
        return f"is longer than {limits.KEY_BYTES} bytes"
    return None


def check_key(key: str, where: str) -> None:
    """Raise Unsupported unless `key` may name a tensor."""
    problem = key_problem(key)
    if problem:
        raise Unsupported(f"{where}: the key {key[:80]!r} {problem}")


def check_group(group: str) -> None:
    """Raise Unsupported unless `group` may become part of a file name."""
    if not is_plain(group) or len(group) > _GROUP_CHARS:
        raise Unsupported(
            f"the name {group[:80]!r} cannot name a group of tensors: "
            "use letters, digits, '_', '.' and '-', and no device name such as 'con'"
        )


def masters_group(module: str) -> str:
    """Return the group of a module's fp32 masters, prefixed with the module's name unless it is "model"."""
    return MASTERS if module == "model" else f"{module}.{MASTERS}"


def adapter_group(module: str, adapter: str) -> str:
    """Return the group of one of a module's PEFT adapters."""
    return module if adapter == "default" else f"{module}.{adapter}"


def is_group_of(group: str, module: str) -> bool:
    """Return True for a module's own group, and for those of its adapters and its base model."""
    return group == module or group.startswith(f"{module}.")


def file_stem(group: str, kind: str) -> str:
    """Return the beginning of the names of a group's files: the group, except for adapters and their base models.

    PEFT opens an adapter named "default" in the folder itself, and any other one in a subfolder with its name.
    """
    if kind not in (ADAPTER, BASE):
        return group
    head, _, tail = group.rpartition("/")
    module, _, part = tail.partition(".")
    folder = ".".join(text for text in (head, module if module != "model" else "", part) if text)
    return (f"{folder}/" if folder else "") + ("adapter_model" if kind == ADAPTER else "model")


def tensor_file(stem: str, number: int, count: int) -> str:
    """Return the name of tensor file `number` (from 1) of `count` of a group."""
    return f"{stem}-{number:05d}-of-{count:05d}.safetensors"


def is_adapter_file(name: str) -> bool:
    return name.rpartition("/")[2] == ADAPTER_FILE


def is_tensor_file(name: str) -> bool:
    return _TENSOR_FILE.fullmatch(name) is not None or is_adapter_file(name)


def is_holdfast_name(name: str) -> bool:
    """Return True for a file name that Holdfast writes, with or without a manifest."""
    known = (MANIFEST, STATE, PROGRAM, "config.json", "generation_config.json", ADAPTER_CONFIG)
    base = name.rpartition("/")[2]
    return base in known or is_tensor_file(name) or name.endswith(".safetensors.index.json")


def extra_file_problem(name: str) -> str | None:
    """Return why a user's file may not be published under a name, or None if it may."""
    if not is_plain(name):
        return (
            "is not an allowed file name: at most one folder, letters, digits, '_', '.' and '-', no hidden file, "
            "and no device name such as 'con'"
        )
    lower = name.lower()
    if lower.endswith(_PICKLES):
        return "has the name of a pickle, which can run code when it is opened"
    if lower.endswith((".safetensors", ".safetensors.index.json")):
        return "has the name of a tensor file: save tensors in the state"
    if is_holdfast_name(lower) and ("/" not in lower or lower.endswith((MANIFEST, STATE))):
        return "is a file that Holdfast writes itself"
    return None


def group_folder(group: str) -> str:
    """Return the subfolder of a group's files with a trailing slash, "" for most groups."""
    head, slash, _ = group.rpartition("/")
    return head + slash


def index_file(stem: str) -> str:
    return f"{stem}.safetensors.index.json"


def step_folder(step: int) -> str:
    return f"step-{step:012d}"


def abandoned_folder(step: int) -> str:
    """Return the folder name of a step that was set aside because a rewind abandoned it."""
    return f"abandoned-{step_folder(step)}"


def damaged_folder(step: int) -> str:
    """Return the folder name of a damaged step that was set aside."""
    return f"damaged-{step_folder(step)}"


def set_aside_kind(folder: str) -> str | None:
    """Return why a folder was set aside, "abandoned" or "damaged"; None for other folders."""
    match = _ASIDE.fullmatch(folder)
    return None if match is None else match[1]


def set_aside_step(folder: str) -> int | None:
    """Return the step of a folder that was set aside, None for other folders."""
    match = _ASIDE.fullmatch(folder)
    return None if match is None else int(match[2])


def folder_step(folder: str) -> int | None:
    """Return the step of a committed folder's name, None for any other name."""
    match = _STEP.fullmatch(folder)
    if match is None or (len(match[1]) > 12 and match[1].startswith("0")):
        return None
    return int(match[1])


def iteration_step(folder: str) -> int | None:
    """Return the step of a folder that has the name of an iteration of Megatron, None for another name."""
    match = _ITERATION.fullmatch(folder)
    return None if match is None else int(match["step"])
