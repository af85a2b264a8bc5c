"""Programs in checkpoints: saved with a step, in the background, under other names, with constants."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn

import holdfast
from holdfast import HoldfastWarning, InvalidArgument, Mismatch, Unsupported, export_program, load_program
from holdfast.checkpoint.catalog import committed_steps
from holdfast.checkpoint.tags import add_tag
from tests.adapters.program.models import AUTO, Cnn, Everything, everything_inputs


@pytest.fixture(scope="module")
def everything():
    torch.manual_seed(0)
    model = Everything().eval()
    args, kwargs = everything_inputs()
    return model, export_program(model, args, example_kwargs=kwargs)


def _equal(model, module):
    args, kwargs = everything_inputs()
    assert torch.equal(module(*args, **kwargs)["logits"], model(*args, **kwargs)["logits"])


def test_a_program_is_saved_verified_and_run(everything, tmp_path):
    model, program = everything
    optimizer = torch.optim.AdamW(model.parameters())
    saved = holdfast.save(tmp_path / "step-5", {"model": model, "optimizer": optimizer, "note": 3}, program=program)
    assert saved.verify().good
    assert saved.program == program and holdfast.open(tmp_path / "step-5").program == program
    assert saved.read("mask", "program").tolist() == [-float("inf")] * 16
    _equal(model, load_program(tmp_path / "step-5"))


def test_the_rest_of_the_checkpoint_is_loaded_as_ever(everything, tmp_path):
    model, program = everything
    holdfast.save(tmp_path / "step-5", {"model": model, "note": 3}, program=program)
    other = Everything()
    state = {"model": other, "note": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        holdfast.load(tmp_path / "step-5", state)
    assert state["note"] == 3 and torch.equal(other.emb.weight, model.emb.weight)


def test_a_damaged_program_is_found(everything, tmp_path):
    model, program = everything
    holdfast.save(tmp_path / "step-5", {"model": model}, program=program)
    path = tmp_path / "step-5" / "program.json"
    path.write_bytes(path.read_bytes().replace(b"linear", b"lineaR", 1))
    report = holdfast.open(tmp_path / "step-5").verify()
    assert [damage.file for damage in report.damage] == ["program.json"]
    with pytest.raises(holdfast.Damaged, match=r"program\.json: the block at 0 has a wrong digest"):
        load_program(tmp_path / "step-5")


def test_a_program_is_read_without_torch(everything, tmp_path):
    model, program = everything
    holdfast.save(tmp_path / "step-5", {"model": model}, program=program)
    code = (
        f"import sys, holdfast; print(holdfast.open({str(tmp_path / 'step-5')!r}).program)\n"
        "assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert shown.strip() == repr(program)


def test_every_step_of_a_run_has_the_program_and_runs_with_the_weights_of_others(tmp_path):
    torch.manual_seed(0)
    model = Cnn().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    pixels = torch.randn(2, 3, 8, 8)
    program = export_program(model, (pixels,), {"pixels": {0: AUTO}})
    weights = {}
    with holdfast.Checkpointer(tmp_path, program=program) as ck:
        for step in range(3):
            model(pixels).sum().backward()
            optimizer.step()
            ck.save(step, {"model": model, "optimizer": optimizer}).result()
            weights[step] = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for step in range(3):
        path = tmp_path / f"step-{step:012d}"
        assert holdfast.open(path).program == program and holdfast.open(path).verify().good
        other = tmp_path / f"step-{(step + 1) % 3:012d}"
        module = load_program(path, weights=other)
        for key, tensor in weights[(step + 1) % 3].items():
            assert torch.equal(module.state_dict()[key], tensor), key


def test_a_run_whose_program_does_not_fit_saves_without_it_and_says_so(everything, tmp_path):
    with holdfast.Checkpointer(tmp_path, program=everything[1]) as ck:
        with pytest.warns(HoldfastWarning, match="saved without the program: the program is of another model"):
            ck.save(1, {"model": Cnn()}).result()
        assert holdfast.open(tmp_path / "step-000000000001").program is None


def test_a_program_of_another_model_is_refused(everything, tmp_path):
    with pytest.raises(Mismatch, match=r"of another model than 'model': it has the weights emb\.weight.*and 3 more"):
        holdfast.save(tmp_path / "step-1", {"model": Cnn()}, program=everything[1])
    with pytest.raises(Mismatch, match="no module"):
        holdfast.save(tmp_path / "step-1", {"note": 1}, program=everything[1])
    assert not (tmp_path / "step-1").exists()


def test_a_program_with_a_weight_of_another_shape_is_refused(everything, tmp_path):
    wider = Everything()
    wider.proj = nn.Linear(17, 16)
    with pytest.raises(
        Mismatch,
        match=r"proj\.weight, which are not saved in these shapes \(proj\.weight is \[16, 17\], and \[16, 16\]",
    ):
        holdfast.save(tmp_path / "step-1", {"model": wider}, program=everything[1])
    assert not (tmp_path / "step-1").exists()


def test_a_run_with_rotation_tags_and_restores_keeps_the_program(everything, tmp_path):
    model, program = everything
    policy = holdfast.keep.last(2)
    with holdfast.Checkpointer(tmp_path, program=program, keep=policy) as ck:
        for step in (1, 2):
            ck.save(step, {"model": model}).result()
        add_tag(ck.storage, "release", committed_steps(ck.storage)[0])
        for step in (3, 4):
            ck.save(step, {"model": model}).result()
    with holdfast.Checkpointer(tmp_path, program=program, keep=policy) as ck:
        state = {"model": Everything().eval()}
        assert ck.restore(state) == 4
        assert torch.equal(state["model"].emb.weight, model.emb.weight)
        ck.save(5, state).result()
        assert ck.steps() == [1, 4, 5]
    for step in (1, 4, 5):
        path = tmp_path / f"step-{step:012d}"
        assert holdfast.open(path).verify().good
        _equal(model, load_program(path))


def test_what_is_not_a_program_is_refused(everything, tmp_path):
    with pytest.raises(InvalidArgument, match="program=Everything: give what"):
        holdfast.save(tmp_path / "step-1", {"model": everything[0]}, program=everything[0])
    with pytest.raises(InvalidArgument, match=r"program\.json.*is a file that Holdfast writes itself"):
        holdfast.save(tmp_path / "step-1", {"model": everything[0]}, files={"program.json": "{}"})
    with pytest.raises(InvalidArgument, match="has an entry 'program'"):
        state = {"model": everything[0], "program": {"a": torch.ones(1)}}
        holdfast.save(tmp_path / "step-1", state, program=everything[1])


def test_the_module_may_have_another_name(everything, tmp_path):
    model, program = everything
    saved = holdfast.save(tmp_path / "step-1", {"actor": model, "critic": Cnn()}, program=program)
    assert saved.program is not None and saved.program.group == "actor"
    _equal(model, load_program(tmp_path / "step-1"))


def test_a_mapping_renames_the_keys_of_the_program(everything, tmp_path):
    model, program = everything
    mapping = ["emb.weight -> tokens.table", "proj.weight -> inner.w"]
    saved = holdfast.save(tmp_path / "step-1", {"model": model}, program=program, mapping=mapping)
    assert saved.program is not None
    assert {"tokens.table", "inner.w", "proj.bias"} <= set(saved.program.keys()) <= set(saved.keys("model"))
    module = load_program(tmp_path / "step-1")
    assert "tokens.table" in module.state_dict() and "inner.w" in module.state_dict()
    _equal(model, module)


def test_a_mapping_that_splits_a_weight_is_refused_with_a_program(everything, tmp_path):
    model, program = everything
    with pytest.raises(Mismatch, match=r"it has the weights proj\.weight, which are not saved"):
        holdfast.save(tmp_path / "step-1", {"model": model}, program=program, mapping=["proj.weight -> a, b, axis=0"])


def test_constants_that_are_too_large_are_refused(tmp_path, monkeypatch, everything):
    monkeypatch.setattr("holdfast.core.limits.PROGRAM_CONSTANTS_BYTES", 10)
    with pytest.raises(Unsupported, match="make them persistent buffers"):
        holdfast.save(tmp_path / "step-1", {"model": everything[0]}, program=everything[1])


def test_the_same_state_has_the_same_program_bytes(everything, tmp_path):
    model, program = everything
    for name in ("one", "two"):
        holdfast.save(tmp_path / name, {"model": model}, program=program)
    for path in (tmp_path / "one").glob("program*"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


class Fp8(nn.Module):
    """Constants of dtypes that numpy does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn), persistent=False)
        self.register_buffer("shift", torch.tensor(3.0).bfloat16(), persistent=False)
        self.register_buffer("wave", torch.tensor([1 + 2j]), persistent=False)
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x) * self.scale.float() + self.shift.float() * self.wave.real


def test_constants_of_every_kind_of_dtype(tmp_path):
    model, x = Fp8(), torch.ones(1, 2)
    holdfast.save(tmp_path / "step-1", {"model": model}, program=export_program(model, (x,)))
    module = load_program(tmp_path / "step-1")
    assert torch.equal(module(x), model(x))
