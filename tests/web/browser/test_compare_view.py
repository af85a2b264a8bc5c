"""Two checkpoints: the heat map, exact differences, what is only in one, a hub folder through a mapping."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from tests.web import sample_runs
from tests.web.browser.served import Served, served
from tests.web.browser.window import Window, compare_route, expect


def test_the_layers_that_changed_are_named_first(window: Window, site: Served) -> None:
    window.open(compare_route(site.run_id("branches"), 35, 45))
    expect(window.page.locator(".lede.big")).to_contain_text("Changed most: layer 3")
    facts = window.page.locator(".comparison .facts")
    expect(facts).to_contain_text("Changed")
    chart = window.page.locator(".heat-scroll")
    readout = window.section("Layers").locator(".readout")
    chart.focus()
    window.page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("layer 0")
    expect(readout).to_contain_text("unchanged")
    for _ in range(3):
        window.page.keyboard.press("ArrowRight")
    expect(readout).to_contain_text("layer 3")
    expect(readout).to_contain_text("%")
    window.section("Layers").get_by_text("as a table").click()
    expect(window.section("Layers").locator("tbody tr").first).to_contain_text("3")


@pytest.mark.full
def test_equal_steps_are_said_to_be_equal(window: Window, site: Served) -> None:
    run = site.run_id("branches")
    window.open(compare_route(run, 45, 45))
    expect(window.page.locator(".lede.big")).to_contain_text("Nothing changed: 13 tensors are equal bit for bit.")


@pytest.mark.full
def test_the_fields_choose_other_steps(window: Window, site: Served) -> None:
    run = site.run_id("branches")
    window.open(compare_route(run, 35, 45))
    expect(window.page.locator(".lede.big")).to_be_visible()
    window.page.get_by_label("From: step").select_option("step-000000000010")
    window.page.get_by_role("button", name="Compare").click()
    expect(window.page.get_by_text("From step 10 to step 45.")).to_be_visible()
    expect(window.section("State")).to_contain_text("weigh")
    window.page.go_back()
    expect(window.page.get_by_text("From step 35 to step 45.")).to_be_visible()


@pytest.mark.full
def test_a_hub_folder_is_compared_through_a_mapping(opening, tmp_path: Path) -> None:
    """The step has fused keys, the hub folder separate ones; only the output of layer 1's attention differs."""
    random = np.random.default_rng(0)
    parts = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    hub = {
        f"model.layers.{layer}.{part}.weight": random.normal(size=(8, 8)).astype(np.float32)
        for layer in (0, 1)
        for part in parts
    }
    write_hub_folder(tmp_path / "hub", hub)
    fused = {}
    for layer in (0, 1):
        weights = {part: hub[f"model.layers.{layer}.{part}.weight"] for part in parts}
        fused[f"model.layers.{layer}.self_attn.qkv_proj.weight"] = np.concatenate([weights[part] for part in parts[:3]])
        fused[f"model.layers.{layer}.mlp.gate_up_proj.weight"] = np.concatenate([weights[part] for part in parts[4:6]])
        fused[f"model.layers.{layer}.self_attn.o_proj.weight"] = weights[parts[3]] * (1 + layer / 100)
        fused[f"model.layers.{layer}.mlp.down_proj.weight"] = weights[parts[6]]
    sample_runs.write_step(tmp_path / "run", 10, {"model": fused})
    with served(tmp_path / "run", tmp_path / "hub") as server, opening(server.address) as window:
        a, b = f"{server.run_id('run')}/step-000000000010", f"{server.run_id('hub')}/self"
        window.open(f"#/compare?a={quote(a, safe='')}&b={quote(b, safe='')}")
        expect(window.section("Added")).to_contain_text("self_attn.q_proj")
        window.page.get_by_label("Mapping").fill("llama-fused")
        window.page.get_by_role("button", name="Compare").click()
        tensors = [value for key, value in hub.items() if key.startswith("model.layers.1.")]
        output = weights[parts[3]]
        before = np.hypot(
            np.sqrt(sum(np.sum(value**2) for value in tensors) - np.sum(output**2)), np.linalg.norm(1.01 * output)
        )
        share = np.linalg.norm(0.01 * output) / before
        expect(window.page.locator(".lede.big")).to_contain_text(f"Changed most: layer 1 ({100 * share:.3g}%)")
        assert "mapping=llama-fused" in window.page.url
        assert window.page.get_by_role("heading", name="Added").count() == 0
        window.page.get_by_label("Mapping").fill("no-such-mapping")
        window.allow("status of")
        window.page.get_by_role("button", name="Compare").click()
        expect(window.page.get_by_role("alert")).to_contain_text("llama-fused")


def write_hub_folder(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    folder.mkdir()
    header, data = {}, b""
    for key, array in arrays.items():
        header[key] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "hidden_size": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
