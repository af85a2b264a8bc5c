"""The states that optimizers keep for each parameter, as they are created by their first step."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """States in the shape of their parameter, and scalars, which torch keeps as fp32 on the host."""

    name: str
    like_parameter: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()


_STEP = ("step",)
_KNOWN = (
    OptimizerStates("none"),
    OptimizerStates("adamw", ("exp_avg", "exp_avg_sq"), _STEP),
    OptimizerStates("adam", ("exp_avg", "exp_avg_sq"), _STEP),
    OptimizerStates("adamw-amsgrad", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), _STEP),
    OptimizerStates("adamax", ("exp_avg", "exp_inf"), _STEP),
    OptimizerStates("nadam", ("exp_avg", "exp_avg_sq"), ("step", "mu_product")),
    OptimizerStates("radam", ("exp_avg", "exp_avg_sq"), _STEP),
    OptimizerStates("sgd"),
    OptimizerStates("sgd-momentum", ("momentum_buffer",)),
    OptimizerStates("rmsprop", ("square_avg",), _STEP),
    OptimizerStates("adagrad", ("sum",), _STEP),
    OptimizerStates("adadelta", ("square_avg", "acc_delta"), _STEP),
    OptimizerStates("lion", ("exp_avg",)),
)
OPTIMIZERS = {each.name: each for each in _KNOWN}


def optimizer_named(name: str) -> OptimizerStates:
    """Return the states of an optimizer by its name; raises InvalidArgument for an unknown one."""
    found = OPTIMIZERS.get(name.lower())
    if found is None:
        raise InvalidArgument(f"optim={name!r}: choose one of {', '.join(OPTIMIZERS)}")
    return found
