import argparse
import enum
import pickle
import signal

import pytest
import torch

from holdfast.core.errors import Damaged
from holdfast.sources import open_stored
from holdfast.sources.pickles import read_pickle
from holdfast.sources.torch_save.torch_names import TORCH_NAMES
from tests.sources.made import megatron_class, reader


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_megatron_opens_though_its_args_name_enums(tmp_path, monkeypatch, zipped):
    kind = megatron_class(monkeypatch, "megatron.core.enums", enum.Enum("ModelType", {"encoder_or_decoder": 1}))
    backend = megatron_class(monkeypatch, "megatron.core.transformer.enums", enum.Enum("AttnBackend", {"auto": 5}))
    args = argparse.Namespace(model_type=kind(1), attention_backend=backend.auto, exit_signal=signal.SIGTERM)
    state = {"args": args, "iteration": 7, "model": {"output_layer.weight": torch.ones(2, 3)}}
    torch.save(state, tmp_path / "model_optim_rng.pt", _use_new_zipfile_serialization=zipped)
    found = open_stored(tmp_path / "model_optim_rng.pt")
    assert found.step == 7 and list(found.keys()) == ["output_layer.weight"]
    assert found.value("args") == {
        "model_type": "ModelType(1)", "attention_backend": "AttnBackend(5)", "exit_signal": "Signals(15)"
    }  # fmt: skip


def test_the_value_of_an_enum_is_a_number_or_a_text():
    module = b"cmegatron.core.enums\nModelType\n"
    assert read_pickle(reader(b"\x80\x02" + module + b"X\x01\x00\x00\x00a\x85R."), "p", TORCH_NAMES).value == "a"
    for value in (b"]", b"K\x01K\x02\x86", b"cargparse\nNamespace\n"):
        with pytest.raises(Damaged, match=r"megatron\.core\.enums\.ModelType' with bad arguments"):
            read_pickle(reader(b"\x80\x02" + module + value + b"\x85R."), "p", TORCH_NAMES)


def test_another_name_of_the_same_module_is_refused():
    with pytest.raises(Exception, match="not supported"):
        read_pickle(reader(pickle.dumps(0)[:2] + b"cmegatron.core.enums\nOther\n."), "p", TORCH_NAMES)
