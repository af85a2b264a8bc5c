import pytest

from holdfast.core.errors import InvalidArgument, NotFound
from holdfast.merging.merge_file import read_merge_file

TOML = """
method = "ties"
base = "base"
donor = "second"
remove = "*.inv_freq"
dtype = "bfloat16"
[parameters]
normalize = false
[[models]]
path = "a"
weight = 0.5
density = {"*.mlp.*" = 0.3, "*" = [0.1, 0.2]}
[[models]]
path = "/m/b"
name = "second"
mapping = "names.aoa"
"""


def test_the_fields_of_a_toml_file(tmp_path):
    (tmp_path / "merge.toml").write_text(TOML)
    (tmp_path / "names.aoa").write_text("a -> b\n")
    options = read_merge_file(tmp_path / "merge.toml")
    assert [model.path for model in options.all_models] == [f"{tmp_path}/a", "/m/b", f"{tmp_path}/base"]
    assert options.method == "ties" and options.remove == ("*.inv_freq",) and options.dtype == "bfloat16"
    assert options.models[0].parameters["density"].at("x.mlp.y", 0) == 0.3
    assert options.models[0].parameters["density"].at("x", 1) == 0.2
    assert options.models[1].mapping == f"{tmp_path}/names.aoa" and options.donor == "second"
    assert options.parameters["normalize"].at("x", 0) is False


def test_slices_of_a_yaml_file(tmp_path):
    text = (
        "method: passthrough\nslices:\n- models: [{path: a, layers: [0, 2]}]\n- models: [{path: b, layers: [1, 3]}]\n"
    )
    (tmp_path / "merge.yaml").write_text(text + "- models: [{path: a, layers: [2, 3], scale: 0.5}]\n")
    options = read_merge_file(tmp_path / "merge.yaml")
    assert [model.path for model in options.models] == [f"{tmp_path}/a", f"{tmp_path}/b"]
    sources = [part.sources[0] for part in options.slices]
    assert [(s.model, s.begin, s.end) for s in sources] == [(0, 0, 2), (1, 1, 3), (0, 2, 3)]
    assert sources[2].parameters["scale"].at("x", 0) == 0.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: [a]\nweight: 3\n", "unknown field 'weight'"),
        ("method: linear\n", "either models or slices"),
        ("models: a\n", "models: expected a list"),
        ("models: [{name: x}]\n", "a model needs a path"),
        ("slices: [{models: []}]\n", "a slice needs models"),
        ("slices: [{models: [{path: a, layers: 3}]}]\n", "expected layers as"),
        ("slices: [{models: [{path: a, layers: [0, 2]}, {path: b, layers: [0, 1]}]}]\n", "equally many layers"),
        ("slices: [{models: [{path: a, layers: [2, 2]}]}]\n", "a first layer, and one after it"),
        ("- models\n", "expected fields"),
        ("models: [a\n", "merge.yaml"),
        ("models: [a]\ntokens: all\n", "choose 'union'"),
        ("models: [!!python/object/apply:os.getcwd []]\n", "merge.yaml"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, text, problem):
    (tmp_path / "merge.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=problem):
        read_merge_file(tmp_path / "merge.yaml")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(NotFound, match="No such file"):
        read_merge_file(tmp_path / "merge.yaml")
    (tmp_path / "merge.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="not a text file"):
        read_merge_file(tmp_path / "merge.yaml")
    (tmp_path / "merge.toml").write_text("x = [")
    with pytest.raises(InvalidArgument, match=r"merge\.toml"):
        read_merge_file(tmp_path / "merge.toml")
