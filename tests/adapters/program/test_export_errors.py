"""What export refuses of transformers' models, by name; the way out of each message leads to a program."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast import Unsupported, export_program, load_program
from tests.adapters.program.models import AUTO

transformers = pytest.importorskip("transformers", reason="transformers is not installed: make setup")
pytestmark = pytest.mark.slow

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_IDS = {"input_ids": torch.arange(12).reshape(2, 6)}


@pytest.fixture(scope="module")
def experts():
    config = transformers.MixtralConfig(**_SIZES, num_local_experts=4, use_cache=False)
    return transformers.MixtralForCausalLM(config).eval()


@pytest.mark.parametrize(
    "implementation, problem",
    [
        ("grouped_mm", r"transformers\.grouped_mm_fallback\.default \(called in model\.layers\.0\.mlp\.experts at "),
        ("eager", "MixtralForCausalLM decides by the values of its tensors"),
    ],
)
def test_experts_are_refused_with_the_implementation_that_can_be_exported(experts, implementation, problem):
    experts.set_experts_implementation(implementation)
    with pytest.raises(Unsupported, match=problem) as caught:
        export_program(experts, _IDS, {"input_ids": {0: AUTO, 1: AUTO}})
    assert "model.set_experts_implementation('batched_mm')" in str(caught.value)


def test_the_program_of_batched_experts_is_the_model_in_every_implementation(experts):
    experts.set_experts_implementation("batched_mm")
    module = load_program(export_program(experts, _IDS, {"input_ids": {0: AUTO, 1: AUTO}}), weights=experts)
    longer = {"input_ids": torch.arange(27).reshape(3, 9)}
    for implementation in ("batched_mm", "eager", "grouped_mm"):
        experts.set_experts_implementation(implementation)
        torch.testing.assert_close(module(**longer).logits, experts(**longer).logits, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SIZES, bos_token_id=1, eos_token_id=63)).eval()


def test_a_cache_among_the_outputs_is_refused_with_the_way_out(decoder):
    with pytest.raises(Unsupported, match=r"returns a transformers\.\S+\.DynamicCache.*config\.use_cache = False"):
        export_program(decoder, _IDS)
    decoder.config.use_cache = False
    module = load_program(export_program(decoder, _IDS), weights=decoder)
    assert torch.equal(module(**_IDS).logits, decoder(**_IDS).logits)
    decoder.config.use_cache = True


def test_a_cache_among_the_inputs_is_refused(decoder):
    cache = decoder(**_IDS).past_key_values
    with pytest.raises(Unsupported, match=r"^past_key_values is a DynamicCache.*wrap it in a module whose forward"):
        export_program(decoder, {"input_ids": _IDS["input_ids"][:, :1], "past_key_values": cache})


class OneStep(nn.Module):
    """The wrapper of the message: keys and values as tensors, one pair for each layer."""

    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids, keys, values):
        cache = transformers.DynamicCache(list(zip(keys, values, strict=True)))
        logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
        return logits, [layer.keys for layer in cache.layers], [layer.values for layer in cache.layers]


def test_a_program_of_one_step_generates_as_the_model_does(decoder):
    wrapped = OneStep(decoder)
    cache = decoder(**_IDS, use_cache=True).past_key_values
    keys, values = ([getattr(layer, name) for layer in cache.layers] for name in ("keys", "values"))
    lengths = [{0: AUTO, 2: AUTO}]
    sizes = {"ids": {0: AUTO}, "keys": lengths, "values": lengths}
    step = load_program(export_program(wrapped, (_IDS["input_ids"][:, :1], keys, values), sizes), weights=wrapped)
    expected = decoder.generate(**_IDS, max_new_tokens=8, do_sample=False, eos_token_id=None)
    found = _IDS["input_ids"]
    token = decoder(**_IDS).logits[:, -1:].argmax(-1)
    for _ in range(8):
        found = torch.cat([found, token], 1)
        logits, keys, values = step(token, keys, values)
        token = logits[:, -1:].argmax(-1)
    assert torch.equal(found, expected) and keys[0].shape[2] == 14
