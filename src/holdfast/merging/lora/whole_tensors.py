"""Changed tensors that an adapter stores whole: under which names PEFT loads them, and the modules that it copies.

PEFT needs every tensor of a module in `modules_to_save`, takes every module whose name ends with one of these names,
and allows none that has matrices too. It loads any other tensor by its name in the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class WholeTensors:
    """Keys of the model by the names under which an adapter stores their tensors.

    `modules` are those of `modules_to_save`. `biases`: biases of other modules are stored, too.
    """

    names: Mapping[str, str]
    modules: tuple[str, ...]
    biases: bool


def whole_tensors(
    changed: Collection[str], factored: Collection[str], keys: Collection[str], by_name: Collection[str] = ()
) -> WholeTensors:
    """Name the changed tensors that are stored whole, beside weights that become two matrices.

    Those in `by_name` are not stored in `modules_to_save`, which would copy their module.
    Raises Unsupported for a tensor that belongs to no module.
    """
    leaves: dict[str, list[str]] = defaultdict(list)
    for key in changed:
        module, _, leaf = key.rpartition(".")
        if not module:
            raise Unsupported(f"{key!r} was changed, but belongs to no module: an adapter cannot hold it")
        leaves[module].append(leaf)
    with_matrices = {key.rpartition(".")[0] for key in factored}
    modules = {path for key in keys for path in _paths(key)}
    names: dict[str, str] = {}
    saved: list[str] = []
    for module, own in leaves.items():
        if module in with_matrices:
            names.update({f"{module}.base_layer.{leaf}": f"{module}.{leaf}" for leaf in own})
        elif own == ["bias"] or not _is_alone(module, modules) or any(f"{module}.{leaf}" in by_name for leaf in own):
            names.update({f"{module}.{leaf}": f"{module}.{leaf}" for leaf in own})
        else:
            saved.append(module)
            names.update({key: key for key in keys if key.rpartition(".")[0] == module})
    biases = any(name.endswith(".bias") and name.removesuffix(".bias") not in saved for name in names)
    return WholeTensors(names, tuple(sorted(saved)), biases)


def _is_alone(module: str, modules: Collection[str]) -> bool:
    """Return True if no other module is in this one, and the name of none ends with its name."""
    return not any(path.startswith(f"{module}.") or (path.endswith(module) and path != module) for path in modules)


def _paths(key: str) -> list[str]:
    """Return the modules that a tensor is in, innermost first."""
    parts = key.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
