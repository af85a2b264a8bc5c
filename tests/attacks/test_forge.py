"""The forger's tools make good checkpoints when nothing is wrong: a refusal is then due to the attack."""

from attacks.forge import INDEX, MODEL, examine, forge_file, forge_manifest, index, tensor, tensor_file


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
