"""Vocabularies of stored checkpoints resized: bytes of known rows, configs, optimizers, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import Damaged, InvalidArgument, NotFound, Unsupported
from holdfast.format.dtypes import dtype_named
from holdfast.format.safetensors import TensorEntry, encode_header
from holdfast.tokens import ResizeOptions, resize_vocab
from holdfast.tokens.stored_vocabulary import vocabulary_of
from tests.cli.calls import call
from tests.dist.harness import run_ranks
from tests.tokens.vocabularies import causal_model, logits, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

IDS = [0, 3, 4, 5, 6, 7, 8, 1]


def hub_folder(path: Path, *, tied: bool = True, rows: int = 15, dtype: torch.dtype = torch.float32) -> Any:
    """A model with its tokenizer as save_pretrained writes them."""
    model = causal_model("qwen2", rows=rows, tied=tied).to(dtype)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return model


def opened(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(path, output_loading_info=True)
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model.eval()


@pytest.mark.sliced(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_hub_folder_grows(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    model = hub_folder(tmp_path / "small", tied=tied, dtype=dtype)
    done = resize_vocab(tmp_path / "small", tmp_path / "large", ResizeOptions(size=20, pad_to=16))
    assert done.format == "hf"
    large = opened(tmp_path / "large")
    assert large.config.vocab_size == 32
    assert (large.get_input_embeddings().weight is large.get_output_embeddings().weight) is tied
    assert torch.equal(logits(large, IDS)[:, :15], logits(model, IDS))
    holdfast.tokens.add(model, tokenizer(), [f"<{n}>" for n in range(5)], pad_to=16)  # the same, live
    for key, value in model.state_dict().items():
        assert torch.equal(large.state_dict()[key], value), key
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "large" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("small", "large"))
    assert after == before.replace('"vocab_size": 15', '"vocab_size": 32')


def test_rows_of_padding_are_in_no_mean(tmp_path: Path) -> None:
    hub_folder(tmp_path / "small", rows=24)
    resize_vocab(tmp_path / "small", tmp_path / "large", ResizeOptions(size=28))
    small, large = (holdfast.open(tmp_path / name).read("model.embed_tokens.weight") for name in ("small", "large"))
    assert np.array_equal(large[:24], small)
    for row in large[24:]:
        assert np.array_equal(row, small[:15].astype(np.float64).mean(0).astype(np.float32))


def test_zeros_and_bands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.convert import computed

    hub_folder(tmp_path / "small")
    monkeypatch.setattr(computed, "BAND_BYTES", 32 * 4 * 2)  # two rows
    resize_vocab(tmp_path / "small", tmp_path / "mean", ResizeOptions(size=70))
    resize_vocab(tmp_path / "small", tmp_path / "zero", ResizeOptions(size=70, init="zero"))
    small, mean, zero = (
        holdfast.open(tmp_path / name).read("model.embed_tokens.weight") for name in ("small", "mean", "zero")
    )
    assert not zero[15:].any()
    assert np.array_equal(mean[15:], np.broadcast_to(small.astype(np.float64).mean(0).astype(np.float32), (55, 32)))


def test_padding_is_dropped_only_when_asked(tmp_path: Path) -> None:
    model = hub_folder(tmp_path / "padded", rows=64)
    with pytest.raises(InvalidArgument, match="to drop padding, pass --shrink"):
        resize_vocab(tmp_path / "padded", tmp_path / "made", ResizeOptions(size=16))
    with pytest.raises(InvalidArgument, match="12 rows are too few: the tokenizer has ids up to 14, 'new'"):
        resize_vocab(tmp_path / "padded", tmp_path / "made", ResizeOptions(size=12, shrink=True))
    assert not (tmp_path / "made").exists()
    resize_vocab(tmp_path / "padded", tmp_path / "made", ResizeOptions(size=16, shrink=True))
    assert torch.equal(logits(opened(tmp_path / "made"), IDS), logits(model, IDS)[:, :16])
    (tmp_path / "padded" / "tokenizer.json").unlink()
    with pytest.raises(Unsupported, match="which rows are padding is not known"):
        resize_vocab(tmp_path / "padded", tmp_path / "other", ResizeOptions(size=16, shrink=True))


def trained(**options: Any) -> dict[str, Any]:
    model = causal_model("llama", **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "note": {"epoch": 3}}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_step_grows_with_its_optimizer_and_masters(tied: bool, tmp_path: Path) -> None:
    state = trained(tied=tied)
    holdfast.save(tmp_path / "step-000000000002", state, model_dtype="bfloat16", files=tokenizer().save_pretrained)
    done = resize_vocab(tmp_path, tmp_path / "large", ResizeOptions(size=20))
    assert done.format == "holdfast"
    checkpoint, original = holdfast.open(tmp_path / "large"), holdfast.open(tmp_path / "step-000000000002")
    assert checkpoint.verify().good
    assert checkpoint.step == 2
    assert checkpoint.config()["vocab_size"] == 20
    assert checkpoint.value("note") == {"epoch": 3}
    keys = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    for key in keys:
        weights = checkpoint.read(key, "model")
        masters = checkpoint.read(key, "master_weights")
        assert np.array_equal(weights[15:].astype(np.float32), masters[15:])
        assert np.array_equal(masters[:15], original.read(key, "master_weights"))
    live = trained(tied=tied, rows=20, seed=5)
    report = holdfast.load(tmp_path / "large", live)
    assert (report.missing, report.unexpected) == ((), ())
    before, after = (each["optimizer"].state[each["model"].get_input_embeddings().weight] for each in (state, live))
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(after[name][:15], before[name])
        assert not after[name][15:].any()
    assert after["step"] == 2
    assert torch.equal(logits(live["model"], IDS)[:, :15], logits(state["model"], IDS))


def test_states_without_a_row_for_each_token_are_refused(tmp_path: Path) -> None:
    model = causal_model()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    optimizer.step()
    holdfast.save(tmp_path / "step", {"model": model, "optimizer": optimizer})
    with pytest.raises(Unsupported, match=r"weight/(col|row)_var is float32\[.*--remove optimizer"):
        resize_vocab(tmp_path / "step", tmp_path / "large", ResizeOptions(size=20))
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_bias_with_a_column_for_each_token_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_module("shared", torch.nn.Embedding(10, 4))
    model.register_buffer("final_logits_bias", torch.zeros(1, 10))
    holdfast.save(tmp_path / "small", {"model": model})
    for keys in ((), ("shared.*",)):
        with pytest.raises(Unsupported, match=r"final_logits_bias has 10 columns"):
            vocabulary_of(
                "model", holdfast.open(tmp_path / "small").contents, {"config.json": b'{"vocab_size": 10}'}, keys
            )


def test_embeddings_by_pattern(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(10, 4), "head": torch.nn.Linear(4, 10)})
    holdfast.save(tmp_path / "small", {"model": model})
    with pytest.raises(NotFound, match=r"no config.json states vocab_size; name the embeddings with --key"):
        resize_vocab(tmp_path / "small", tmp_path / "large", ResizeOptions(size=12))
    resize_vocab(tmp_path / "small", tmp_path / "large", ResizeOptions(size=12, keys=("table.*", "head.*")))
    checkpoint = holdfast.open(tmp_path / "large")
    assert [checkpoint.read(key).shape for key in ("head.bias", "head.weight", "table.weight")] == [
        (12,),
        (12, 4),
        (12, 4),
    ]
    assert np.array_equal(checkpoint.read("head.bias")[:10], model["head"].bias.detach().numpy())
    assert checkpoint.read("head.bias")[11] == model["head"].bias.detach().double().mean().float().numpy()
    model["odd"] = torch.nn.Embedding(4, 4)
    holdfast.save(tmp_path / "odd", {"model": model})
    with pytest.raises(InvalidArgument, match=r"have \[4, 10\] rows"):
        resize_vocab(tmp_path / "odd", tmp_path / "other", ResizeOptions(size=12, keys=("table.*", "odd.*")))


def test_tables_of_other_names_are_refused(tmp_path: Path) -> None:
    model = causal_model()
    model.model.second = torch.nn.Embedding(15, 4)
    holdfast.save(tmp_path / "small", {"model": model})
    with pytest.raises(Unsupported, match=r"model.second.weight has 15 rows"):
        resize_vocab(tmp_path / "small", tmp_path / "large", ResizeOptions(size=20))


def test_damage_in_an_embedding_is_found(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "step", trained())
    file = next((tmp_path / "step").glob("model-*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-40] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(Damaged):
        resize_vocab(tmp_path / "step", tmp_path / "large", ResizeOptions(size=20))
    assert not (tmp_path / "large").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 15}, "has 15 rows already"),
        ({"size": 20, "init": "median"}, "choose 'mean' or 'zero'"),
        ({"size": 0}, "size=0"),
        ({"size": 20, "pad_to": 0}, "pad_to=0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    hub_folder(tmp_path / "small")
    with pytest.raises(InvalidArgument, match=message):
        resize_vocab(tmp_path / "small", tmp_path / "large", ResizeOptions(**options))


def test_the_command(tmp_path: Path) -> None:
    hub_folder(tmp_path / "small")
    found = call("resize-vocab", tmp_path / "small", tmp_path / "large", "--size", 20, "--json")
    assert found.exit_code == 0, found.output
    fields = json.loads(found.output)
    assert fields["notes"] == ["model: model.embed_tokens.weight have 20 rows, before 15"]
    assert call("resize-vocab", tmp_path / "small", tmp_path / "large", "--size", 20).exit_code != 0  # it exists
    again = call("resize-vocab", tmp_path / "small", tmp_path / "large", "--size", 24, "--force")
    assert again.exit_code == 0
    assert "wrote" in again.output
    assert holdfast.open(tmp_path / "large").read("model.embed_tokens.weight").shape == (24, 32)


def _resize_on_rank(source: str, destination: str) -> str:
    from holdfast.adapters.comm import current_ranks

    return resize_vocab(source, destination, ResizeOptions(size=40), ranks=current_ranks(60.0)).path


@pytest.mark.full
def test_several_ranks_write_the_same_bytes(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "small", trained(tied=False), max_shard_size=8000)
    run_ranks(3, _resize_on_rank, str(tmp_path / "small"), str(tmp_path / "ranks"))
    _resize_on_rank(str(tmp_path / "small"), str(tmp_path / "one"))
    one, ranks = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir() if file.name != "holdfast.json"}
        for name in ("one", "ranks")
    )
    assert one == ranks
    assert len(one) > 4


_WATCHED = """
import sys, threading
from holdfast.tokens.resize_vocabulary import ResizeOptions, resize_vocab
from holdfast.tokens.stored_vocabulary import vocabulary_of

def anonymous():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) << 10

before, most, done = anonymous(), [0], threading.Event()

def watch():
    while not done.wait(0.002):
        most[0] = max(most[0], anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
resize_vocab(sys.argv[1], sys.argv[2], ResizeOptions(size=int(sys.argv[3])))
done.set()
watcher.join()
print(most[0] - before)
"""


@pytest.mark.full
def test_memory_does_not_depend_on_the_table(tmp_path: Path) -> None:
    grown = []
    for rows in (131_072, 393_216):  # 256 and 768 MB, both larger than all buffers
        folder = tmp_path / str(rows)
        folder.mkdir()
        size = rows * 1024 * 2
        entry = TensorEntry("model.embed_tokens.weight", dtype_named("bfloat16"), (rows, 1024), 0, size)
        (folder / "model.safetensors").write_bytes(encode_header([entry]) + bytes(size))
        (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))
        command = [sys.executable, "-c", _WATCHED, str(folder), str(tmp_path / f"made-{rows}"), str(rows + 4096)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        grown.append(int(done.stdout))
    assert grown[1] < grown[0] + 20 * 1000**2, grown
