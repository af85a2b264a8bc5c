"""The state of a torchtitan run: one module of all parts, optimizers by name, a loader without pickle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER
from torchtitan.components.checkpointer.utils import canonical_fqn

from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported


def run_state(
    model: nn.Module, optimizers: Iterable[Any], lr_schedulers: Any, dataloader: Any, others: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the state of a run: `others` are the objects that torchtitan adds, such as its train state."""
    state: dict[str, Any] = {MODEL: model, **_by_name(list(optimizers)), LR_SCHEDULER: lr_schedulers, **others}
    if dataloader is not None:
        state[DATALOADER] = LoaderEntry(dataloader)
    return state


def _by_name(optimizers: list[Any]) -> dict[str, Any]:
    """Name the optimizers of torchtitan's container, which has no state of its own: by class if there are several."""
    if len(optimizers) == 1:
        return {OPTIMIZER: optimizers[0]}
    named = {f"{OPTIMIZER}_{type(optimizer).__name__}": optimizer for optimizer in optimizers}
    if len(named) < len(optimizers):
        raise Unsupported(
            f"{len(optimizers)} optimizers of {len(named)} classes on one rank: a rank with several model parts "
            "(an interleaved pipeline schedule) cannot be saved yet; use one stage for each rank, such as schedule 1F1B"
        )
    return named


def without_excluded(state: Mapping[str, Any], excluded: Iterable[str]) -> dict[str, Any]:
    """Return the entries to load; "optimizer" excludes every optimizer, however many there are."""
    optimizers = {name for name, value in state.items() if isinstance(value, Optimizer)}
    names = set(excluded)
    unknown = sorted(names - state.keys() - {OPTIMIZER})
    if unknown:
        raise InvalidArgument(
            f"exclude_from_loading: {unknown[0]!r} is not in the state; it has {', '.join(sorted(state))}"
        )
    names |= optimizers if OPTIMIZER in names else set()
    return {name: value for name, value in state.items() if name not in names}


def joined(parts: list[nn.Module], class_name: str, config: Any) -> nn.Module:
    """Return a module with the parameters and buffers of all parts, under their canonical names.

    The parameters are those of the parts, not copies. State dict hooks of the parts are left behind: a mapping does
    their work. `config` is that of the hub's model, if there is one, for config.json.
    """
    root: nn.Module = type(class_name, (nn.Module,), {"__qualname__": f"joined.<locals>.{class_name}"})()
    for part in parts:
        persistent = part.state_dict().keys()
        for name, parameter in part.named_parameters():
            module, leaf = _module_at(root, canonical_fqn(name))
            module.register_parameter(leaf, parameter)
        for name, buffer in part.named_buffers():
            module, leaf = _module_at(root, canonical_fqn(name))
            module.register_buffer(leaf, buffer, persistent=canonical_fqn(name) in persistent)
    if config is not None:
        root.config = config
    return root


def _module_at(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, leaf = name.split(".")
    module = root
    for step in path:
        if step not in module._modules:
            module.add_module(step, nn.Module())
        module = module.get_submodule(step)
    return module, leaf


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model, on every pipeline stage. Collective."""
    own = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return {name: shape for shapes in found for name, shape in shapes.items()}


class LoaderEntry:
    """The position of a data loader. torchtitan's own state_dict would wrap it in a pickle."""

    def __init__(self, loader: Any):
        self._loader = loader
        self._reads = StatefulDataLoader if isinstance(loader, StatefulDataLoader) else type(loader)
        self._loaders = getattr(loader, "dp_world_size", None)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._reads.state_dict(self._loader), "dp_world_size": self._loaders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["dp_world_size"] != self._loaders:
            raise Mismatch(
                f"the data loader was at its position on {state['dp_world_size']} data-parallel ranks, and now there "
                f"are {self._loaders}: train on as many, or begin its data anew with "
                "--checkpoint.exclude_from_loading dataloader"
            )
        self._reads.load_state_dict(self._loader, state["position"])
