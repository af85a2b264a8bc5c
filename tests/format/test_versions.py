import pytest

from holdfast.core.errors import Damaged, Unsupported
from holdfast.format import versions


def test_the_current_version_passes_unchanged():
    fields = {"version": list(versions.CURRENT), "step": 3}
    assert versions.upgrade(fields, "w") == fields


def test_a_newer_minor_version_is_read():
    fields = {"version": [versions.CURRENT[0], versions.CURRENT[1] + 5]}
    assert versions.upgrade(fields, "w") is fields


def test_a_newer_major_version_is_refused_and_says_what_to_do():
    with pytest.raises(Unsupported, match=r"^run: written in format version 9\.3, .* install a newer version$"):
        versions.upgrade({"version": [9, 3]}, "run")


@pytest.mark.parametrize(
    "version", [None, 1, "1.0", [], [1], [1, 0, 0], [1.0, 0], [True, 0], ["1", "0"], [-1, 0], [1, -1], {"major": 1}]
)
def test_a_version_that_is_not_two_numbers_is_damage(version):
    with pytest.raises(Damaged, match="is not two numbers"):
        versions.upgrade({"version": version}, "run")


def test_a_missing_version_is_damage():
    with pytest.raises(Damaged, match="is not two numbers"):
        versions.upgrade({}, "run")


def test_a_version_that_never_was_is_damage():
    with pytest.raises(Damaged, match="format version 0 never existed"):
        versions.upgrade({"version": [0, 9]}, "run")


def test_older_versions_are_lifted_one_step_at_a_time(monkeypatch):
    monkeypatch.setattr(versions, "CURRENT", (3, 0))
    monkeypatch.setitem(versions.PATCHES, 1, lambda fields: fields | {"lifted": ["1 to 2"]})
    monkeypatch.setitem(versions.PATCHES, 2, lambda fields: fields | {"lifted": fields["lifted"] + ["2 to 3"]})
    assert versions.upgrade({"version": [1, 0]}, "w")["lifted"] == ["1 to 2", "2 to 3"]
