"""The collector is paused within, and afterwards as it was."""

from __future__ import annotations

import gc

import pytest

from holdfast.core.collector import paused_collector


def test_the_collector_is_paused_and_goes_on():
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_collector():
        assert not gc.isenabled()
        with paused_collector():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_collector_that_the_program_has_paused_stays_so():
    gc.disable()
    try:
        with paused_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
