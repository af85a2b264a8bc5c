import pytest

from holdfast.core import errors
from holdfast.core.errors import HoldfastError, PeerFailed, error_from_record, error_record

BUILTINS = {
    errors.Damaged: ValueError,
    errors.NotFound: FileNotFoundError,
    errors.Mismatch: ValueError,
    errors.LayoutError: ValueError,
    errors.Unsupported: TypeError,
    errors.StorageError: OSError,
    errors.PeerFailed: RuntimeError,
}


@pytest.mark.parametrize("leaf", BUILTINS)
def test_every_leaf_is_a_holdfast_error_and_the_builtin_a_caller_expects(leaf):
    assert issubclass(leaf, HoldfastError)
    assert issubclass(leaf, BUILTINS[leaf])


@pytest.mark.parametrize("leaf", BUILTINS)
def test_an_error_survives_the_journey_to_another_rank(leaf):
    again = error_from_record(error_record(leaf("step-7/model: the digest differs")))
    assert type(again) is leaf
    assert str(again) == "step-7/model: the digest differs"


def test_the_record_of_an_error_is_plain_json():
    assert error_record(errors.Damaged("bad")) == ["Damaged", "bad"]


def test_a_foreign_error_becomes_peer_failed_and_keeps_its_name():
    again = error_from_record(error_record(ZeroDivisionError("division by zero")))
    assert type(again) is PeerFailed
    assert str(again) == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("name", ["SystemExit", "HoldfastError", "", "os.system"])
def test_a_record_can_only_make_known_errors(name):
    assert type(error_from_record([name, "text"])) is PeerFailed


def test_an_error_class_of_another_library_is_peer_failed_with_its_own_text():
    class Later(HoldfastError):
        pass

    assert error_record(Later("from a newer version")) == ["PeerFailed", "from a newer version"]
