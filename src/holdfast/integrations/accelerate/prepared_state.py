"""The objects that an Accelerator has prepared, as a state by name; unsupported setups are refused by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType

from holdfast.core.errors import InvalidArgument, Mismatch, Unsupported
from holdfast.integrations.accelerate.loader_position import CountedLoader, LoaderPosition
from holdfast.integrations.accelerate.skipping_loader import SkippingLoader
from holdfast.random_streams import RandomStreams

_REFUSED = {
    DistributedType.DEEPSPEED: "DeepSpeed keeps model and optimizer in an engine of its own",
    DistributedType.MEGATRON_LM: "Megatron-LM keeps model and optimizer in an engine of its own",
    DistributedType.XLA: "XLA tensors are not in the memory of this process",
}


class PreparedState:
    """The models, optimizers, schedulers, registered objects, random streams and data positions of an Accelerator."""

    def __init__(self, accelerator: Accelerator, extra: MutableMapping[str, Any] | None = None) -> None:
        refuse_unsupported(accelerator)
        self._accelerator = accelerator
        self._extra: MutableMapping[str, Any] = {} if extra is None else extra
        self._streams = RandomStreams(late=True)
        self._before_fetch = RandomStreams(late=True)
        self._loaders: list[CountedLoader] = []
        self._open: CountedLoader | None = None
        self._last = 0  # the loader that `batches` iterated last
        self._resumes: CountedLoader | None = None  # the loader amid whose epoch the state was saved
        self._restored: dict[str, Any] = {}
        self._offered: dict[str, Any] | None = None  # streams that are set already, for `batches` to set again

    # The state.

    def objects(self) -> dict[str, Any]:
        """Return the live objects by name; raises InvalidArgument before anything is prepared."""
        own = dict(self._named_objects())
        if not any(name.startswith("model") for name in own):
            raise InvalidArgument("the accelerator has no model yet: call accelerator.prepare(model, ...) first")
        taken = sorted(own.keys() & self._extra.keys())
        if taken:
            raise InvalidArgument(f"extra: {', '.join(taken)}: the plug-in uses this name itself; choose another one")
        return own | dict(self._extra)

    def _named_objects(self) -> Iterator[tuple[str, Any]]:
        accelerator = self._accelerator
        # The inner objects: schedulers refer to them, and the wrappers have nothing of their own to keep.
        optimizers = [getattr(wrapper, "optimizer", wrapper) for wrapper in accelerator._optimizers]
        schedulers = [getattr(wrapper, "scheduler", wrapper) for wrapper in accelerator._schedulers]
        yield from _numbered("model", accelerator._models)
        yield from _numbered("optimizer", optimizers)
        yield from _numbered("scheduler", schedulers)
        yield from _numbered("registered", accelerator._custom_objects)
        if accelerator.scaler is not None:
            yield "scaler", accelerator.scaler
        yield "random", self._streams
        yield "random_before_fetch", self._before_fetch
        yield "accelerate", self

    def require_saveable(self) -> None:
        """Raise where a state saved now could not be resumed exactly."""
        self.require_same_objects()
        if self._offered is not None:
            self.skip_position()
        if not self._accelerator.gradient_state.sync_gradients:
            raise InvalidArgument(
                "a save amid a gradient accumulation would lose the gradients so far: save where "
                "accelerator.sync_gradients is True"
            )
        if self._resumes is not None or self._streams.is_waiting:
            raise InvalidArgument(
                "the restored random streams and data position were not used: iterate over batches(loader) after "
                "restore, or call skip_position() in a loop of your own"
            )

    def require_same_objects(self) -> None:
        """Raise Mismatch if objects were prepared after the restore: these were not loaded."""
        if not self._restored:
            return
        late = [name for name, value in self.objects().items() if self._restored.get(name) is not value]
        late = [name for name in late if name not in self._extra]
        if late:
            raise Mismatch(
                f"{', '.join(late)}: prepared or replaced after the restore, and not loaded: call "
                "accelerator.prepare(...) and register_for_checkpointing before the restore"
            )

    # Position: the plug-in is a stateful object of the state, under the name "accelerate".

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the loaders and the counters of the accelerator."""
        return {
            "loaders": [loader.position().fields() for loader in self._counted()],
            "last": self._last,
            "step": self._accelerator.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the saved positions; raises Mismatch where they do not fit."""
        loaders = self._counted()
        if len(state["loaders"]) != len(loaders):
            raise Mismatch(f"{len(state['loaders'])} data loaders were prepared when saved, now {len(loaders)}")
        for loader, fields in zip(loaders, state["loaders"], strict=True):
            loader.go_to(LoaderPosition(**fields))
        self._last = int(state["last"])
        self._accelerator.step = int(state["step"])

    def restored(self, objects: Mapping[str, Any], state: Mapping[str, Any]) -> None:
        """Take note of a load: what was loaded, and where the first iteration begins."""
        for name in self._extra:
            self._extra[name] = state[name]
        self._restored = dict(objects)
        self._resumes = next((loader for loader in self._loaders if loader.batches), None)

    def skip_position(self) -> None:
        """Set the random streams now, and let loops of the user's own find their place in the data."""
        self._streams.apply()
        self._resumes = self._offered = None
        for loader in self._loaders:
            loader.batches = 0

    def offer_position(self) -> None:
        """Set the random streams now, as `load_state` does; a `batches` that follows still begins at the position."""
        self._offered = self._streams.state_dict()
        self._streams.apply()

    @property
    def epoch(self) -> int:
        """The epoch to begin or go on with: that of the loader that `batches` iterated last."""
        loaders = self._counted()
        return loaders[self._last].position().epoch if loaders else 0

    def _counted(self) -> list[CountedLoader]:
        live = self._accelerator._dataloaders
        self._loaders = self._loaders[: len(live)]
        for index, loader in enumerate(live):
            if index >= len(self._loaders) or self._loaders[index].loader is not loader:
                self._loaders[index:] = [CountedLoader(loader, f"data loader {index}")]
        return self._loaders

    # Iteration.

    def batches(self, loader: Any) -> Iterator[Any]:
        """Return one epoch of a loader, from the restored position on."""
        counted = next((own for own in self._counted() if own.loader is loader), None)
        if counted is None:
            raise InvalidArgument(f"{type(loader).__name__}: not a loader that accelerator.prepare returned")
        counted.require_repeatable()
        self.require_same_objects()
        if self._resumes not in (None, counted):
            assert self._resumes is not None
            raise InvalidArgument(
                f"the restored state was saved amid an epoch of {self._resumes.name}: iterate over this one first, "
                f"not {counted.name}"
            )
        return self._iterate(counted)

    def _iterate(self, counted: CountedLoader) -> Iterator[Any]:
        if self._open is not None:
            raise Unsupported(
                f"{counted.name}: iterated inside of batches() of {self._open.name}: only one loader can be resumed "
                "amid its epoch; iterate the inner one without batches()"
            )
        loader, resumes = counted.loader, self._resumes is counted
        if self._offered is not None:
            self._streams.load_state_dict(self._offered)
            self._offered = None
        counted.batches = counted.batches if resumes else 0
        self._last, self._resumes = self._loaders.index(counted), None
        if not resumes:
            self._streams.apply()
        if not resumes or not counted.position().finished:
            self._open = counted
            try:
                yield from self._fetched(counted)
            finally:
                self._open = None
        else:  # saved at the last batch: what follows the epoch in the program has not been done yet
            self._streams.apply()
            loader.iteration += 1
        counted.batches = 0

    def _fetched(self, counted: CountedLoader) -> Iterator[Any]:
        loader, base = counted.loader, counted.loader.base_dataloader
        inner = SkippingLoader(base, counted.batches, self._before_fetch, self._streams)
        loader.base_dataloader = inner
        try:
            for batch in loader:
                if not inner.opened:
                    raise Unsupported("this version of accelerate iterates its loaders otherwise than Holdfast knows")
                counted.batches += 1
                yield batch
        finally:
            loader.base_dataloader = base


def _numbered(name: str, objects: list[Any]) -> Iterator[tuple[str, Any]]:
    yield from ((name if index == 0 else f"{name}_{index}", value) for index, value in enumerate(objects))


def refuse_unsupported(accelerator: Accelerator) -> None:
    """Raise Unsupported for what keeps tensors where Holdfast does not find them."""
    if not isinstance(accelerator, Accelerator):
        raise InvalidArgument(f"accelerator={type(accelerator).__name__}: give an accelerate.Accelerator")
    kind = accelerator.distributed_type
    if kind in _REFUSED:
        raise Unsupported(f"{kind.value} is not supported: {_REFUSED[kind]}; use accelerate's own save_state")
    if kind == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise Unsupported(
            "FSDP1 flattens parameters, so that no other layout could load them: pass "
            "FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
