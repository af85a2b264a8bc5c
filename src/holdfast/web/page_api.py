"""The page's addresses and their answers: static files, runs, steps, tensors, jobs, changes, events."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.version import __version__
from holdfast.web.http_request import BadRequest, HttpRequest
from holdfast.web.http_response import HttpResponse
from holdfast.web.open_steps import OpenStep, OpenSteps
from holdfast.web.page_workers import PageWorkers
from holdfast.web.run_records import RunRecords
from holdfast.web.run_view import FlightWatch, run_fields, run_summary
from holdfast.web.served_runs import ServedRoots
from holdfast.web.static_files import INDEX, read_static
from holdfast.web.step_view import step_fields, tensor_detail
from holdfast.web.tree_view import TreeQuery, tree_rows

_RUNS = 16  # whose records stay in memory
_MOST_ROWS = 1000
_MOST_POINTS = 20_000

Handler = Callable[[HttpRequest, tuple[str, ...]], Any]


class PageApi:
    """The application that an HttpServer serves. Thread-safe."""

    def __init__(self, roots: ServedRoots, *, allow_changes: bool = False, host: str = "127.0.0.1") -> None:
        self._roots = roots
        self._allow_changes = allow_changes
        self._host = host
        self._static = read_static()
        self._lock = threading.Lock()
        self._records: OrderedDict[str, RunRecords] = OrderedDict()
        self._flights: OrderedDict[str, FlightWatch] = OrderedDict()
        self.steps = OpenSteps()

    def at_once(self, request: HttpRequest) -> HttpResponse | None:
        """Answer with a file of the page."""
        name = INDEX if request.path == ("",) else None
        if len(request.path) == 2 and request.path[0] == "static":
            name = request.path[1]
        if name is None:
            return None
        if request.method not in ("GET", "HEAD"):
            raise BadRequest(405, "files can only be read")
        if name not in self._static:
            return HttpResponse.problem(404, "NotFound", "there is no such file")
        body, content_type = self._static[name]
        return HttpResponse(200, body, content_type)

    def stream(self, request: HttpRequest, workers: PageWorkers) -> AsyncIterator[bytes] | None:
        """Return the events of a run."""
        return None

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a request of the API."""
        match request.method, request.path:
            case "GET" | "HEAD", ("api", "about"):
                return HttpResponse.of(self.about())
            case "GET" | "HEAD", ("api", "runs"):
                return HttpResponse.of(self.runs())
            case "GET" | "HEAD", ("api", "runs", run):
                return HttpResponse.of(run_fields(self.records(run)))
            case "GET" | "HEAD", ("api", "runs", run, "flights"):
                return HttpResponse.of({"flights": self.flights(run)})
            case "GET" | "HEAD", ("api", "runs", run, "metrics"):
                return HttpResponse.of(self.metrics(run, request))
            case "GET" | "HEAD", ("api", "runs", run, "steps", step):
                records, opened = self.step(run, step)
                return HttpResponse.of(step_fields(records, opened, step))
            case "GET" | "HEAD", ("api", "runs", run, "steps", step, "tree"):
                return HttpResponse.of(self.tree(run, step, request))
            case "GET" | "HEAD", ("api", "runs", run, "steps", step, "tensor"):
                _, opened = self.step(run, step)
                tensor = opened.tensor(_required(request, "group"), _required(request, "key"))
                return HttpResponse.of(tensor_detail(opened, tensor))
        raise NotFound("the page has no such address")

    def about(self) -> dict[str, Any]:
        """Return what the server is."""
        return {
            "version": __version__,
            "changes_allowed": self._allow_changes,
            "host": os.uname().nodename,
            "roots": self._roots.given,
        }

    def runs(self) -> dict[str, Any]:
        """Return the list of runs."""
        return {"runs": [run_summary(self.records(run.id)) for run in self._roots.list()]}

    def records(self, run_id: str) -> RunRecords:
        """Return an up-to-date run."""
        run = self._roots.get(run_id)
        with self._lock:
            records = self._records.get(run_id)
            if records is None:
                records = self._records[run_id] = RunRecords(run, self._roots)
                while len(self._records) > _RUNS:
                    self._records.popitem(last=False)
            self._records.move_to_end(run_id)
        records.refresh()
        return records

    def flights(self, run_id: str) -> list[dict[str, Any]]:
        """Return the saves in flight of a run."""
        run = self._roots.get(run_id)
        if run.kind == "checkpoint":
            return []
        with self._lock:
            watch = self._flights.setdefault(run_id, FlightWatch(run.storage))
            while len(self._flights) > _RUNS:
                self._flights.popitem(last=False)
        return watch.fields()

    def metrics(self, run_id: str, request: HttpRequest) -> dict[str, Any]:
        """Return metrics of a run's file, or else those that were saved with its steps."""
        records = self.records(run_id)
        names = [name for name in request.query.get("names", "").split(",") if name]
        points = _number(request, "points", 2000, _MOST_POINTS)
        with records.lock:
            if records.metrics.columns or records.metrics.marks:
                return records.metrics.fields(names, points)
            curves = records.saved_metrics()
            return {
                "names": {name: curves[name].fields(points) for name in names or curves if name in curves},
                "all_names": list(curves),
                "marks": [],
            }

    def step(self, run_id: str, step: str) -> tuple[RunRecords, OpenStep]:
        """Return a run and one of its checkpoints, open."""
        records = self.records(run_id)
        return records, self.steps.get(records, step)

    def tree(self, run_id: str, step: str, request: HttpRequest) -> dict[str, Any]:
        """Return rows of the tree of a group's tensors."""
        _, opened = self.step(run_id, step)
        groups = opened.checkpoint.groups
        group = request.query.get("group") or ("model" if "model" in groups else next(iter(groups), ""))
        query = TreeQuery(
            prefix=request.query.get("prefix", ""),
            text=request.query.get("filter", ""),
            fold=request.query.get("fold", "1") != "0",
            offset=_number(request, "offset", 0, 2**31),
            limit=_number(request, "limit", 200, _MOST_ROWS),
        )
        return {"group": group, **tree_rows(opened, group, query)}


def _required(request: HttpRequest, name: str) -> str:
    value = request.query.get(name)
    if value is None:
        raise InvalidArgument(f"the address needs {name}=...")
    return value


def _number(request: HttpRequest, name: str, default: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise InvalidArgument(f"{name} is not a whole number")
    return min(int(text), most)
