"""A checkpoint: its tree, a tensor and its statistics, the state beside it, verification, the layout."""

from __future__ import annotations

import pytest

from tests.web.browser.served import Served
from tests.web.browser.window import Window, expect, run_route, step_route


def test_the_tree_unfolds_to_a_tensor_that_can_be_shared(window: Window, site: Served) -> None:
    route = step_route(site.run_id("branches"), 45)
    window.open(route)
    tree = window.page.get_by_role("treegrid", name="Tensors")
    expect(tree.get_by_role("row", name="layers")).to_have_attribute("aria-expanded", "true")
    tree.get_by_role("row", name="0\u20133").click()
    expect(tree.locator("tr[aria-level='4']")).to_have_count(4)
    tree.locator("tr[aria-level='4']").nth(2).click()
    expect(tree.locator("tr[aria-level='5']").first).to_be_visible()
    tree.get_by_role("row").filter(has_text="self_attn.q_proj.weight").click()
    panel = window.page.get_by_role("complementary", name="The chosen tensor")
    expect(panel.get_by_role("heading")).to_have_text("model.layers.2.self_attn.q_proj.weight")
    expect(panel).to_contain_text("16 \u00d7 16")
    window.page.reload()
    expect(panel.get_by_role("heading")).to_have_text("model.layers.2.self_attn.q_proj.weight")


def test_statistics_are_computed_when_asked_for(window: Window, site: Served) -> None:
    window.open(step_route(site.run_id("branches"), 45) + "?group=model&key=model.embed_tokens.weight")
    panel = window.page.get_by_role("complementary", name="The chosen tensor")
    panel.get_by_role("button", name="Compute statistics").click()
    expect(panel.get_by_role("img", name="Histogram")).to_be_visible()
    assert panel.locator(".histogram .bar").count() > 10
    expect(panel.locator("dl").filter(has_text="Minimum").locator("div").filter(has_text="NaN")).to_have_text("NaN0")
    panel.get_by_text("as a table").click()
    expect(panel.get_by_role("table", name="Histogram").locator("tbody tr")).to_have_count(32)


@pytest.mark.full
def test_back_and_forward_move_between_tensors(window: Window, site: Served) -> None:
    window.open(step_route(site.run_id("branches"), 45) + "?group=model&key=model.embed_tokens.weight")
    heading = window.page.locator(".tensor-panel h3")
    expect(heading).to_have_text("model.embed_tokens.weight")
    window.page.get_by_role("searchbox", name="Search keys").fill("layers.1.mlp.up")
    window.row("model.layers.1.mlp.up_proj.weight").click()
    expect(heading).to_have_text("model.layers.1.mlp.up_proj.weight")
    window.row("model.layers.1.mlp.up_proj.weight").press("Escape")
    window.page.go_back()
    expect(heading).to_be_hidden()
    window.page.go_forward()
    expect(heading).to_have_text("model.layers.1.mlp.up_proj.weight")


@pytest.mark.full
def test_options_state_and_lineage_are_shown(window: Window, site: Served) -> None:
    window.open(step_route(site.run_id("branches"), 20))
    expect(window.section("Groups").get_by_role("row").filter(has_text="optimizer")).to_be_visible()
    window.section("Groups").get_by_text("options of optimizer").click()
    expect(window.section("Groups")).to_contain_text("weight_decay0.1")
    window.section("State").get_by_text("note").click()
    window.section("State").get_by_text("value").click()
    expect(window.section("State").get_by_text("</script>")).to_be_visible()
    expect(window.section("Lineage").get_by_role("link", name="step 10")).to_be_visible()
    expect(window.section("Lineage")).to_contain_text("Followed by")


@pytest.mark.full
def test_an_intact_step_is_verified(window: Window, site: Served) -> None:
    window.open(step_route(site.run_id("branches"), 45))
    expect(window.page.locator(".page-head")).to_contain_text("committed")
    window.page.get_by_role("button", name="Verify every byte").click()
    expect(window.page.locator(".verdict.good")).to_contain_text("every digest fits")
    expect(window.page.locator(".page-head")).to_contain_text("verified")


def test_a_flipped_byte_is_found_and_its_tensor_named(window: Window, site: Served) -> None:
    window.open(step_route(site.run_id("damaged"), 20))
    expect(window.page.get_by_role("heading", level=1)).to_be_visible()
    window.page.keyboard.press("v")
    verdict = window.page.locator(".verdict.bad")
    expect(verdict).to_contain_text("model-00001-of-00001.safetensors")
    expect(verdict).to_contain_text("model.layers.3.mlp.down_proj.weight")
    expect(window.page.locator(".page-head")).to_contain_text("damaged found by a verification")
    window.page.keyboard.press("u")
    expect(window.row("step 20")).to_contain_text("damaged")
    expect(window.fact("Attention")).to_contain_text("2 steps are damaged")
    window.row("step 20").click()
    expect(verdict).to_contain_text("model.layers.3.mlp.down_proj.weight")


def test_the_layout_follows_the_mesh(window: Window, site: Served) -> None:
    route = step_route(site.run_id("branches"), 45)
    window.open(f"{route}/layout?mesh=dp:2,tp:2&group=model&key=model.embed_tokens.weight")
    expect(window.page.get_by_role("heading", level=1, name="Layout")).to_be_visible()
    boxes = window.section("Boxes").locator(".box")
    expect(boxes.first).to_be_visible()
    expect(window.section("Restore").get_by_role("row").filter(has_text="rank 3")).to_be_visible()
    window.page.get_by_label("Mesh").fill("dp:8")
    window.page.get_by_role("button", name="Show").click()
    expect(window.section("Restore").get_by_role("row").filter(has_text="rank 7")).to_be_visible()
    window.page.get_by_label("Mesh").fill("nonsense")
    window.allow("status of")
    window.page.get_by_role("button", name="Show").click()
    expect(window.page.get_by_role("alert")).to_be_visible()
    window.page.go_back()
    expect(window.section("Restore").get_by_role("row").filter(has_text="rank 7")).to_be_visible()


@pytest.mark.full
def test_a_step_that_is_not_there_is_an_error_with_a_way_out(window: Window, site: Served) -> None:
    window.allow("status of 404")
    window.open(step_route(site.run_id("branches"), 77))
    expect(window.page.get_by_role("alert")).to_be_visible()
    window.page.get_by_role("navigation").get_by_role("link", name="branches").click()
    expect(window.fact("Newest")).to_contain_text("step 45")
    window.open("#/nowhere")
    expect(window.page.get_by_role("alert")).to_contain_text("There is no view at /nowhere.")
    window.open(run_route("0123"))
    expect(window.page.get_by_role("alert")).to_be_visible()
