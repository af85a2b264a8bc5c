"""The forger's tools make good checkpoints when nothing is wrong: a refusal is then due to the attack."""

import time
from dataclasses import replace

from tests.attacks.attack import Attack, lay_out, problem_of
from tests.attacks.forge import INDEX, MODEL, examine, forge_file, forge_manifest, index, tensor, tensor_file


def test_a_checkpoint_that_is_signed_again_is_good(checkpoint):
    forge_manifest(checkpoint, lambda fields: fields.update(created="never"))
    for name in (MODEL, INDEX, "state.json"):
        forge_file(checkpoint, name, (checkpoint / name).read_bytes())
    examine(checkpoint)


def test_a_replaced_tensor_file_is_good_when_its_index_fits(checkpoint):
    forge_file(checkpoint, MODEL, tensor_file({"key": tensor(0, 4)}, b"data"))
    forge_file(checkpoint, INDEX, index({"key": MODEL}))
    examine(checkpoint)


def test_a_foreign_folder_is_good(foreign):
    (foreign / "model.safetensors").write_bytes(tensor_file({"key": tensor(0, 4)}, b"data"))
    examine(foreign)


def test_a_foreign_folder_with_an_index_is_good(foreign):
    (foreign / "a.safetensors").write_bytes(tensor_file({"key": tensor(0, 4)}, b"data"))
    (foreign / INDEX).write_bytes(index({"key": "a.safetensors"}))
    examine(foreign)


def test_an_attack_that_nobody_refuses_is_told(original, tmp_path):
    nothing = Attack("nothing", lambda folder: None)
    folder = lay_out(nothing, original, tmp_path)
    assert problem_of(nothing, folder) == "it was read as if it were good"
    assert problem_of(replace(nothing, harmless=True), folder) == ""


def work_for_ever(folder):
    while True:
        pass


def test_an_error_of_another_kind_is_told(original, tmp_path, monkeypatch):
    nothing = Attack("nothing", lambda folder: None)
    folder = lay_out(nothing, original, tmp_path)
    monkeypatch.setattr("tests.attacks.attack.examine", lambda folder: {}["gone"])
    assert problem_of(nothing, folder) == "KeyError: 'gone'"
    monkeypatch.setattr("tests.attacks.attack.DEADLINE_S", 0.05)
    monkeypatch.setattr("tests.attacks.attack.examine", lambda folder: time.sleep(5))
    assert problem_of(nothing, folder).startswith("Hung: not done after 0 s of the clock")
    monkeypatch.setattr("tests.attacks.attack.DEADLINE_S", 120.0)
    monkeypatch.setattr("tests.attacks.attack.WORKING_S", 0.05)
    monkeypatch.setattr("tests.attacks.attack.examine", work_for_ever)
    assert problem_of(nothing, folder).startswith("Hung: not done after 0 s of the processor")
