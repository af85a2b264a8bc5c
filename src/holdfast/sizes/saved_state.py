"""The state that a run saves, as the agreement of its ranks that a save plans from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from holdfast.core.names import MASTERS
from holdfast.format.dtypes import DType, dtype_named
from holdfast.layout.placement import Mesh, Spread
from holdfast.plan.coverage import Holdings
from holdfast.sizes.model_tensors import ModelTensor
from holdfast.sizes.precision import Precision
from holdfast.sizes.run_spreads import TensorSpreads

if TYPE_CHECKING:
    from holdfast.adapters.saving.agreement import AgreedTensor, Agreement

MODEL, OPTIMIZER = "model", "optimizer"


class SavedState:
    """The tensors that a save of a model and its optimizer collects, with the ranks that hold them."""

    def __init__(self, model_dtype: str | None) -> None:
        self._rounded = None if model_dtype is None else dtype_named(model_dtype)
        self._tensors: dict[tuple[str, str], AgreedTensor] = {}
        self._kinds = {MODEL: "module"}

    def add(self, tensor: ModelTensor, held: TensorSpreads, precision: Precision) -> None:
        """Add a tensor of the model, its master and its optimizer states, under the keys that a save gives them."""
        role = "parameter" if tensor.is_parameter else "buffer"
        form = precision.parameter(tensor)
        dtype = form.stored if tensor.is_float else tensor.dtype
        logical = dtype if tensor.is_float else tensor.logical
        if self._rounded is not None and tensor.is_parameter and dtype.name == "float32":
            self._put(MASTERS, tensor.key, dtype, dtype, tensor.shape, role, held.parameter)
            dtype = logical = self._rounded
        self._put(MODEL, tensor.key, dtype, logical, tensor.shape, role, held.parameter)
        master = precision.master(tensor)
        if master is not None:
            self._put(MASTERS, tensor.key, master.stored, master.stored, tensor.shape, "state", held.state)
        self._add_states(tensor, held, precision)

    def _add_states(self, tensor: ModelTensor, held: TensorSpreads, precision: Precision) -> None:
        states, dtype = precision.states(tensor), precision.state(tensor).stored
        if precision.trains:
            self._kinds[OPTIMIZER] = "optimizer"
        for name in states.like_parameter:
            self._put(OPTIMIZER, f"{tensor.key}/{name}", dtype, dtype, tensor.shape, "state", held.state)
        single = dtype_named("float32")
        for name in states.scalars:
            self._put(OPTIMIZER, f"{tensor.key}/{name}", single, single, (), "state", held.scalars)

    def _put(
        self, group: str, key: str, dtype: DType, logical: DType, shape: tuple[int, ...], role: str, spread: Spread
    ) -> None:
        from holdfast.adapters.saving.agreement import AgreedTensor

        if group == MASTERS:
            self._kinds[MASTERS] = "masters"
        self._tensors[group, key] = AgreedTensor(dtype, logical, shape, role, spread)

    def agreement(self, hosts: Sequence[int], aliases: Mapping[str, str]) -> Agreement:
        """Return the agreement of ranks on these hosts."""
        from holdfast.adapters.saving.agreement import Agreement

        return Agreement(
            tensors=self._tensors,
            kinds=self._kinds,
            aliases={MODEL: dict(aliases)},
            hosts=tuple(hosts),
            mesh=Mesh.line(len(hosts)),
            axes={},
            partitioned=frozenset(),
            uniform=frozenset(),
            reporters={},
            labels={},
            digest="",
            holdings=Holdings(),
        )
