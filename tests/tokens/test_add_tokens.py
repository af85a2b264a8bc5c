"""Tokens added to live models: old rows and logits keep their bits, padding stays, configs and ties follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.errors import InvalidArgument, Unsupported
from tests.tokens.vocabularies import WORDS, causal_model, logits, tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

IDS = [0, 3, 4, 5, 6, 7, 8, 1]
NEW = ["<think>", "</think>"]


@pytest.mark.sliced(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_old_logits_keep_their_bits(family: str, tied: bool, dtype: torch.dtype) -> None:
    model, words = causal_model(family, tied=tied).to(dtype), tokenizer()
    before = logits(model, IDS)
    added = holdfast.tokens.add(model, words, NEW)
    assert added.ids == {"<think>": 15, "</think>": 16}
    assert (added.rows_before, added.rows) == (15, 64)
    assert words.convert_tokens_to_ids(NEW) == [15, 16]
    after = logits(model, IDS)
    assert after.shape[-1] == 64
    assert torch.equal(after[:, :15], before)
    assert torch.isfinite(logits(model, [*IDS, 15, 16])).all()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    assert model.config.vocab_size == model.get_input_embeddings().num_embeddings == 64
    assert model.get_output_embeddings().out_features == 64
    loss = model(torch.tensor([[3, 15, 16]]), labels=torch.tensor([[3, 15, 16]])).loss
    loss.backward()
    assert model.get_input_embeddings().weight.grad.shape[0] == 64


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padded_vocabularies_keep_their_rows(tied: bool) -> None:
    model, words = causal_model("qwen2", rows=32, tied=tied), tokenizer()
    parameter, before, rows = model.get_input_embeddings().weight, logits(model, IDS), model.get_input_embeddings()
    old = rows.weight.detach().clone()
    added = holdfast.tokens.add(model, words, NEW, pad_to=128)
    assert (added.rows_before, added.rows) == (32, 32)
    assert model.get_input_embeddings().weight is parameter  # in place: an optimizer need not know
    assert torch.equal(parameter[:15], old[:15])
    assert torch.equal(parameter[17:], old[17:])  # padding that no token took
    mean = old[:15].double().mean(0).float()
    assert torch.equal(parameter[15], mean)
    assert torch.equal(parameter[16], mean)
    after = logits(model, IDS)
    assert torch.equal(after[:, :15], before[:, :15])
    assert torch.equal(after[:, 17:], before[:, 17:])
    many = holdfast.tokens.add(model, words, [f"<{n}>" for n in range(20)], pad_to=16)  # 37 tokens
    assert (many.rows_before, many.rows) == (32, 48)
    assert torch.equal(logits(model, IDS)[:, :17], after[:, :17])


def test_initial_rows() -> None:
    base = causal_model(tied=False).get_input_embeddings().weight.detach()
    for init, expected in (("mean", base.double().mean(0).float()), ("zero", torch.zeros(32))):
        model = causal_model(tied=False)
        holdfast.tokens.add(model, tokenizer(), NEW, init=init, like={"<think>": "the cat"}, pad_to=20)
        found = model.get_input_embeddings().weight.detach()
        assert torch.equal(found[:15], base)
        assert torch.equal(found[15], ((base[3].double() + base[4].double()) / 2).float())
        assert torch.equal(found[16], expected)
        assert torch.equal(found[19], expected)  # new padding
        head = model.get_output_embeddings().weight.detach()
        assert torch.equal(head[16], torch.zeros(32) if init == "zero" else head[:15].double().mean(0).float())


def test_known_tokens_change_nothing() -> None:
    model, words = causal_model(), tokenizer()
    parameter, before = model.get_input_embeddings().weight, logits(model, IDS)
    added = holdfast.tokens.add(model, words, ["cat", "mat"])
    assert added == holdfast.tokens.AddedTokens({"cat": 4, "mat": 8}, 15, 15, ())
    assert model.get_input_embeddings().weight is parameter
    assert torch.equal(logits(model, IDS), before)


def test_a_tokenizer_that_is_ahead_of_the_model_gets_its_rows() -> None:
    model, words = causal_model(rows=12), tokenizer()
    added = holdfast.tokens.add(model, words, [], pad_to=None)
    assert (added.rows_before, added.rows) == (12, 15)


def test_roles_reach_every_config() -> None:
    model, words = causal_model(), tokenizer()
    model.generation_config.eos_token_id = [1, 4]
    added = holdfast.tokens.add(
        model, words, ["<tool>"], special=True, roles={"pad_token": "<pad>", "eos_token": "<eot>"}
    )
    pad, end = added.ids["<pad>"], added.ids["<eot>"]
    assert (words.pad_token_id, words.eos_token_id) == (pad, end)
    assert (model.config.pad_token_id, model.config.eos_token_id, model.config.bos_token_id) == (pad, end, 0)
    assert model.generation_config.pad_token_id == pad
    assert model.generation_config.eos_token_id == [end, 1, 4]
    assert words.decode(words.encode("the <tool> cat"), skip_special_tokens=True) == "the cat"


def test_a_checkpoint_of_the_grown_model_opens_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, words = causal_model(tied=True), tokenizer()
    holdfast.tokens.add(model, words, NEW, roles={"pad_token": "<pad>"})
    holdfast.save(tmp_path / "made", {"model": model}, files=words.save_pretrained)
    opened: Any = AutoModelForCausalLM
    again, loading = opened.from_pretrained(tmp_path / "made", output_loading_info=True)
    assert not any(loading[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(logits(again.eval(), [3, 15, 16]), logits(model, [3, 15, 16]))
    assert AutoTokenizer.from_pretrained(tmp_path / "made").convert_tokens_to_ids(NEW) == [15, 16]
    assert again.generation_config.pad_token_id == again.config.pad_token_id == 17


def _stepped(model: Any) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    optimizer.step()
    return optimizer


def test_an_optimizer_goes_on(tmp_path: Path) -> None:
    model, words = causal_model(), tokenizer()
    optimizer = _stepped(model)
    old = {name: value.clone() for name, value in optimizer.state[model.get_input_embeddings().weight].items()}
    holdfast.tokens.add(model, words, NEW, optimizer=optimizer)
    parameter = model.get_input_embeddings().weight
    states = optimizer.state[parameter]
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(states[name][:15], old[name])
        assert not states[name][15:].any()
    assert states["step"] == 1
    assert sum(parameter is each for group in optimizer.param_groups for each in group["params"]) == 1
    assert len(optimizer.state) == len(list(model.parameters()))
    before = parameter.detach().clone()
    optimizer.zero_grad()
    model(torch.tensor([[15, 16]]), labels=torch.tensor([[15, 16]])).loss.backward()
    optimizer.step()
    assert not torch.equal(parameter[15], before[15])
    holdfast.save(tmp_path / "made", {"model": model, "optimizer": optimizer})
    assert holdfast.open(tmp_path / "made").verify().good


def test_states_of_other_shapes_are_refused() -> None:
    model, words = causal_model(), tokenizer()
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.backward()
    optimizer.step()
    size = len(words)
    with pytest.raises(Unsupported, match=r"Adafactor keeps row_var of .*embed_tokens.weight with the shape"):
        holdfast.tokens.add(model, words, NEW, optimizer=optimizer)
    assert (len(words), model.config.vocab_size) == (size, 15)  # nothing has changed


def test_models_without_transformers() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok_embeddings = torch.nn.Embedding(15, 8)
            self.output = torch.nn.Linear(8, 15, bias=True)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.output(self.tok_embeddings(ids))

    model = Plain()
    before = model(torch.tensor(IDS))
    added = holdfast.tokens.add(model, tokenizer(), NEW, pad_to=16)
    assert set(added.keys) == {"tok_embeddings.weight", "output.weight", "output.bias"}
    assert torch.equal(model(torch.tensor(IDS))[:, :15], before)
    assert model.output.bias[20] == model.output.bias[:15].double().mean().float()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": "<think>"}, "tokens are a list of strings"),
        ({"tokens": [""]}, "is not a token"),
        ({"tokens": ["<a>"], "init": "median"}, "init='median': choose 'mean' or 'zero'"),
        ({"tokens": ["<a>"], "pad_to": 0}, "pad_to=0"),
        ({"tokens": ["<a>"], "like": {"<b>": "cat"}}, "'<b>' is not one of the tokens to add"),
        ({"tokens": ["<a>"], "roles": {"end": "<e>"}}, "roles='end': choose bos_token, eos_token, pad_token"),
    ],
)
def test_wrong_calls_change_nothing(arguments: dict[str, Any], message: str) -> None:
    model, words = causal_model(), tokenizer()
    with pytest.raises(InvalidArgument, match=message):
        holdfast.tokens.add(model, words, **arguments)
    assert (len(words), model.config.vocab_size) == (len(WORDS), 15)


def test_models_that_cannot_grow_are_refused() -> None:
    with pytest.raises(Unsupported, match="no embedding of tokens"):
        holdfast.tokens.add(torch.nn.Linear(2, 2), tokenizer(), NEW)
    model = causal_model()
    model.model.second = torch.nn.Embedding(15, 4)
    with pytest.raises(Unsupported, match=r"second.weight has 15 rows"):
        holdfast.tokens.add(model, tokenizer(), NEW)
    quantized = causal_model()
    quantized.model.embed_tokens.weight = torch.nn.Parameter(torch.zeros(15, 32).to(torch.float8_e4m3fn), False)
    with pytest.raises(Unsupported, match="quantized embeddings"):
        holdfast.tokens.add(quantized, tokenizer(), NEW)


def test_a_token_that_the_tokenizer_changes_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    """A tokenizer in Python lower-cases added tokens: "FOO" would be <unk>, whose row must not become a new one."""
    from transformers import ProphetNetTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[SEP]", "[MASK]", "[X_SEP]", "the", "cat"]))
    words = ProphetNetTokenizer(str(tmp_path / "vocab.txt"))
    words.do_lower_case = True
    model = causal_model(rows=32)
    before = model.get_input_embeddings().weight.detach().clone()
    with pytest.raises(InvalidArgument, match=r"gives 'FOO' the id 1 of '\[UNK\]'.*lower case"):
        holdfast.tokens.add(model, words, ["<other>", "FOO"])
    assert "<other>" not in words.get_vocab()  # or a second call would take it for a known token
    assert torch.equal(model.get_input_embeddings().weight, before)
    assert holdfast.tokens.add(model, words, ["<FOO>"], special=True).rows == 32
