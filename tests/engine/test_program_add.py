"""add_program: a committed checkpoint gets its program, or stays as it is."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast import Damaged, InvalidArgument, Mismatch, NotFound, add_program, export_program, load_program
from holdfast.checkpoint.catalog import Catalog, committed_steps, living_steps, set_aside_folders
from holdfast.checkpoint.tags import add_tag, tagged
from holdfast.core.errors import StorageError
from holdfast.core.names import step_folder
from holdfast.engine import program_add
from holdfast.storage.local import LocalStorage
from tests.adapters.program.models import Cnn, Everything, everything_inputs


@pytest.fixture
def step(tmp_path):
    torch.manual_seed(0)
    model = Everything().eval()
    optimizer = torch.optim.AdamW(model.parameters())
    path = tmp_path / "step-000000000007"
    holdfast.save(path, {"model": model, "optimizer": optimizer, "note": 1}, files={"notes/a.txt": "hello"})
    args, kwargs = everything_inputs()
    return path, model, export_program(model, args, example_kwargs=kwargs)


def test_a_program_is_added_and_everything_else_stays(step):
    path, model, program = step
    before = {
        file.name: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "holdfast.json"
    }
    manifest = holdfast.open(path).manifest
    added = add_program(path, program)
    assert added.verify().good and added.program == program
    after = {file.name: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert before.items() <= after.items()
    assert (added.manifest.step, added.manifest.parent) == (7, manifest.parent)
    args, kwargs = everything_inputs()
    assert torch.equal(load_program(path)(*args, **kwargs)["logits"], model(*args, **kwargs)["logits"])
    assert sorted(entry.name for entry in path.parent.iterdir() if "attempt" in entry.name) == []


def test_a_program_is_replaced(step):
    path, model, program = step
    add_program(path, program)
    args, kwargs = everything_inputs()
    other = export_program(model.train(), args, example_kwargs=kwargs)
    assert add_program(path, other).program == other
    assert holdfast.open(path).verify().good


def test_a_checkpoint_with_other_weights_stays_as_it_is(step):
    path, _, _ = step
    manifest = (path / "holdfast.json").read_bytes()
    with pytest.raises(Mismatch, match="of another model"):
        add_program(path, export_program(Cnn().eval(), (torch.randn(1, 3, 8, 8),)))
    assert (path / "holdfast.json").read_bytes() == manifest


def test_a_damaged_file_is_not_copied(step):
    path, _, program = step
    (tensors,) = path.glob("model-*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(Damaged, match=r"model-.*the block at 0 has a wrong digest"):
        add_program(path, program)
    assert holdfast.open(path).program is None


def test_wrong_arguments(step, tmp_path):
    path, model, program = step
    with pytest.raises(InvalidArgument, match="program=Everything"):
        add_program(path, model)
    with pytest.raises(NotFound, match="no such checkpoint"):
        add_program(tmp_path / "missing", program)


def test_names_of_the_hub_are_followed(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup")
    config = transformers.Qwen2MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, moe_intermediate_size=8, shared_expert_intermediate_size=8, num_experts=4,
        num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2MoeForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    ids = torch.randint(0, 32, (1, 5))
    program = export_program(model, {"input_ids": ids})
    holdfast.save(tmp_path / "step-1", {"model": model})
    added = add_program(tmp_path / "step-1", program)
    assert added.program is not None and added.program.mapping
    expected = model(ids).logits
    assert torch.equal(load_program(tmp_path / "step-1")(input_ids=ids).logits, expected)
    model.save_pretrained(tmp_path / "hub")
    assert torch.equal(load_program(tmp_path / "step-1", weights=tmp_path / "hub")(input_ids=ids).logits, expected)


@pytest.fixture
def run(tmp_path):
    """A run of three steps of a CNN, and the program of its model."""
    torch.manual_seed(0)
    model = Cnn().eval()
    with holdfast.Checkpointer(tmp_path / "run") as ck:
        for step in (1, 2, 3):
            ck.save(step, {"model": model}).result()
    return tmp_path / "run", model, export_program(model, (torch.randn(1, 3, 8, 8),))


def test_a_step_keeps_its_identity_and_its_date(run):
    root, _, program = run
    path = root / step_folder(2)
    before = holdfast.open(path).manifest
    once = add_program(path, program).manifest
    again = add_program(path, export_program(Cnn().train(), (torch.randn(2, 3, 8, 8),))).manifest
    assert len({before.attempt, once.attempt, again.attempt}) == 3
    assert before.identity == before.attempt == once.identity == again.identity
    assert (again.step, again.parent, again.created, again.writer) == (2, 1, before.created, before.writer)


def test_the_same_program_again_writes_nothing(run):
    root, _, program = run
    path = root / step_folder(2)
    manifest = add_program(path, program).manifest
    assert add_program(path, program).manifest == manifest


def test_a_step_that_a_rewind_abandoned_stays_abandoned(run):
    root, model, program = run
    storage = LocalStorage(root)
    with holdfast.Checkpointer(root) as ck:
        ck.restore({"model": model}, step=1)
        ck.save(2, {"model": model, "note": 1}).result()
    aside = root / "abandoned-step-000000000003"
    assert add_program(aside, program).program == program
    aside.rename(root / step_folder(3))  # as if the crash had been before it was set aside
    assert [entry.step for entry in living_steps(storage)] == [1, 2]
    with holdfast.Checkpointer(root) as ck:
        assert ck.restore({"model": model}) == 2
        ck.save(4, {"model": model}).result()
    assert [entry.step for entry in committed_steps(storage)] == [1, 2, 4]
    assert holdfast.open(aside).program == program


def test_a_tag_stays_on_the_step_that_it_names(run):
    root, model, program = run
    storage = LocalStorage(root)
    third = committed_steps(storage)[-1]
    add_tag(storage, "release", third)
    with holdfast.Checkpointer(root) as ck:
        ck.restore({"model": model}, step=1)
        ck.save(2, {"model": model, "note": 1}).result()
        ck.save(3, {"model": model, "note": 1}).result()
    aside = "abandoned-step-000000000003"
    add_program(root / aside, program)
    entries = [*committed_steps(storage), *set_aside_folders(storage)]
    assert tagged(storage, entries) == {aside: ["release"]}


def test_retention_keeps_a_tagged_step_and_deletes_the_others(run):
    root, model, program = run
    add_tag(LocalStorage(root), "release", committed_steps(LocalStorage(root))[0])
    add_program(root / step_folder(1), program)
    add_program(root / step_folder(2), program)
    with holdfast.Checkpointer(root, keep=holdfast.keep.last(1)) as ck:
        ck.restore({"model": model})
        ck.save(4, {"model": model}).result()
    assert [entry.step for entry in committed_steps(LocalStorage(root))] == [1, 4]
    assert holdfast.open(root / step_folder(1)).program == program


def test_the_catalog_of_a_long_run_knows_the_identity(tmp_path):
    model = Cnn().eval()
    with holdfast.Checkpointer(tmp_path) as ck:
        for step in range(12):
            ck.save(step, {"net": model, "number": step}).result()
    before = holdfast.open(tmp_path / step_folder(7)).manifest.attempt
    add_program(tmp_path / step_folder(7), export_program(model, (torch.randn(1, 3, 8, 8),)))
    with holdfast.Checkpointer(tmp_path) as ck:
        ck.save(12, {"net": model, "number": 12}).result()
    catalog = Catalog(LocalStorage(tmp_path))
    catalog.scan()
    assert (tmp_path / ".catalog").exists()
    (entry,) = [entry for entry in catalog.steps if entry.step == 7]
    assert entry.manifest is not None
    assert entry.manifest.identity == before != entry.manifest.attempt


def test_a_step_that_was_saved_again_meanwhile_is_not_replaced(run, monkeypatch):
    root, model, program = run
    path = root / step_folder(3)
    plain = program_add._copy

    def copy(*args):
        plain(*args)
        monkeypatch.undo()
        holdfast.save(path, {"model": model, "note": "newer"})

    monkeypatch.setattr(program_add, "_copy", copy)
    with pytest.raises(StorageError, match=r"step-000000000003 was saved again meanwhile"):
        add_program(path, program)
    assert holdfast.open(path).value("note") == "newer"
    assert add_program(path, program).value("note") == "newer"
