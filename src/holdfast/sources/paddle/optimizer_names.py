"""Optimizer states from Paddle's names to torch's; powers of the betas become steps. to_paddle.py is the reverse."""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping
from typing import Any

from holdfast.checkpoint.checkpoint import Checkpoint
from holdfast.core.errors import Damaged, Unsupported
from holdfast.core.names import natural_key
from holdfast.format import statejson
from holdfast.format.dtypes import dtype_named
from holdfast.plan.contents import Contents, Group
from holdfast.plan.files import Place, TensorSpec
from holdfast.plan.load_plan import StoredBlock, StoredFile
from holdfast.plan.recipe import Recipe
from holdfast.sources.foreign import Foreign, with_contents
from holdfast.sources.paddle.beta_powers import Powers, Steps, find_steps
from holdfast.sources.scalars import read_scalars

TORCH_NAMES = {
    "moment1": "exp_avg",
    "moment2": "exp_avg_sq",
    "moment2_max": "max_exp_avg_sq",
    "inf_norm": "exp_inf",
    "velocity": "momentum_buffer",
}
POWERS = ("beta1_pow_acc", "beta2_pow_acc")
_STATE = re.compile(rf"(?P<owner>.+)/(?P<name>{'|'.join((*TORCH_NAMES, *POWERS))})_[0-9]+")
_MADE = "made:steps"  # not a possible file name
_F32 = dtype_named("float32")


def is_paddle_state(key: str) -> bool:
    """Return True if a key of an optimizer group is a state with a Paddle name."""
    return _STATE.fullmatch(key) is not None


def is_moment(key: str) -> bool:
    """Return True if a state has a value for every element of its parameter."""
    match = _STATE.fullmatch(key)
    return match is not None and match["name"] in TORCH_NAMES


def as_torch(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with torch's optimizer names if Paddle wrote it, otherwise unchanged.

    moment1_0 becomes exp_avg. The step is derived from the powers of the betas, which are read.
    Raises Unsupported if no step gives these powers.
    """
    if not isinstance(checkpoint, Foreign):
        return checkpoint
    contents = checkpoint.contents
    named = {
        name: group
        for name, group in contents.groups.items()
        if group.kind == "optimizer" and any(map(is_paddle_state, group.tensors))
    }
    if not named:
        return checkpoint
    made: dict[str, bytes] = {}
    for name, group in named.items():
        powers = _read_powers(checkpoint, group)
        steps = _steps(set(powers.values()), contents.step, checkpoint.path)
        contents, data = torch_state(contents, name, powers, steps)
        made |= {f"{_MADE}:{name}": data}
    return with_contents(checkpoint, contents, made)


def torch_state(contents: Contents, name: str, powers: Mapping[str, Powers], steps: Steps) -> tuple[Contents, bytes]:
    """Return contents whose optimizer `name` has torch's names, and the file with its steps.

    `powers` are the powers of the betas by parameter.
    """
    distinct = sorted(set(steps.by_powers.values()))
    file = f"{_MADE}:{name}"
    places = {step: Place(TensorSpec(f"step {step}", _F32, ()), file, 4 * index) for index, step in enumerate(distinct)}
    tensors: dict[str, Recipe[Place]] = {}
    for key, recipe in contents.groups[name].tensors.items():
        match = _STATE.fullmatch(key)
        if match is None or match["name"] in TORCH_NAMES:
            kept = key if match is None else f"{match['owner']}/{TORCH_NAMES[match['name']]}"
            if kept in tensors:
                raise Damaged(f"{name}: {kept!r} appears under two names, one of them {key!r}")
            tensors[kept] = recipe
    for owner, pair in powers.items():
        tensors[f"{owner}/step"] = Recipe.whole(places[steps.by_powers[pair]], (), _F32)
    data = b"".join(struct.pack("<f", step) for step in distinct)
    stored = StoredFile(file, (StoredBlock(0, len(data), None),) if data else (), tuple(places.values()))
    groups = {**contents.groups, name: Group("optimizer", tensors)}
    state = {**contents.state, name: _entry(tensors, steps.betas)}
    return Contents(groups, (*contents.files, stored), state, contents.step, contents.tp_degree), data


def _entry(tensors: Mapping[str, Any], betas: tuple[float, float] | None) -> dict[str, Any]:
    """Return the state.json entry of an optimizer; of its options only the betas are known."""
    params = sorted({key.rpartition("/")[0] for key in tensors}, key=natural_key)
    options = statejson.encode({"betas": betas} if betas else {}, "optimizer")
    groups = [{"params": params, "options": options}]
    return {"kind": "optimizer", "groups": groups, "stateless": [], "scalars": {}, "masters": None}


def _steps(powers: Collection[Powers], noted: int | None, where: str) -> Steps:
    steps = find_steps(powers, noted) if powers else Steps(None, {})
    if steps is not None:
        return steps
    if noted is not None:
        return Steps(None, dict.fromkeys(powers, noted))
    first, second = next(iter(powers))
    raise Unsupported(
        f"{where}: its optimizer has beta1_pow_acc {first:.9g} and beta2_pow_acc {second:.9g}; no step with the usual "
        'betas gives these, so the step is unknown: add {"global_step": N} to trainer_state.json in the same folder'
    )


def _read_powers(checkpoint: Checkpoint, group: Group) -> dict[str, Powers]:
    """Read the beta powers of each parameter, which are scalars."""
    values = read_scalars(checkpoint, {key: recipe for key, recipe in group.tensors.items() if _is_power(key)})
    found: dict[str, dict[str, float]] = {}
    for key, value in values.items():
        owner, _, state = key.rpartition("/")
        found.setdefault(owner, {})[state.rpartition("_")[0]] = value
    lacking = next((owner for owner, pair in found.items() if len(pair) < len(POWERS)), None)
    if lacking is not None:
        raise Damaged(f"{checkpoint.path}: {lacking} has only one of {' and '.join(POWERS)}")
    return {owner: (pair[POWERS[0]], pair[POWERS[1]]) for owner, pair in found.items()}


def _is_power(key: str) -> bool:
    match = _STATE.fullmatch(key)
    return match is not None and match["name"] in POWERS
