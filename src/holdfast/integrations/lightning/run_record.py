"""The state of a Trainer by name: its model, optimizers and schedulers, and a record of everything else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from holdfast.core.warnings import warn
from holdfast.random_streams import RandomStreams

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
_REFUSED = {
    "FSDPStrategy": "FSDP1 flattens parameters; use ModelParallelStrategy with fully_shard (FSDP2)",
    "DeepSpeedStrategy": "DeepSpeed keeps model and optimizer in an engine of its own",
    "XLAStrategy": "XLA tensors are not in the memory of this process",
    "SingleDeviceXLAStrategy": "XLA tensors are not in the memory of this process",
    "XLAFSDPStrategy": "XLA tensors are not in the memory of this process",
}
_ELSEWHERE = ("state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "hparams_name", "hparams_type")
# Keys of Lightning's checkpoint that have another place: entries of their own, and files of the checkpoint.


class RunRecord:
    """A stateful object for what is neither model, optimizer nor scheduler: loops, callbacks, position, metrics."""

    def __init__(self) -> None:
        self.content: Mapping[str, Any] = {}  # that was loaded
        self.capture: Callable[[], Mapping[str, Any]] | None = None  # asked only if a save happens

    def state_dict(self) -> Mapping[str, Any]:
        return self.content if self.capture is None else self.capture()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.content = state

    def holdfast_reshard(self, states: Mapping[tuple[int, ...], Any], rank: int, world: int) -> Any:
        """Return the record of the first rank, without the metrics that each rank had of its own."""
        record = dict(states[min(states)])
        if record.get("metrics"):
            record["metrics"] = dict(record["metrics"]) | {"results": {}, "torchmetrics": {}}
            if rank == 0 and record.get("is_amid"):
                warn("restored on another mesh amid an epoch: the means logged of this epoch begin here")
        return record


class ElsewhereDict(dict[str, Any]):
    """Stands for the weights in Lightning's dictionary of a checkpoint; they are saved from the live model instead."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise Unsupported(
            'checkpoint["state_dict"] is used by a hook (on_save_checkpoint or on_load_checkpoint of the module or a '
            "callback), and Holdfast saves and loads the live model itself: remove the hook, or override state_dict"
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = __contains__ = _refuse
    keys = values = items = get = pop = update = copy = setdefault = popitem = clear = _refuse


def require_strategy(strategy: Any) -> None:
    """Raise Unsupported for a strategy that keeps tensors where Holdfast does not find them."""
    names = [kind.__name__ for kind in type(strategy).__mro__]
    for name in names:
        if name in _REFUSED:
            raise Unsupported(f"the strategy {names[0]} is not supported: {_REFUSED[name]}")
    if not set(names) & set(_STRATEGIES):
        raise Unsupported(f"the strategy {names[0]} is not supported; {', '.join(_STRATEGIES)} are")


def live_objects(
    trainer: Any,
    record: RunRecord,
    streams: RandomStreams,
    extra: MutableMapping[str, Any],
    model: Callable[[Any], Any] | None,
) -> dict[str, Any]:
    """Return the state of a Trainer by name."""
    optimizers = [getattr(optimizer, "_optimizer", optimizer) for optimizer in trainer.strategy.optimizers]
    own: dict[str, Any] = {"model": saved_model(trainer, model)}
    own.update(_numbered("optimizer", optimizers))
    own.update(_numbered("scheduler", [config.scheduler for config in trainer.lr_scheduler_configs]))
    own.update({"lightning": record, "random": streams})
    taken = sorted(own.keys() & extra.keys())
    if taken:
        raise InvalidArgument(f"extra: {', '.join(taken)}: the plug-in uses this name itself; choose another one")
    return own | dict(extra)


def saved_model(trainer: Any, model: Callable[[Any], Any] | None) -> Any:
    """Return the module to save: the LightningModule, or the part of it that `model=` names, if this is all of it."""
    module = trainer.lightning_module
    if model is None:
        return module
    inner = model(module)
    known = {id(tensor) for tensor in inner.state_dict(keep_vars=True).values()}
    left = [key for key, tensor in module.state_dict(keep_vars=True).items() if id(tensor) not in known]
    if left:
        raise InvalidArgument(f"model=: {', '.join(left[:5])} of the LightningModule are not in it, and would be lost")
    return inner


def _numbered(name: str, objects: list[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name if index == 0 else f"{name}_{index}", value) for index, value in enumerate(objects))


def lightning_checkpoint(trainer: Any) -> dict[str, Any]:
    """Return Lightning's dictionary of a checkpoint without the tensors of model and optimizers."""
    weights = ElsewhereDict()
    with _bound(trainer.strategy, lightning_module_state_dict=lambda: weights, optimizer_state=lambda optimizer: {}):
        content = trainer._checkpoint_connector.dump_checkpoint(False)
    if content.get("state_dict") is not weights:
        raise Unsupported(
            'a hook on_save_checkpoint replaces checkpoint["state_dict"] (Lightning\'s WeightAveraging does): Holdfast '
            "saves the live model; for averages use holdfast.EMA through extra="
        )
    return {name: value for name, value in content.items() if name not in _ELSEWHERE}


def restore_parts(trainer: Any, content: Mapping[str, Any]) -> None:
    """Let Lightning restore loops, callbacks, datamodule and precision from its dictionary."""
    connector = trainer._checkpoint_connector
    loaded = dict(content) | {"state_dict": ElsewhereDict()}
    connector._loaded_checkpoint = loaded
    trainer.lightning_module.on_load_checkpoint(loaded)
    connector.restore_datamodule()
    connector.restore_callbacks()
    connector.restore_precision_plugin_state()
    connector.restore_loops()
    connector._loaded_checkpoint = {}


def require_loaded(trainer: Any, loaded: Mapping[str, Any] | None, step: int) -> None:
    """Raise Mismatch at the first step unless what trains is what was loaded."""
    if loaded is None:
        raise Mismatch("ckpt_path was given and nothing of it was loaded: this version of Lightning is not known")
    live = {id(getattr(optimizer, "_optimizer", optimizer)) for optimizer in trainer.strategy.optimizers}
    optimizers = {id(value) for name, value in loaded.items() if name.partition("_")[0] == "optimizer"}
    if live != optimizers or trainer.global_step != step:
        raise Mismatch(
            f"the run goes on at step {trainer.global_step} with {len(live)} optimizers; loaded were step {step} and "
            f"{len(optimizers)} optimizers, {len(live & optimizers)} of them these"
        )


@contextmanager
def _bound(owner: Any, **methods: Any) -> Iterator[None]:
    """Bind methods on an instance for a while."""
    before = {name: vars(owner)[name] for name in methods if name in vars(owner)}
    vars(owner).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(owner)[name]
        vars(owner).update(before)
