import pytest

from holdfast.core.errors import InvalidArgument
from holdfast.merging.merge_options import MergeOptions, ModelOptions, model_names, settings_of


def of(*paths):
    return [ModelOptions(path) for path in paths]


def test_names_are_the_shortest_ends_that_differ():
    assert model_names(of("/m/a", "/m/b")) == ["a", "b"]
    assert model_names(of("/m/a/final", "/m/b/final", "/m/c")) == ["a/final", "b/final", "c"]


def test_names_do_not_depend_on_the_order():
    paths = ["/m/a/final", "/m/b/final", "/final", "/m/c"]
    assert set(model_names(of(*paths))) == set(model_names(of(*reversed(paths))))


def test_a_model_twice_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with pytest.raises(InvalidArgument, match="twice"):
        model_names(of(f"{tmp_path}/a", f"{tmp_path}/link"))


def test_a_base_among_the_models_is_not_added():
    base = ModelOptions("/m/a/")
    assert len(MergeOptions(tuple(of("/m/a", "/m/b")), base=base).all_models) == 2
    assert [m.path for m in MergeOptions(tuple(of("/m/b")), base=base).all_models] == ["/m/b", "/m/a/"]


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"out_dtype": "fp8"}, {"rng": "numpy"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(InvalidArgument):
        MergeOptions(tuple(of("/m/a")), **options)


def test_a_merge_of_nothing_is_refused():
    with pytest.raises(InvalidArgument, match="at least one model"):
        MergeOptions(())


def test_parameters_without_a_value_are_left_out():
    assert settings_of({"weight": None, "density": 0.5}).keys() == {"density"}
