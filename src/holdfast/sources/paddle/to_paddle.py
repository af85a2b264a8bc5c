"""Optimizer states from torch's names to Paddle's; steps become powers of the betas. See optimizer_names.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Unsupported
from holdfast.format import statejson
from holdfast.format.dtypes import dtype_named
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import with_contents
from holdfast.sources.paddle.beta_powers import DEFAULT_BETAS, powers_at
from holdfast.sources.paddle.optimizer_names import POWERS, TORCH_NAMES, is_paddle_state
from holdfast.sources.scalars import read_scalars

_PADDLE_NAMES = {torch: f"{name}_0" for name, torch in TORCH_NAMES.items()}
_MADE = "made:powers"
_F32 = dtype_named("float32")

Betas = tuple[float, float]


def as_paddle(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with Paddle's optimizer names; unchanged if it already has them.

    exp_avg becomes moment1_0. Steps are read and become beta1_pow_acc_0 and beta2_pow_acc_0.
    """
    contents = checkpoint.contents
    made: dict[str, bytes] = {}
    for name, group in checkpoint.contents.groups.items():
        if group.kind == "optimizer" and not any(map(is_paddle_state, group.tensors)):
            entry = contents.state.get(name, {})
            contents, data = paddle_state(contents, name, _read_steps(checkpoint, group, entry), _betas(entry, name))
            made[f"{_MADE}:{name}"] = data
    return with_contents(checkpoint, contents, made) if made else checkpoint


def paddle_state(
    contents: Contents, name: str, steps: Mapping[str, int], betas: Mapping[str, Betas]
) -> tuple[Contents, bytes]:
    """Return contents whose optimizer `name` has Paddle's names, and the file with the powers.

    `steps` and `betas` are given by parameter.
    """
    file = f"{_MADE}:{name}"
    tensors: dict[str, Recipe[Place]] = {}
    for key, recipe in contents.groups[name].tensors.items():
        owner, _, state = key.rpartition("/")
        if state != "step":
            tensors[f"{owner}/{_PADDLE_NAMES.get(state, state)}"] = recipe
    values = {(steps[owner], betas.get(owner, DEFAULT_BETAS)) for owner in steps}
    places: dict[tuple[int, Betas], list[Place]] = {}
    data = b""
    for step, own in sorted(values):
        for power in powers_at(step, own):
            spec = TensorSpec(f"power {len(data)}", _F32, (1,))
            places.setdefault((step, own), []).append(Place(spec, file, len(data)))
            data += np.float32(power).tobytes()
    for owner, step in steps.items():
        for power_name, place in zip(POWERS, places[step, betas.get(owner, DEFAULT_BETAS)], strict=True):
            tensors[f"{owner}/{power_name}_0"] = Recipe.whole(place, (1,), _F32)
    every = tuple(place for pair in places.values() for place in pair)
    stored = StoredFile(file, (StoredBlock(0, len(data), None),) if data else (), every)
    groups = {**contents.groups, name: Group("optimizer", tensors)}
    return replace(contents, groups=groups, files=(*contents.files, stored)), data


def _read_steps(checkpoint: Checkpoint, group: Group, entry: Mapping[str, Any]) -> dict[str, int]:
    """Read the step of every parameter that has one, from a scalar tensor or a plain value."""
    found = {key: recipe for key, recipe in group.tensors.items() if key.endswith("/step")}
    values = {key.removesuffix("/step"): value for key, value in read_scalars(checkpoint, found).items()}
    for owner, encoded in entry.get("scalars", {}).items():
        plain = statejson.decode(encoded, checkpoint.path)
        if isinstance(plain, dict) and isinstance(plain.get("step"), int | float):
            values.setdefault(owner, float(plain["step"]))
    for owner, value in values.items():
        if not (value >= 0 and value == int(value)):
            raise Unsupported(f"{checkpoint.path}: the step of {owner} is {value}, expected a non-negative integer")
    return {owner: int(value) for owner, value in values.items()}


def _betas(entry: Mapping[str, Any], name: str) -> dict[str, Betas]:
    """Return the betas of every parameter whose options give them."""
    out: dict[str, Betas] = {}
    for group in entry.get("groups", ()):
        options = statejson.decode(group["options"], name, lambda tag, content: {tag: content})
        betas = options.get("betas") if isinstance(options, dict) else None
        if isinstance(betas, tuple | list) and len(betas) == 2 and all(isinstance(b, float | int) for b in betas):
            out |= dict.fromkeys(group["params"], (float(betas[0]), float(betas[1])))
    return out
