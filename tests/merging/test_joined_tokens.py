import json
from typing import Any

import pytest
import safetensors.torch
import torch

import holdfast
from holdfast.core.errors import Damaged, Mismatch, Unsupported
from tests.merging.models import same, tensors, write

REGULAR = [f"t{number}" for number in range(90)]


def tokenizer(added, regular=REGULAR):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({token: number for number, token in enumerate(regular)}, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in added])
    return made


@pytest.fixture
def model(tmp_path):
    def make(name, added, seed=None, regular=REGULAR, **options):
        path = write(tmp_path / name, seed=seed, **options)
        tokenizer(added, regular).save(str(path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {}}
        (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
        return path

    return make


def embedding(path, key="model.embed_tokens.weight"):
    return tensors(path)[key].float()


def test_tokens_are_joined_by_name(model, tmp_path):
    a, b = model("a", ["<x>", "<y>"], 1), model("b", ["<z>", "<x>"], 2)  # <x> is 90 and 91, <y> 91, <z> 90
    done = holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union")
    for key in ("model.embed_tokens.weight", "lm_head.weight"):
        found, of_a, of_b = embedding(tmp_path / "out", key), embedding(a, key), embedding(b, key)
        assert found.shape == of_a.shape
        assert torch.equal(found[:90], ((of_a[:90] + of_b[:90]) / 2).bfloat16().float())
        assert torch.equal(found[90], ((of_a[90] + of_b[91]) / 2).bfloat16().float())  # both have it
        assert torch.equal(found[91], of_a[91]) and torch.equal(found[92], of_b[90])  # one has it: its row
        assert torch.equal(found[93:], of_a[93:])  # rows without a token are the donor's
    assert any("1 appended" in note for note in done.notes)
    table = json.loads((tmp_path / "out" / "merge_record.json").read_text())["tokens"]
    assert table["appended"] == {"<z>": 92} and table["filled"] == {"a": ["<z>"], "b": ["<y>"]}


def test_the_tokenizer_and_config_follow(model, tmp_path):
    transformers: Any = pytest.importorskip("transformers")
    added = [f"<{number}>" for number in range(20)]
    a, b = model("a", added[:6], 1), model("b", added, 2)
    rows = {key: torch.cat([value, value[:32]]) if len(value) == 96 else value for key, value in tensors(b).items()}
    safetensors.torch.save_file(rows, b / "model.safetensors")  # more tokens than rows of a
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union")
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    known = transformers.AutoTokenizer.from_pretrained(a)
    assert [opened.convert_tokens_to_ids(token) for token in added] == list(range(90, 110))
    assert opened("t1 <3> t5").input_ids == known("t1 <3> t5").input_ids == [1, 93, 5]
    assert opened("<19>").input_ids == [109]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == embedding(tmp_path / "out").shape[0] == 110
    found, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and found.get_input_embeddings().num_embeddings == 110


def test_a_token_that_the_base_lacks_is_no_change(model, tmp_path):
    base, a = model("base", []), model("a", ["<x>"], 1)
    holdfast.merge([a], tmp_path / "out", method="task_arithmetic", base=base, weights=[0.5], tokens="union")
    assert torch.equal(embedding(tmp_path / "out")[90], embedding(a)[90])


def test_a_row_of_several_models_is_their_mean(model, tmp_path):
    a, b, c = model("a", [], 1), model("b", ["<x>"], 2), model("c", ["<x>"], 3)
    holdfast.merge([a, b, c], tmp_path / "out", weights=[1, 0, 0], tokens="union")
    expected = ((embedding(b)[90] + embedding(c)[90]) / 2).bfloat16().float()
    assert torch.equal(embedding(tmp_path / "out")[90], expected)


def test_the_donors_tokens_only(model, tmp_path):
    a, b = model("a", ["<x>", "<y>"], 1), model("b", ["<z>", "<x>"], 2)
    done = holdfast.merge([b, a], tmp_path / "out", weights=[1, 1], tokens="donor", donor=str(a))
    found, of_a, of_b = (embedding(path) for path in (tmp_path / "out", a, b))
    assert torch.equal(found[90], ((of_a[90] + of_b[91]) / 2).bfloat16().float())  # both have it
    assert torch.equal(found[91:], of_a[91:])  # no row of <z>, and <y> only a has
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (a / "tokenizer.json").read_bytes()
    assert any("0 appended, filled: 1 in b, left out: 1 in b" in note for note in done.notes)
    table = json.loads((tmp_path / "out" / "merge_record.json").read_text())["tokens"]
    assert table["appended"] == {} and table["left_out"] == {"a": [], "b": ["<z>"]}


def test_the_donors_tokens_of_models_without_a_tokenizer_json(tmp_path):
    a, b = write(tmp_path / "a", seed=1), write(tmp_path / "b", seed=2)
    for path in (a, b):
        (path / "tokenizer.model").write_bytes(b"pieces")
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="donor")
    assert same(tensors(tmp_path / "out"), tensors(_rows(a, b, tmp_path)))
    (b / "tokenizer.model").write_bytes(b"others")
    with pytest.raises(Mismatch, match=r"tokenizer\.model of .*b is not that of .*a"):
        holdfast.merge([a, b], tmp_path / "no", weights=[1, 1], tokens="donor")


def _rows(a, b, folder):
    holdfast.merge([a, b], folder / "rows", weights=[1, 1], tokens="rows")
    return folder / "rows"


@pytest.mark.parametrize("donor", ["a", "b"])
def test_tokens_past_the_rows_of_their_model_are_not_appended(model, tmp_path, donor):
    a, b = model("a", ["<x>"], 1), model("b", ["<x>", *(f"<{number}>" for number in range(9))], 2)  # 96 rows each
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union", donor=str(tmp_path / donor))
    assert embedding(tmp_path / "out").shape[0] == 96
    table = json.loads((tmp_path / "out" / "merge_record.json").read_text())["tokens"]
    assert table["appended"] == ({f"<{number}>": 91 + number for number in range(5)} if donor == "a" else {})
    assert table["left_out"]["b"] == ([f"<{number}>" for number in range(5, 9)] if donor == "a" else [])


def test_padded_rows_never_shrink_and_grow_to_a_multiple(model, tmp_path):
    a, b = model("a", [], 1), model("b", ["<x>"], 2)
    holdfast.merge([b, a], tmp_path / "out", weights=[1, 1], tokens="union")
    assert embedding(tmp_path / "out").shape[0] == 96
    assert (tmp_path / "out" / "config.json").read_bytes() == (b / "config.json").read_bytes()
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (b / "tokenizer.json").read_bytes()


def test_other_tokens_are_refused_without_a_choice(model, tmp_path):
    a, b = model("a", ["<x>", "<y>"], 1), model("b", ["<z>", "<x>"], 2)
    with pytest.raises(Mismatch, match=r"the token '<x>' is number 91 in .*, and 90 in .*--tokens union"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    assert not (tmp_path / "out").exists()
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="rows")
    assert torch.equal(embedding(tmp_path / "out")[90], ((embedding(a)[90] + embedding(b)[90]) / 2).bfloat16().float())


def test_tokens_that_only_one_model_has_need_no_choice(model, tmp_path):
    a, b = model("a", ["<x>"], 1), model("b", [], 2)
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    assert torch.equal(embedding(tmp_path / "out")[90], ((embedding(a)[90] + embedding(b)[90]) / 2).bfloat16().float())


def test_another_tokenizer_is_refused_with_an_example(model, tmp_path):
    a, b = model("a", [], 1), model("b", [], 2, regular=[f"s{number}" for number in range(90)])
    both = rf"{b} has another tokenizer than {a}: 180 regular tokens are not in both, for example 's0'"
    with pytest.raises(Mismatch, match=rf"{both}.*only added tokens can be joined$"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union")
    with pytest.raises(Mismatch, match=rf"{both}.*--tokens rows"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    (b / "tokenizer.json").unlink()
    with pytest.raises(Unsupported, match=r"joined with a tokenizer\.json"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_longer_base_vocabulary_is_refused_though_its_ids_agree(model, tmp_path):
    """Regular tokens cannot be appended: a tokenizer would never produce them."""
    a, b = model("a", [], 1), model("b", [], 2, regular=[*REGULAR, "s90", "s91", "s92"])
    for donor in (a, b):
        with pytest.raises(Mismatch, match=r"another tokenizer than .*3 regular tokens .*'s90', 's91', 's92'"):
            holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union", donor=str(donor))


def test_the_same_base_vocabulary_in_another_order_is_joined_by_token(model, tmp_path):
    a, b = model("a", ["<x>"], 1), model("b", ["<x>"], 2, regular=REGULAR[::-1])
    holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union")
    of_b = torch.cat([embedding(b)[:90].flip(0), embedding(b)[90:91]])
    expected = ((embedding(a)[:91] + of_b) / 2).bfloat16().float()
    assert torch.equal(embedding(tmp_path / "out")[:91], expected)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (a / "tokenizer.json").read_bytes()
    with pytest.raises(Mismatch, match="--tokens union"):
        holdfast.merge([a, b], tmp_path / "no", weights=[1, 1])


@pytest.mark.parametrize("number", [2**60, -1, "7", None, True, 1.5])
def test_ids_that_no_row_can_have_are_refused(model, tmp_path, number):
    a, b = model("a", [], 1), model("b", ["<x>"], 2)
    fields = json.loads((b / "tokenizer.json").read_text())
    fields["added_tokens"][0]["id"] = number
    (b / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(Damaged, match=r"tokenizer\.json: the id of '<x>' is"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1], tokens="union")
    fields["added_tokens"], fields["model"]["vocab"]["t5"] = [], number
    (b / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(Damaged, match=r"tokenizer\.json: the id of 't5' is"):
        holdfast.merge([a, b], tmp_path / "out", weights=[1, 1])
    assert not (tmp_path / "out").exists()


def test_each_model_may_have_files_of_its_own(model, tmp_path):
    a, b = model("a", ["<x>"], 1, max_shard_size="20KB"), model("b", ["<z>"], 2)
    c = model("c", ["<z>"], 2, max_shard_size="30KB")
    holdfast.merge([a, b], tmp_path / "whole", tokens="union")
    holdfast.merge([a, c], tmp_path / "sharded", tokens="union")
    assert same(tensors(tmp_path / "whole"), tensors(tmp_path / "sharded"))
    models = json.loads((tmp_path / "sharded" / "merge_record.json").read_text())["models"]
    for path, digested in zip((a, c), models, strict=True):
        assert set(digested["digests"]) == {file.name for file in path.glob("*.safetensors")}
