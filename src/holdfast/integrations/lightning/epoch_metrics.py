"""The metrics of an epoch so far: Lightning's own checkpoints forget them, and log other means after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.core.warnings import warn


def epoch_metrics(trainer: Any, *, is_amid: bool) -> dict[str, Any]:
    """Return the running means of `self.log`, the states of torchmetrics, and the last values that were logged."""
    connector = trainer._logger_connector
    return {
        "results": _results(trainer.fit_loop.epoch_loop._results) if is_amid else {},
        "torchmetrics": {path: _metric_state(metric) for path, metric in _torchmetrics(trainer.lightning_module)},
        "callback": _numbers(connector._callback_metrics),
        "logged": _numbers(connector._logged_metrics),
    }


def restore_epoch_metrics(trainer: Any, saved: Mapping[str, Any]) -> RestoredMeans:
    """Go on with the metrics of a checkpoint; return the means that wait to be logged again."""
    connector = trainer._logger_connector
    device = trainer.strategy.root_device
    connector._callback_metrics.update({name: _tensor(value, device) for name, value in saved["callback"].items()})
    connector._logged_metrics.update({name: _tensor(value, device) for name, value in saved["logged"].items()})
    for path, metric in _torchmetrics(trainer.lightning_module):
        if path in saved["torchmetrics"]:
            _restore_metric(metric, saved["torchmetrics"][path])
    if saved["results"]:
        connector._first_loop_iter = False  # the first batch of an epoch would begin the means anew
    return RestoredMeans(trainer, saved["results"])


class RestoredMeans:
    """Puts back a running mean once the program logs it again: only then does Lightning have a place for it."""

    def __init__(self, trainer: Any, saved: Mapping[str, Any]) -> None:
        self._waiting = dict(saved)
        self._results = trainer.fit_loop.epoch_loop._results
        self._update = self._results.update_metrics
        self._results.update_metrics = self.update_metrics

    def update_metrics(self, key: str, value: Any, batch_size: int) -> None:
        """Take the place of the method of Lightning's results."""
        saved = self._waiting.pop(key, None)
        if saved is not None:
            metric = self._results[key]
            for name, state in saved.items():
                setattr(metric, name, _tensor(state, getattr(metric, name).device))
        self._update(key, value, batch_size)

    def end_epoch(self) -> None:
        """Warn of means that were not logged again in the epoch."""
        if self._waiting:
            warn(
                f"{', '.join(sorted(self._waiting))}: logged before the restart and not again in its epoch: the value "
                "of the epoch is not logged"
            )
        self._waiting.clear()


def _numbers(metrics: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return scalars as plain values: tensors that come and go would make each save plan anew."""
    return {name: _number(value) for name, value in metrics.items() if torch.is_tensor(value) and value.numel() == 1}


def _number(value: Any) -> list[Any]:
    return [value.item(), value.dtype]


def _tensor(saved: list[Any], device: Any) -> torch.Tensor:
    value, dtype = saved
    return torch.tensor(value, dtype=dtype, device=device)


def _results(results: Mapping[str, Any]) -> dict[str, dict[str, list[Any]]]:
    return {
        key: {name: _number(torch.as_tensor(getattr(metric, name))) for name in metric._defaults}
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }


def _torchmetrics(module: Any) -> Iterator[tuple[str, Any]]:
    from torchmetrics import Metric

    yield from ((path, part) for path, part in module.named_modules() if isinstance(part, Metric))


def _metric_state(metric: Any) -> dict[str, Any]:
    return {"states": metric._copy_state_dict(), "updates": metric._update_count}


def _restore_metric(metric: Any, saved: Mapping[str, Any]) -> None:
    for name, state in saved["states"].items():
        parts = state if isinstance(state, list) else [state]
        moved = [part.to(metric.device) if torch.is_tensor(part) else part for part in parts]
        setattr(metric, name, moved if isinstance(state, list) else moved[0])
    metric._update_count = saved["updates"]
    metric._computed = None
