"""What object stores say in their errors: repeated without the secrets in it."""

from __future__ import annotations

import traceback

import pytest

from holdfast.core.errors import StorageError

pytest.importorskip("obstore")

from holdfast.storage.objects.address import Address
from holdfast.storage.objects.calls import Calls, without_secrets

SECRET = "wJalrXUtnFEMI"
ANSWERS_NOT = "127.0.0.1:9"  # the discard port


@pytest.mark.parametrize(
    "told",
    [
        {"AWS_ENDPOINT_URL": f"http://user:{SECRET}@{ANSWERS_NOT}"},
        {"AWS_ENDPOINT_URL": f"http://{ANSWERS_NOT}", "AWS_PROXY_URL": f"http://user:{SECRET}@{ANSWERS_NOT}"},
    ],
    ids=["endpoint", "proxy"],
)
def test_an_endpoint_with_a_password_is_not_repeated(told, monkeypatch):
    keys = {
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }
    for name, value in {**keys, **told}.items():
        monkeypatch.setenv(name, value)
    calls = Calls(Address.parse("s3://bucket/run?deadline_s=0.2&timeout_s=1"))
    for call in (calls.prefixes, lambda: calls.put("x", b""), lambda: calls.put_once("x", b"", None)):
        with pytest.raises(StorageError) as caught:
            call()
        assert SECRET not in "".join(traceback.format_exception(caught.value))
        assert calls.is_retryable(caught.value)  # the masked cause is judged as the true one


class Odd(Exception):
    """An error that cannot be made from a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)


def test_any_error_is_masked():
    text = f"GET https://a.example/x?sig={SECRET}"
    for error in (OSError(text), Odd(1, text)):
        said = without_secrets(error)
        assert isinstance(said, OSError) and SECRET not in f"{said} {said!r}" and "sig=***" in str(said)
    plain = OSError("reset by peer")
    assert without_secrets(plain) is plain
