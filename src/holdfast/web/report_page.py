"""A report: the page about a run as one HTML file, with the answers that it would ask a server for."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, urlencode

from holdfast.core.errors import HoldfastError, NotFound
from holdfast.web.joined_modules import join_modules
from holdfast.web.json_text import to_json
from holdfast.web.open_steps import SELF
from holdfast.web.page_api import PageApi
from holdfast.web.page_jobs import PageJob
from holdfast.web.run_records import RunRecords, StepRow
from holdfast.web.run_view import run_fields, run_summary
from holdfast.web.served_runs import ServedRoots
from holdfast.web.static_files import INDEX
from holdfast.web.step_view import step_fields, tensor_detail
from holdfast.web.tensor_changes import compare_steps, mapped_side
from holdfast.web.tree_view import TreeQuery, tree_rows

_RUNS = 20
_STEPS = 20  # with everything about them, of each run; the newest
_LEVELS = 300  # of the trees of the newest step
_TENSORS = 1000
_POINTS = 2000
_ROWS = 200  # of a level, as the page asks for them
_COMPARE_S = 60.0
_STYLE = re.compile(r'<link rel="stylesheet" href="/static/(?P<name>[a-z0-9_]+\.css)">\n?')
_SCRIPT = re.compile(r'<script type="module" src="/static/(?P<name>[a-z0-9_]+\.js)"></script>\n?')


def report_page(roots: list[str]) -> bytes:
    """Return the report of all runs under some roots; raises NotFound if there are none."""
    api = PageApi(ServedRoots(roots))
    answers = dict(_answers(api))
    if not answers["/api/runs"]["runs"]:
        raise NotFound(f"{', '.join(roots)}: no runs and no checkpoints to report on")
    return _html({name: body.decode() for name, (body, _) in api.static.items()}, answers)


def _answers(api: PageApi) -> Iterator[tuple[str, Any]]:
    """Yield addresses of the API with their answers."""
    yield "/api/about", api.about() | {"changes_allowed": False, "host": ""}
    records = [api.records(run.id) for run in api.roots.list()[:_RUNS]]
    yield "/api/runs", {"runs": [run_summary(one) for one in records]}
    for one in records:
        yield from _run_answers(api, one)
    compared = next((found for one in records if (found := _comparison(api, one)) is not None), None)
    if compared is not None:
        yield "/api/compare", compared


def _run_answers(api: PageApi, records: RunRecords) -> Iterator[tuple[str, Any]]:
    run = records.run.id
    address = f"/api/runs/{run}"
    yield address, run_fields(records)
    yield f"{address}/flights", {"flights": api.flights(run)}
    yield f"{address}/metrics", api.metrics_of(records, [], _POINTS)
    folders = [row.folder for row in _newest_first(records)] if records.run.kind != "checkpoint" else [SELF]
    for number, folder in enumerate(folders[:_STEPS]):
        try:
            opened = api.step(run, folder)[1]
            yield f"{address}/steps/{quote(folder)}", step_fields(records, opened, folder)
            if number == 0:
                yield from _tree_answers(api, run, folder)
        except HoldfastError:
            continue  # a damaged step is in the list of steps, with the reason


def _tree_answers(api: PageApi, run: str, folder: str) -> Iterator[tuple[str, Any]]:
    """Yield the levels of the trees of a step, the upper ones first, and the places of tensors."""
    opened = api.step(run, folder)[1]
    address = f"/api/runs/{run}/steps/{quote(folder)}"
    waiting = [(group, "") for group in opened.checkpoint.groups]
    levels = tensors = 0
    while waiting and levels < _LEVELS:
        group, prefix = waiting.pop(0)
        answer = {"group": group, **tree_rows(opened, group, TreeQuery(prefix=prefix, limit=_ROWS))}
        asked = {"fold": 1, "group": group, "limit": _ROWS, "offset": 0} | ({"prefix": prefix} if prefix else {})
        yield f"{address}/tree?{urlencode(sorted(asked.items()))}", answer
        levels += 1
        for row in answer["rows"]:
            if row["children"]:
                waiting.append((group, row["prefix"]))
            elif tensors < _TENSORS:
                tensors += 1
                query = urlencode({"group": group, "key": row["key"]})
                yield f"{address}/tensor?{query}", tensor_detail(opened, opened.tensor(group, row["key"]))


def _newest_first(records: RunRecords) -> list[StepRow]:
    good = [row for row in records.rows.values() if row.state == "committed"]
    return sorted(good, key=lambda row: -row.step)


def _comparison(api: PageApi, records: RunRecords) -> dict[str, Any] | None:
    """Return what the newest step changed, None if there is nothing to compare it with."""
    newest = _newest_first(records)[:2]
    if len(newest) < 2:
        return None
    run = records.run.id
    after, before = newest[0], next((row for row in newest[1:] if row.step == newest[0].parent), newest[1])
    try:
        sides = [mapped_side(api.step(run, row.folder)[1], None) for row in (before, after)]
        groups = sides[1].opened.checkpoint.groups
        group = "model" if "model" in groups else groups[0]
        result = compare_steps(PageJob("compare", _COMPARE_S), sides[0], sides[1], group)
    except (HoldfastError, IndexError):
        return None
    return {"a": {"run": run, "step": before.folder}, "b": {"run": run, "step": after.folder}, "result": result}


def _html(static: dict[str, str], answers: dict[str, Any]) -> bytes:
    """Return the page with its styles, scripts and answers inside, and a policy that names their digests."""
    page = static[INDEX]
    styles = "".join(static[match["name"]] for match in _STYLE.finditer(page))
    entry = _SCRIPT.search(page)
    if entry is None:
        raise ValueError("index.html has no script")
    script = join_modules({name: text for name, text in static.items() if name.endswith(".js")}, entry["name"])
    if "</script" in script.lower() or "</style" in styles.lower():
        raise ValueError("a script or style of the page ends its own element")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(styles)}'; "
        "img-src data:; connect-src 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"
    )
    page = _STYLE.sub("", _SCRIPT.sub("", page))
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{styles}</style>\n'
    data = f'<script type="application/json" id="holdfast-data">{to_json(answers).decode("ascii")}</script>\n'
    page = page.replace('<meta charset="utf-8">\n', f'<meta charset="utf-8">\n{head}', 1)
    return page.replace("</body>", f"{data}<script>{script}</script>\n</body>", 1).encode()


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
