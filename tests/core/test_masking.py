"""Secrets in addresses and in what stores say never reach a message."""

import pytest

from holdfast.core.masking import is_secret_name, masked

SECRET = "wJalrXUtnFEMI"


@pytest.mark.parametrize(
    "text",
    [
        f"s3://AKIA:{SECRET}@bucket/run",
        f"https://{SECRET}@host/x",
        f"https://user:{SECRET}@host/x",
        f"https://user:pa/ss{SECRET}@host/x",
        f"s3://bucket/run?aws_secret_access_key={SECRET}",
        f"s3://bucket/run?AWS_SECRET_ACCESS_KEY={SECRET}&deadline_s=3",
        f"s3://bucket/run?secret={SECRET}",
        f"az://c/x?sv=2024&sig={SECRET}%3D&se=2027",
        f"Error performing GET https://a.blob.core.windows.net/c/x?sv=2&sig={SECRET} in 3ms, after 2 retries",
        f"GET https://b.s3.amazonaws.com/k?X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}&X-Amz-Security-Token={SECRET}",
        f"https://storage.googleapis.com/b/k?X-Goog-Signature={SECRET}",
        f"Authorization: AWS4-HMAC-SHA256 Credential={SECRET}/20260101/us-east-1/s3/aws4_request, Signature={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=core.windows.net",
        f'{{"access_token": "{SECRET}", "password":"{SECRET}"}}',
        f"proxy http://user:{SECRET}@proxy:3128 refused",
        f"s3://bucket/run?x={SECRET}&token={SECRET}",
    ],
)
def test_a_secret_is_masked(text):
    assert SECRET not in masked(text).replace(f"x={SECRET}&", "")
    assert "***" in masked(text)


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/run?deadline_s=3&grace_s=60",
        "abfss://container@account.dfs.core.windows.net/run",
        "reading /home/me@lab/run/step-000000000001: Input/output error",
        "w: the dtype differs: stored int64, live float32; pass cast=True to convert",
        "tokens=5: model.embed_tokens.weight has shape (5, 4)",
        "keep=last(3) | every(1000); sigma=0.1, design=2, signal=SIGTERM",
        "gs://b/run: there is no bucket 'b'",
        "",
    ],
)
def test_other_text_stays_as_it_is(text):
    assert masked(text) == text


def test_the_place_stays_readable():
    assert masked("s3://me:pw@bucket/run?deadline_s=3&sig=abc") == "s3://***@bucket/run?deadline_s=3&sig=***"


@pytest.mark.parametrize(
    "name",
    ["aws_access_key_id", "AWS_SECRET_ACCESS_KEY", "token", "session_token", "sig", "sas", "signature",
     "X-Amz-Signature", "X-Amz-Credential", "x-goog-signature", "AccountKey", "account_key", "sas_token",
     "password", "pwd", "secret",
     "client_secret", "api-key", "apikey", "access_key", "credential", "credentials", "bearer", "auth", "authorization",
     "private_key", "passphrase", "accesskeyid"],
)  # fmt: skip
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["deadline_s", "grace_s", "timeout_s", "region", "endpoint", "keep", "monkey", "sigma"]
)
def test_other_names(name):
    assert not is_secret_name(name)
