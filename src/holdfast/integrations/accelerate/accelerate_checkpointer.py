"""`AccelerateCheckpointer`: saves and restores what an Accelerator prepared, and counts its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Self

from accelerate import Accelerator

from holdfast.checkpointer import Checkpointer
from holdfast.engine.extra_files import ExtraFiles
from holdfast.engine.save_handle import SaveHandle
from holdfast.integrations.accelerate.prepared_state import PreparedState


class AccelerateCheckpointer:
    """The checkpoints of a training loop with accelerate. Every process creates one with the same root.

        ck = AccelerateCheckpointer(accelerator, "runs/a", keep=holdfast.keep.last(3))
        step = ck.restore() or 0
        for epoch in range(ck.epoch, epochs):
            for batch in ck.batches(loader):
                ...
                step += 1
                if step % 500 == 0:
                    ck.save(step)

    The state is what `accelerator.prepare` and `register_for_checkpointing` were given, the gradient scaler, the
    random streams, and the position in the data. `extra` adds entries by name, as in `holdfast.save`.
    `options` are those of `holdfast.Checkpointer`, which is at hand as `checkpointer`.
    """

    def __init__(
        self, accelerator: Accelerator, root: Any, *, extra: MutableMapping[str, Any] | None = None, **options: Any
    ) -> None:
        self._prepared = PreparedState(accelerator, extra)
        self.checkpointer = Checkpointer(root, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def epoch(self) -> int:
        """The epoch to begin or go on with."""
        return self._prepared.epoch

    def restore(self, *, step: int | None = None, **options: Any) -> int | None:
        """Load the newest good checkpoint, or that of `step`; return its step, None if none exists.

        Call it after `accelerator.prepare`. `options` are those of `holdfast.Checkpointer.restore`. The random
        streams are set and batches are skipped by the first `batches`.
        """
        objects = self._prepared.objects()
        state = dict(objects)
        found = self.checkpointer.restore(state, step=step, **options)
        if found is not None:
            self._prepared.restored(objects, state)
        return found

    def batches(self, loader: Any) -> Iterator[Any]:
        """Iterate over one epoch of a prepared loader; after a restore from the saved batch on.

        The order of the loader must depend on the epoch alone: a shuffling one needs
        `DataLoaderConfiguration(use_seedable_sampler=True)`. A step that was saved at the last batch of an epoch
        resumes with no batch left, so that what follows the epoch in the loop is done.
        """
        return self._prepared.batches(loader)

    def skip_position(self) -> None:
        """After a restore: set the random streams now. For loops that do not use `batches`, as with iterable data."""
        self._prepared.skip_position()

    def save(
        self, step: int, *, metrics: Mapping[str, Any] | None = None, files: ExtraFiles | None = None
    ) -> SaveHandle:
        """Save everything as `step`, in the background; see `holdfast.Checkpointer.save`."""
        self._prepared.require_saveable()
        return self.checkpointer.save(step, self._prepared.objects(), metrics=metrics, files=files)

    def save_if_due(
        self, step: int, *, metrics: Mapping[str, Any] | None = None, files: ExtraFiles | None = None
    ) -> SaveHandle | None:
        """Save if an occasion of `when=` is due; call it after every optimizer step."""
        self._prepared.require_saveable()
        return self.checkpointer.save_if_due(step, self._prepared.objects(), metrics=metrics, files=files)

    def finish(self, timeout: float | None = None) -> bool:
        """Wait for the save in flight; return False after `timeout` seconds."""
        return self.checkpointer.finish(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Finish the save in flight and release the writer."""
        self.checkpointer.close(timeout)
