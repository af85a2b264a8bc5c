import time

import click
import pytest

from holdfast.cli.launched import report_on_first_rank
from holdfast.core.errors import Damaged, Mismatch


def test_the_first_rank_reports():
    with pytest.raises(Mismatch), report_on_first_rank(0):
        raise Mismatch("x")


@pytest.mark.parametrize(("error", "code"), [(Damaged, 1), (Mismatch, 2)])
def test_other_ranks_exit_later_and_silently(error, code):
    start = time.monotonic()
    with pytest.raises(click.exceptions.Exit) as caught, report_on_first_rank(1):
        raise error("x")
    assert caught.value.exit_code == code and time.monotonic() - start > 0.5
