"""The page's addresses and their answers: static files, runs, steps, tensors, jobs, changes, events."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.format import strictjson
from holdfast.version import __version__
from holdfast.web.http_request import BadRequest, HttpRequest
from holdfast.web.http_response import HttpResponse
from holdfast.web.known_runs import KnownRuns
from holdfast.web.layout_view import default_key, layout_fields, mesh_text
from holdfast.web.open_steps import OpenStep, OpenSteps
from holdfast.web.page_changes import collect_garbage, tag_step, untag_step
from holdfast.web.page_jobs import JobTable, PageJob
from holdfast.web.page_stream import RunFollower, run_events
from holdfast.web.page_workers import PageWorkers
from holdfast.web.run_records import RunRecords
from holdfast.web.run_view import layout_axes, run_fields
from holdfast.web.served_runs import ServedRoots
from holdfast.web.static_files import INDEX, read_static
from holdfast.web.step_view import step_fields, tensor_detail
from holdfast.web.tensor_changes import compare_steps, mapped_side, mapping_names
from holdfast.web.tensor_statistics import MOST_KEYS, statistics
from holdfast.web.tree_view import TreeQuery, tree_rows
from holdfast.web.verify_job import verify_step

_MOST_ROWS = 1000
_MOST_POINTS = 20_000
_STATISTICS_S, _COMPARE_S, _VERIFY_S, _GC_S = 120.0, 600.0, 3600.0, 3600.0


class PageApi:
    """The application that an HttpServer serves. Thread-safe."""

    def __init__(self, roots: ServedRoots, *, allow_changes: bool = False, host: str = "127.0.0.1") -> None:
        self.roots = roots
        self._allow_changes = allow_changes
        self._host = host
        self.static = read_static()
        self._known = KnownRuns(roots)
        self.steps = OpenSteps()
        self.jobs = JobTable()

    def at_once(self, request: HttpRequest) -> HttpResponse | None:
        """Answer with a file of the page."""
        name = INDEX if request.path == ("",) else None
        if len(request.path) == 2 and request.path[0] == "static":
            name = request.path[1]
        if name is None:
            return None
        if request.method not in ("GET", "HEAD"):
            raise BadRequest(405, "files can only be read")
        if name not in self.static:
            return HttpResponse.problem(404, "NotFound", "there is no such file")
        body, content_type = self.static[name]
        return HttpResponse(200, body, content_type)

    def stream(self, request: HttpRequest, workers: PageWorkers) -> AsyncIterator[bytes] | None:
        """Return the events of a run."""
        match request.path:
            case ("api", "runs", run, "stream"):
                return run_events(lambda: RunFollower(self.records(run), lambda: self.flights(run)), workers)
        return None

    def answer(self, request: HttpRequest) -> HttpResponse:
        """Answer a request of the API."""
        if request.method in ("GET", "HEAD"):
            return HttpResponse.of(self._read(request))
        return HttpResponse.of(self._start(request, _body(request)))

    def _read(self, request: HttpRequest) -> Any:
        match request.path:
            case ("api", "about"):
                return self.about()
            case ("api", "runs"):
                return self.runs()
            case ("api", "runs", run):
                return run_fields(self.records(run))
            case ("api", "runs", run, "flights"):
                return {"flights": self.flights(run)}
            case ("api", "runs", run, "metrics"):
                return self.metrics(run, request)
            case ("api", "runs", run, "steps", step):
                records, opened = self.step(run, step)
                return step_fields(records, opened, step)
            case ("api", "runs", run, "steps", step, "tree"):
                return self.tree(run, step, request)
            case ("api", "runs", run, "steps", step, "tensor"):
                opened = self.step(run, step)[1]
                return tensor_detail(opened, opened.tensor(_required(request, "group"), _required(request, "key")))
            case ("api", "runs", run, "steps", step, "layout"):
                return self.layout(run, step, request)
            case ("api", "jobs", job):
                return self.jobs.get(job).fields()
        raise NotFound("the page has no such address")

    def _start(self, request: HttpRequest, body: dict[str, Any]) -> Any:
        match request.method, request.path:
            case "POST", ("api", "runs", run, "steps", step, "statistics"):
                return _started(self.statistics(run, step, body))
            case "POST", ("api", "runs", run, "steps", step, "verify"):
                return _started(self.verify(run, step))
            case "POST", ("api", "compare"):
                return _started(self.compare(body))
            case "DELETE", ("api", "jobs", job):
                self.jobs.get(job).cancel()
                return self.jobs.get(job).fields()
            case "POST", ("api", "runs", run, "steps", step, "tag"):
                self._require_changes()
                return tag_step(self.records(run), step, _text(body, "name"))
            case "DELETE", ("api", "runs", run, "steps", step, "tag"):
                self._require_changes()
                return untag_step(self.records(run), step, _text(body, "name"))
            case "POST", ("api", "runs", run, "gc"):
                self._require_changes()
                return _started(self.gc(run, body))
        raise NotFound("the page has no such address for this method")

    def _require_changes(self) -> None:
        if not self._allow_changes:
            raise BadRequest(403, "this page changes nothing; start it with `holdfast serve --allow-changes`")

    def about(self) -> dict[str, Any]:
        """Return what the server is."""
        return {
            "version": __version__,
            "changes_allowed": self._allow_changes,
            "host": os.uname().nodename,
            "roots": self.roots.given,
            "mappings": mapping_names(),
        }

    def runs(self) -> dict[str, Any]:
        """Return the list of runs."""
        return {"runs": self._known.summaries()}

    def records(self, run_id: str) -> RunRecords:
        """Return an up-to-date run."""
        return self._known.records(run_id)

    def flights(self, run_id: str) -> list[dict[str, Any]]:
        """Return the saves in flight of a run."""
        return self._known.flights(run_id)

    def metrics(self, run_id: str, request: HttpRequest) -> dict[str, Any]:
        """Return the metrics that a request names: those of the run's file, or else those saved with its steps."""
        names = [name for name in request.query.get("names", "").split(",") if name]
        return self.metrics_of(self.records(run_id), names, _number(request, "points", 2000, _MOST_POINTS))

    def metrics_of(self, records: RunRecords, names: list[str], points: int) -> dict[str, Any]:
        """Return some metrics of a run, or all without names."""
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
        group = request.query.get("group") or _first_group(opened)
        query = TreeQuery(
            prefix=request.query.get("prefix", ""),
            text=request.query.get("filter", ""),
            fold=request.query.get("fold", "1") != "0",
            offset=_number(request, "offset", 0, 2**31),
            limit=_number(request, "limit", 200, _MOST_ROWS),
        )
        return {"group": group, **tree_rows(opened, group, query)}

    def layout(self, run_id: str, step: str, request: HttpRequest) -> dict[str, Any]:
        """Return who holds, writes and reads a tensor under a mesh."""
        _, opened = self.step(run_id, step)
        group = request.query.get("group") or _first_group(opened)
        key = request.query.get("key") or default_key(opened, group)
        mesh = request.query.get("mesh") or mesh_text(layout_axes(opened.checkpoint.manifest.writer))
        return {"group": group, "key": key, **layout_fields(opened, group, key, mesh)}

    def statistics(self, run_id: str, step: str, body: dict[str, Any]) -> PageJob:
        """Start statistics of some tensors."""
        keys = body.get("keys")
        if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
            raise InvalidArgument("give keys: a list of the keys of tensors")
        if len(keys) > MOST_KEYS:
            raise InvalidArgument(f"{len(keys)} keys are too many: at most {MOST_KEYS} at a time")
        _, opened = self.step(run_id, step)
        group = _text(body, "group", _first_group(opened))
        for key in keys:
            opened.tensor(group, key)
        return self.jobs.start("statistics", _STATISTICS_S, lambda job: statistics(job, opened, group, keys))

    def verify(self, run_id: str, step: str) -> PageJob:
        """Start the verification of a checkpoint."""
        records, opened = self.step(run_id, step)
        return self.jobs.start("verify", _VERIFY_S, lambda job: verify_step(job, records, opened))

    def compare(self, body: dict[str, Any]) -> PageJob:
        """Start a comparison; a mapping, if any, gives the second checkpoint the names of the first."""
        sides = []
        for name in ("a", "b"):
            side = body.get(name)
            if not isinstance(side, dict):
                raise InvalidArgument(f"give {name}: a run and a step")
            sides.append(self.step(_text(side, "run"), _text(side, "step"))[1])
        mapping = body.get("mapping")
        if mapping is not None and not isinstance(mapping, str):
            raise InvalidArgument("mapping is the name of a built-in mapping, or null")
        group = _text(body, "group", _first_group(sides[0]))

        def work(job: PageJob) -> dict[str, Any]:
            return compare_steps(job, mapped_side(sides[0], None), mapped_side(sides[1], mapping or None), group)

        return self.jobs.start("compare", _COMPARE_S, work)

    def gc(self, run_id: str, body: dict[str, Any]) -> PageJob:
        """Start the deletion of exactly the steps that the page showed."""
        folders = body.get("folders")
        if body.get("confirm") is not True:
            raise InvalidArgument("nothing is deleted without confirm: true")
        if not isinstance(folders, list) or not all(isinstance(folder, str) for folder in folders) or not folders:
            raise InvalidArgument("give folders: those that the preview shows")
        records = self.records(run_id)
        return self.jobs.start("gc", _GC_S, lambda job: collect_garbage(job, records, folders))


def _first_group(opened: OpenStep) -> str:
    groups = opened.checkpoint.groups
    return "model" if "model" in groups else next(iter(groups), "")


def _started(job: PageJob) -> dict[str, str]:
    return {"job": job.id}


def _body(request: HttpRequest) -> dict[str, Any]:
    """Return the JSON object of a request's body, empty without one."""
    if not request.body:
        return {}
    value = strictjson.loads(request.body, "the body of the request")
    if not isinstance(value, dict):
        raise InvalidArgument("the body of the request is not a JSON object")
    return value


def _text(fields: dict[str, Any], name: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if value is None or value == "":
        value = default
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is missing, or not a text")
    return value


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
