"""Links, pipes and folders where a file should be."""

import pytest

from holdfast.core.errors import Damaged
from tests.attacks.attack import lay_out, problem_of
from tests.attacks.files import ATTACKS, FILES, REPLACED
from tests.attacks.forge import examine


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_what_is_no_file_is_refused_at_once(original, tmp_path, attack):
    assert problem_of(attack, lay_out(attack, original, tmp_path)) == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("replaced", REPLACED)
def test_the_damage_is_that_it_is_no_file(checkpoint, name, replaced):
    replaced(checkpoint / name)
    with pytest.raises(Damaged, match=r"is a symbolic link, not a file|is not a regular file"):
        examine(checkpoint)
