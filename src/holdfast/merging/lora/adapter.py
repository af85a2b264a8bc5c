"""An adapter as an input of a merge: opened, its tensors sorted by the module that they change, its base resolved."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoint.base_reference import base_folder, check_base
from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.convert.sidefiles import side_files
from holdfast.core import names
from holdfast.core.errors import Mismatch, NotFound, Unsupported
from holdfast.merging.lora.adapter_config import LoraConfig
from holdfast.merging.lora.borrowed_files import borrow
from holdfast.plan.contents import Group
from holdfast.plan.files import Place
from holdfast.plan.recipe import Recipe
from holdfast.sources import open_source

TOKENS = "token_adapter.trainable_tokens_delta"
_PREFIX = "base_model.model."
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector|token_adapter\.trainable_tokens_delta)"
)
_FULL = re.compile(r"(?P<module>.+?)\.(?:token_adapter\.)?base_layer\.(?P<leaf>.+)")
_HEAD_TOKENS = re.compile(r"(?P<module>(?:.+\.)?(?:lm_head|embed_out))\.token_adapter\..+")
# Beside a resized module in modules_to_save PEFT stores copies, and does not load them.
_COPY = re.compile(r"(?P<module>.+?)\.(?:modules_to_save|original_module)\.(?P<leaf>.+)")


@dataclass(slots=True)
class ModuleParts:
    """The tensors of an adapter for one module, by part, with their keys in the adapter."""

    parts: dict[str, Recipe[Place]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)


class Adapter:
    """An opened LoRA adapter: a folder of PEFT, or a step of a run that trained one."""

    def __init__(self, path: str, number: int, weight: float = 1.0) -> None:
        """Open the adapter. Raises Unsupported for a pickle, and for another kind of adapter."""
        self.options_path = path
        self.weight = weight
        _refuse_pickles(path)
        self.source = open_source(path)
        self.lock = threading.Lock()
        self.group_name, group = _adapter_group(self.source)
        self.small: Mapping[str, bytes] = side_files(self.source)
        self.folder = names.group_folder(names.file_stem(self.group_name, names.ADAPTER))
        config = self.small.get(f"{self.folder}{names.ADAPTER_CONFIG}")
        if config is None:
            raise NotFound(f"{self.source.path} has no {names.ADAPTER_CONFIG}, which says how to merge the adapter")
        self.config = LoraConfig.read(config, f"{self.source.path}/{names.ADAPTER_CONFIG}")
        self.borrowed = borrow(self.source, group, f"adapter:{number}", self.lock)
        self.modules: dict[str, ModuleParts] = {}
        self.full: dict[str, tuple[str, Recipe[Place]]] = {}  # whole tensors: the base's key to the adapter's
        self._copies: dict[str, str] = {}
        self._head_tokens: dict[str, str] = {}  # keys of trained rows of the output embedding, with its module
        for key, recipe in self.borrowed.tensors.items():
            self._sort(key, recipe)
        self.copies = self._check_copies()

    def drop_copies(self, module: str) -> None:
        """Drop the tensors of an output embedding that are copies of those of the input embedding."""
        keys = list(self.modules.pop(module, ModuleParts()).keys.values())
        if f"{module}.weight" in self.full:
            keys.append(self.full.pop(f"{module}.weight")[0])
        self.copies += tuple(keys)

    def drop_tied_rows(self, exists: Callable[[str], bool]) -> None:
        """Drop the rows of an output embedding that the base does not have: they are a copy of the input embedding's.

        Raises Mismatch if the adapter has no such rows for another module.
        """
        for key, module in self._head_tokens.items():
            if module not in self.modules or exists(f"{module}.weight"):
                continue
            others = [name for name, own in self.modules.items() if name != module and TOKENS in own.parts]
            if not others:
                raise Mismatch(f"{self.path}: {key!r}: the base has no weight of {module!r}")
            self.drop_copies(module)

    @property
    def path(self) -> str:
        return self.source.path

    def base_path(self) -> str | Path | None:
        """Return the base that the adapter names, None if it is not on this host. Raises Mismatch if it changed."""
        record = self.source.manifest.bases.get(self.group_name)
        if record is not None and record["mode"] == "reference":
            folder = base_folder(record["source"], record.get("revision"))
            if folder is None:
                raise NotFound(
                    f"{self.path}: its base model {record['source']} is missing on this host; name the base: "
                    "`holdfast merge BASE DST --lora ADAPTER`"
                )
            check_base(record, folder, self.path)
            return folder
        if any(group.kind == names.BASE for group in self.source.contents.groups.values()):
            return self.options_path
        return base_folder(self.config.base or "", None)

    def _sort(self, key: str, recipe: Recipe[Place]) -> None:
        name = key.removeprefix(_PREFIX)
        head = _HEAD_TOKENS.fullmatch(name)
        if head is not None:
            self._head_tokens[key] = head["module"]
        match = _PART.fullmatch(name.removesuffix(".weight") if "magnitude_vector" in name else name)
        if match is not None:
            module = match["module"].replace(".base_layer", "")
            parts = self.modules.setdefault(module, ModuleParts())
            parts.parts[match["part"]] = recipe
            parts.keys[match["part"]] = key
            return
        whole, copy = _FULL.fullmatch(name), _COPY.fullmatch(name)
        if copy is not None:
            self._copies[f"{copy['module']}.{copy['leaf']}"] = key
            return
        target = f"{whole['module']}.{whole['leaf']}" if whole is not None else name
        if target in self.full:
            raise Mismatch(f"{self.path} has {target!r} twice: {self.full[target][0]!r} and {key!r}")
        self.full[target] = (key, recipe)

    def _check_copies(self) -> tuple[str, ...]:
        """Return the keys of copies. Raises Mismatch for one without the tensor that PEFT loads."""
        for target, key in self._copies.items():
            if target not in self.full:
                raise Mismatch(f"{self.path}: {key!r} is a copy that PEFT stores beside {target!r}, which is missing")
        return tuple(self._copies.values())


def _refuse_pickles(path: str) -> None:
    """Raise Unsupported for an adapter that is stored as a pickle."""
    folder = Path(path).expanduser()
    if folder.is_file() and folder.suffix != ".safetensors":
        raise Unsupported(f"{path}: expected the folder of an adapter, or its adapter_model.safetensors")
    if "://" in path or not folder.is_dir() or (folder / names.ADAPTER_FILE).exists():
        return
    pickle = next((name for name in _PICKLES if (folder / name).exists()), None)
    if pickle is not None:
        raise Unsupported(
            f"{path}: the adapter is a pickle, {pickle}, which may run code when it is read; save it again with "
            "PEFT's save_pretrained(safe_serialization=True)"
        )


def _adapter_group(source: Checkpoint) -> tuple[str, Group]:
    found = {name: group for name, group in source.contents.groups.items() if group.kind == names.ADAPTER}
    chosen = {name: group for name, group in found.items() if "/" not in name} or found
    if not chosen:
        kinds = ", ".join(f"{name} ({group.kind})" for name, group in source.contents.groups.items()) or "nothing"
        raise NotFound(f"{source.path} has no adapter, but {kinds}: {names.ADAPTER_FILE} with {names.ADAPTER_CONFIG}")
    if len(chosen) > 1:
        raise NotFound(f"{source.path} has several adapters: {', '.join(sorted(chosen))}; copy one to its own folder")
    return next(iter(chosen.items()))
