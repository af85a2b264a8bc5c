"""Names, texts and numbers that an attacker would choose are shown as texts: nothing runs, no dialog opens."""

from __future__ import annotations

import pytest

from tests.web.browser.conftest import HOSTILE_NAME
from tests.web.browser.served import Served
from tests.web.browser.window import Window, compare_route, expect, run_route, step_route
from tests.web.sample_runs import HOSTILE_KEYS

STEP = 2**53 - 1


def test_every_view_of_a_hostile_checkpoint_is_text(window: Window, site: Served) -> None:
    run = site.run_id("hostile")
    window.open(run_route(run))
    expect(window.fact("Newest")).to_contain_text("step 9007199254740991")
    window.shows("<b>loss</b>")
    window.open(step_route(run, f"step-{STEP:012d}"))
    search = window.page.get_by_role("searchbox", name="Search keys")
    for text in ("<img", "<script", "javascript", "__proto__", "etc/passwd", "xxxx", "alert"):
        search.fill(text)
        row = window.page.get_by_role("treegrid").locator("tbody tr[data-index='0']")
        expect(row).to_contain_text(text[:4])
    search.fill("")
    for name in ("<script>alert(1)</script>", "value"):
        window.section("State").locator("summary").filter(has_text=name).last.click()
    expect(window.section("State")).to_contain_text("\\u2028")
    expect(window.section("State")).to_contain_text("\\x00\\x1b[2J")
    window.section("Manifest").locator("summary").first.click()
    assert window.page.locator("main img, main script, main iframe, main b").count() == 0


@pytest.mark.full
def test_control_and_direction_characters_are_visible(window: Window, site: Served) -> None:
    window.open(step_route(site.run_id("hostile"), f"step-{STEP:012d}"))
    window.page.get_by_role("searchbox", name="Search keys").fill("gnp.exe")
    expect(window.row("gnp.exe")).to_contain_text("\\u202egnp.exe")
    assert "\u202e" not in window.page.locator("body").inner_text()


@pytest.mark.full
def test_every_hostile_tensor_opens_with_its_statistics(window: Window, site: Served) -> None:
    run = site.run_id("hostile")
    panel = window.page.get_by_role("complementary", name="The chosen tensor")
    for key in HOSTILE_KEYS[:5]:
        window.open(step_route(run, f"step-{STEP:012d}"))
        window.page.get_by_role("searchbox", name="Search keys").fill(key[:12])
        window.page.get_by_role("treegrid").locator("tbody tr.tensor").first.click()
        panel.get_by_role("button", name="Compute statistics").click()
        expect(panel.locator("dl").filter(has_text="Minimum")).to_contain_text("NaN1")
        expect(panel.get_by_text("values that are not finite")).to_be_visible()


@pytest.mark.full
def test_a_comparison_of_a_hostile_checkpoint_is_text(window: Window, site: Served) -> None:
    run = site.run_id("hostile")
    window.open(compare_route(run, STEP, STEP))
    expect(window.page.locator(".lede.big")).to_be_visible()
    window.page.get_by_label("From: run").select_option(label=HOSTILE_NAME)
    window.page.get_by_role("button", name="Compare").click()
    expect(window.section("Added")).to_contain_text("alert(1)")


@pytest.mark.full
def test_a_hostile_address_shows_no_more_than_text(window: Window) -> None:
    window.allow("status of")
    for route in (
        "#/run/<img src=x onerror=alert(1)>",
        "#/%3Cscript%3Ealert(1)%3C/script%3E",
        "#/compare?a=x&b=%00/..%2f",
        "#/run/a/step/../../x",
        "#/run/%E0%A4%A",
    ):
        window.open(route)
        window.page.reload()
        expect(window.page.locator("main")).not_to_have_text("")
        expect(window.page.locator("main .loading")).to_have_count(0)
    assert window.page.locator("main img").count() == 0


def test_the_policy_forbids_scripts_of_others(window: Window) -> None:
    window.open()
    window.allow("Content Security Policy")
    window.allow("policy violated")
    window.allow("requires 'Trusted")
    ran = window.page.evaluate(
        """() => {
          const script = document.createElement("script");
          try {
            script.textContent = "window.ran = true";
            document.head.append(script);
          } catch (error) { return error.name; }
          return String(window.ran);
        }"""
    )
    assert ran in ("undefined", "TypeError")
    markup = """() => {
      try { document.body.innerHTML = "<b>x</b>"; return "set"; } catch (error) { return error.name; }
    }"""
    assert window.page.evaluate(markup) == "TypeError"
