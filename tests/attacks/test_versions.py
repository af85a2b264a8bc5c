"""Manifests of other versions: newer majors are refused with the way out, newer minors are read."""

import pytest

import holdfast
from holdfast.core.errors import Damaged
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.forge import examine, forge_manifest
from tests.attacks.versions import ATTACKS, FUTURE, NEVER


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_manifest_of_another_version_is_refused_or_read_for_what_it_is(original, tmp_path, attack):
    assert problem_of(attack, lay_out(attack, original, tmp_path)) == ""


@pytest.mark.parametrize("version", FUTURE, ids=str)
def test_a_newer_major_is_no_damage_and_says_what_to_do(checkpoint, version):
    forge_manifest(checkpoint, lambda fields: fields.update(version=version))
    with pytest.raises(holdfast.Unsupported, match=r"written in format version .*: install a newer version"):
        examine(checkpoint)


@pytest.mark.parametrize("version", NEVER, ids=str)
def test_a_version_that_never_was_is_damage(checkpoint, version):
    forge_manifest(checkpoint, lambda fields: fields.update(version=version))
    with pytest.raises(Damaged, match=r"is not two numbers|format version \d+ never existed"):
        examine(checkpoint)
