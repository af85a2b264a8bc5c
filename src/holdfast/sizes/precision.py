"""The formats of a run's tensors: parameters, copies for computation, gradients, masters, optimizer states."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.errors import InvalidArgument
from holdfast.sizes.element_formats import ElementFormat, format_named, format_of, plain_format
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.optimizer_states import OptimizerStates, optimizer_named


@dataclass(frozen=True, slots=True)
class Precision:
    """The formats of a run. None: parameters as they are stored, and no copies, gradients or masters."""

    param: ElementFormat | None
    compute: ElementFormat | None
    grads: ElementFormat | None
    masters: ElementFormat | None
    optim: OptimizerStates

    @staticmethod
    def of(param: str | None, compute: str | None, grads: str | None, masters: str | None, optim: str) -> Precision:
        """Check the options. A trained model has gradients; weights below fp32 have fp32 masters unless told not to."""
        states = optimizer_named(optim)
        trains = states.name != "none"
        stored = None if param is None else plain_format(param, "param")
        if masters is None:
            is_narrow = stored is not None and stored.bits < 32
            masters = "fp32" if trains and is_narrow else "none"
        if masters != "none" and not trains:
            raise InvalidArgument(f"masters={masters!r} belong to an optimizer: name it with optim")
        return Precision(
            param=stored,
            compute=None if compute is None else format_named(compute, "compute"),
            grads=None if grads is None else plain_format(grads, "grads"),
            masters=None if masters == "none" else plain_format(masters, "masters"),
            optim=states,
        )

    @property
    def trains(self) -> bool:
        return self.optim.name != "none"

    def parameter(self, tensor: ModelTensor) -> ElementFormat:
        """Return the format of a tensor in memory and in the checkpoint."""
        return format_of(tensor.dtype) if self.param is None or not tensor.is_float else self.param

    def gradient(self, tensor: ModelTensor) -> ElementFormat | None:
        """Return the format of a tensor's gradient, None without one."""
        if not self._is_trained(tensor):
            return None
        return self.grads or self.parameter(tensor)

    def master(self, tensor: ModelTensor) -> ElementFormat | None:
        """Return the format of a tensor's master, None without one."""
        return self.masters if self._is_trained(tensor) else None

    def state(self, tensor: ModelTensor) -> ElementFormat:
        """Return the format of the optimizer's states: that of the tensor which it steps."""
        return self.masters or self.parameter(tensor)

    def states(self, tensor: ModelTensor) -> OptimizerStates:
        """Return the states that the optimizer keeps for a tensor."""
        return self.optim if self._is_trained(tensor) else optimizer_named("none")

    def _is_trained(self, tensor: ModelTensor) -> bool:
        return self.trains and tensor.is_trained and tensor.is_parameter
