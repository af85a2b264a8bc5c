"""torchtitan's components with Holdfast in place of its checkpointer: `make torchtitan` installs them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from tests.integrations.launcher import Launcher

titan_run: Any
hub_statements: Any
without_excluded: Any
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    try:
        from holdfast.integrations.torchtitan.hub_names import hub_statements
        from holdfast.integrations.torchtitan.titan_state import without_excluded
        from tests.integrations import titan_run
    except ImportError:
        titan_run = hub_statements = without_excluded = None

pytestmark = [
    pytest.mark.skipif(titan_run is None, reason="torchtitan is not installed: make torchtitan"),
    pytest.mark.full,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher(["tests.integrations.titan_run"]) as made:
        yield made


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on_exactly(launcher: Launcher, tmp_path: Path, world: int):
    whole = launcher.values(world, titan_run.train, str(tmp_path / "whole"))
    stop = tmp_path / "now"
    dead = launcher.run(world, titan_run.train, str(tmp_path / "run"), str(stop), kill_file=stop)
    assert all(outcome.killed for outcome in dead), dead
    resumed = launcher.values(world, titan_run.train, str(tmp_path / "run"))
    for first, second in zip(whole, resumed, strict=True):
        assert second.began == 6
        assert second.log == first.log[6:]
        assert any("HoldfastManager" in line for line in second.replaced)


def test_another_number_of_ranks_is_refused_for_the_loader_alone(launcher: Launcher, tmp_path: Path):
    launcher.values(2, titan_run.train, str(tmp_path / "run"))
    (outcome,) = launcher.run(1, titan_run.train, str(tmp_path / "run"))
    assert "on 2 data-parallel ranks, and now there are 1" in str(outcome.error)


def test_the_steps_have_the_hub_s_names_and_transformers_opens_them(launcher: Launcher, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    assets = tmp_path / "assets"
    _, _, config = titan_run.make_model()
    attention = config.layers[0].attention
    transformers.LlamaConfig(
        hidden_size=config.dim,
        intermediate_size=config.layers[0].feed_forward.w1.out_features,
        num_hidden_layers=2,
        num_attention_heads=attention.n_heads,
        num_key_value_heads=attention.n_kv_heads or attention.n_heads,
        vocab_size=config.vocab_size,
        architectures=["LlamaForCausalLM"],
        tie_word_embeddings=False,
    ).save_pretrained(assets)
    (assets / "tokenizer_config.json").write_text("{}")
    (result,) = launcher.values(1, titan_run.train, str(tmp_path / "run"), None, str(assets))
    assert result.began == 0
    folder = tmp_path / "run" / f"step-{titan_run.STEPS:012d}"
    opened, info = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert (folder / "tokenizer_config.json").exists()
    stored = holdfast.open(folder)
    assert torch.equal(opened.lm_head.weight, torch.from_numpy(stored.read("lm_head.weight")))


@pytest.mark.parametrize("flavor", ["debugmodel", "1B"])
def test_the_mapping_is_what_the_adapter_does(tmp_path: Path, flavor: str):
    """1B has fewer key and value heads than heads; both fuse q, k and v."""
    spec = titan_run.model_registry(flavor)
    config = spec.model
    config.layers = config.layers[:1]
    with torch.device("meta"):
        model = config.build()
    del model.tok_embeddings, model.lm_head
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    adapter: Any = spec.state_dict_adapter(config, None)
    wanted = adapter.to_hf(model.state_dict())
    statements = hub_statements({name: p.shape for name, p in model.named_parameters()}, [model], adapter)
    raw = {name: parameter.detach() for name, parameter in model.named_parameters()}
    holdfast.save(tmp_path / "step", {"weights": _Holder(raw)}, mapping=statements)
    stored = holdfast.open(tmp_path / "step")
    assert set(stored.keys("weights")) == set(wanted)
    for name, weight in wanted.items():
        assert np.array_equal(stored.read(name, group="weights"), weight.detach().numpy()), name
    live = {name: torch.zeros_like(tensor) for name, tensor in raw.items()}
    holdfast.load(tmp_path / "step", {"weights": _Holder(live)}, mapping=holdfast.Mapping.parse(statements).reverse())
    assert all(torch.equal(live[name], raw[name]) for name in raw)


class DistSGD(torch.optim.SGD):
    """An optimizer whose name, as an entry of the state, begins as torchtitan's distributed ones do."""


def test_only_what_is_named_is_excluded_from_loading():
    parameter = [torch.nn.Parameter(torch.zeros(1))]
    adam, other = torch.optim.AdamW(parameter), DistSGD(parameter)
    state = {"model": 1, "optimizer_AdamW": adam, "optimizer_DistSGD": other, "optimizer_notes": {}, "dataloader": 2}
    assert set(without_excluded(state, ["optimizer"])) == {"model", "optimizer_notes", "dataloader"}
    assert set(without_excluded(state, ["optimizer_DistSGD"])) == state.keys() - {"optimizer_DistSGD"}
    assert without_excluded(state, []) == state
    for unknown in ("optimizer_Dist", "loader"):
        with pytest.raises(
            holdfast.InvalidArgument, match=f"'{unknown}' is not in the state; it has dataloader, model"
        ):
            without_excluded(state, ["dataloader", unknown])


class _Holder(torch.nn.Module):
    """A module whose parameters have dotted names, as the model's."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for step in path:
                if step not in module._modules:
                    module.add_module(step, torch.nn.Module())
                module = module.get_submodule(step)
            module.register_buffer(leaf, tensor)
