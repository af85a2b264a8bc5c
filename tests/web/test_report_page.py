"""Reports: one file with everything inside, a policy that allows nothing else, and hostile names inert."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from holdfast.core.errors import NotFound
from holdfast.web.report_page import report_page
from tests.web.sample_runs import HOSTILE_KEYS


class Elements(HTMLParser):
    """The elements of a page with their attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.is_ended = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.is_ended = False
        self.found.append([tag, dict(attrs), ""])

    def handle_data(self, data):
        if self.found and not self.is_ended:
            self.found[-1][2] += data

    def handle_endtag(self, tag):
        self.is_ended = True

    def all(self, tag):
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


@pytest.fixture(scope="module")
def page(samples):
    return report_page([str(samples)]).decode()


def test_everything_is_inside_and_named_by_the_policy(page):
    elements = Elements(page)
    for tag in ("script", "link", "img", "iframe", "object", "style"):
        for attrs, _ in elements.all(tag):
            address = attrs.get("src") or attrs.get("href") or ""
            assert not address or address.startswith("data:"), address
    ((policy, _),) = [one for one in elements.all("meta") if one[0].get("http-equiv") == "Content-Security-Policy"]
    assert "connect-src 'none'" in policy["content"]
    assert "unsafe" not in policy["content"]
    scripts = [text for attrs, text in elements.all("script") if attrs.get("type") != "application/json"]
    for text in [*scripts, *(text for _, text in elements.all("style"))]:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy["content"]
    assert len(scripts) == 1
    assert not re.search(r"""\son[a-z]+\s*=\s*["']""", re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL))


def test_the_answers_are_those_of_the_server(page, server):
    (data,) = [text for attrs, text in Elements(page).all("script") if attrs.get("id") == "holdfast-data"]
    assert not set(data) & set("<>&")
    answers = json.loads(data)
    runs = answers["/api/runs"]["runs"]
    assert [run["name"] for run in runs] == ["branches", "damaged", "hostile", "light"]
    run = server.run_id("branches")
    assert answers[f"/api/runs/{run}"]["steps"] == server.get(f"/api/runs/{run}")["steps"]
    step = f"/api/runs/{run}/steps/step-000000000045"
    query = "fold=1&group=model&limit=200&offset=0&prefix=model.layers"
    assert answers[f"{step}/tree?{query}"] == server.get(f"{step}/tree?{query}")
    assert answers["/api/compare"]["a"]["step"] == "step-000000000035"
    assert answers["/api/compare"]["result"]["changed"] == 6


def test_hostile_names_stay_data(page):
    outside = page.replace(
        next(text for attrs, text in Elements(page).all("script") if attrs.get("id") == "holdfast-data"), ""
    )
    assert "onerror=alert(1)" not in outside
    assert json.dumps(HOSTILE_KEYS[0])[1:-1].replace("<", "\\u003c").replace(">", "\\u003e") in page


def test_a_folder_without_anything_has_no_steps(tmp_path):
    assert b'"steps":0' in report_page([str(tmp_path)])
    with pytest.raises(NotFound):
        report_page([str(tmp_path / "nothing")])
