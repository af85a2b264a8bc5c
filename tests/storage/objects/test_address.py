"""Addresses: one spelling for one place, nothing that leaves it, and no secret in it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.core.errors import HoldfastError, InvalidArgument, Unsupported
from holdfast.storage import locate, shared_storage_at
from holdfast.storage.objects.address import Address

SECRET = "wJalrXUtnFEMI"
SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")

LEAVING = [
    "..", ".", "%2e%2e", "%2E%2E", "%2e.", ".%2e", ".%2E", "%2e", "%252e%252e", "%25252e%25252e", "%252e.",
    "a%2f..%2fb", "a%2Fb", "a%252fb", "..%2f", "%2f", "a\\b", "..\\b", "a%5cb", "%2e%2e%5cb", "a%00b", "a\0b",
    "a\nb", "a\rb", "a\tb",
    "a%0ab", "a%0d%0ab", "a%7fb", "a\x7fb", "a\x1b[31mb", "a%1bb", "a\u202eb", "a%E2%80%AEb", "a%ffb", "a%c0%aeb",
    "\u2028",
]  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("segment", LEAVING, ids=ascii)
def test_a_segment_that_leaves_its_place_or_hides_is_refused(scheme, segment):
    for text in (f"{scheme}://bucket/run/{segment}/x", f"{scheme}://bucket/{segment}", f"{scheme}://bucket/{segment}/"):
        for open_it in (Address.parse, shared_storage_at, locate):
            with pytest.raises(InvalidArgument, match=r"write it as|bucket/folder") as caught:
                open_it(text)
            assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "bucket", ["..", ".", "%2e%2e", "a%2fb", "a\\b", "a b", "b:80", "a\nb", "", "[::1", "b%00", "é/.."]
)
def test_a_bucket_that_is_none_is_refused(bucket):
    with pytest.raises(InvalidArgument):
        Address.parse(f"s3://{bucket}/run")


@pytest.mark.parametrize("scheme", ["file", "memory", "mem", "http", "https", "ftp", "hdfs"])
@pytest.mark.parametrize("path", ["/a/../x", "/a/%2e%2e/x", "b/%2e%2e/x"])
def test_schemes_without_a_storage_are_refused_whatever_the_path(scheme, path):
    with pytest.raises(Unsupported, match="no storage supports"):
        shared_storage_at(f"{scheme}://{path}")


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("s3://bucket/a%20b/c", "s3://bucket/a b/c"),
        ("s3://bucket/a b/c", "s3://bucket/a b/c"),
        ("s3://bucket/%C3%A9", "s3://bucket/é"),
        ("s3://bucket/é", "s3://bucket/é"),
        ("s3://bucket/step%2D1", "s3://bucket/step-1"),
        ("s3://bucket/100%", "s3://bucket/100%25"),
        ("s3://bucket/100%25", "s3://bucket/100%25"),
        ("s3://bucket/what%3F", "s3://bucket/what%3F"),
        ("s3://bucket/a%23b", "s3://bucket/a%23b"),
        ("s3://bucket//a//b/", "s3://bucket/a/b"),
        ("s3://bucket/a..b/..c/d../...", "s3://bucket/a..b/..c/d../..."),
        ("S3://bucket/Run", "s3://bucket/Run"),
        ("abfss://container@account.dfs.core.windows.net/run", "abfss://container@account.dfs.core.windows.net/run"),
    ],
)
def test_every_spelling_of_a_place_is_the_same_address(text, url):
    address = Address.parse(text)
    assert address.url == url
    assert Address.parse(address.text) == address


@pytest.mark.parametrize("text", ["s3://bucket/a%20b", "s3://bucket/100%", "s3://bucket/what%3F", "s3://bucket/é/x%23"])
def test_the_store_sees_the_same_prefix_as_the_address_names(text):
    store = pytest.importorskip("obstore").store
    address = Address.parse(text)
    assert store.from_url(address.url).prefix == address.prefix
    assert address.bucket == "bucket"


CREDENTIALS = [
    f"s3://AKIA:{SECRET}@bucket/run",
    f"s3://{SECRET}@bucket/run",
    f"gs://:{SECRET}@bucket/run",
    f"az://user:{SECRET}@container/run",
    f"abfss://container:{SECRET}@account.dfs.core.windows.net/run",
    f"s3://AKIA:wJal/r{SECRET}@bucket/run",
    f"s3://AKIA%3A{SECRET}%40bucket/run",
    f"s3://bucket/run?aws_access_key_id={SECRET}",
    f"s3://bucket/run?aws_secret_access_key={SECRET}&deadline_s=5",
    f"s3://bucket/run?deadline_s=5&AWS_SESSION_TOKEN={SECRET}",
    f"s3://bucket/run?X-Amz-Algorithm=AWS4&X-Amz-Credential={SECRET}&X-Amz-Signature={SECRET}",
    f"az://container/run?sv=2024-01-01&se=2027&sig={SECRET}",
    f"az://container/run?AccountKey={SECRET}",
    f"gs://bucket/run?access_token={SECRET}",
    f"gs://bucket/run?X-Goog-Signature={SECRET}",
    f"s3://bucket/run?unknown={SECRET}",
    f"s3://bucket/run?{SECRET}",
    f"s3://bucket/run?deadline_s={SECRET}",
    f"s3://bucket/run#{SECRET}",
    f"s3://bucket/run?%74oken={SECRET}",
    f"https://user:{SECRET}@host/run?sig={SECRET}",
    f"https://account.blob.core.windows.net/c/run?sv=1&{SECRET}",
]


@pytest.mark.parametrize("text", CREDENTIALS, ids=range(len(CREDENTIALS)))
def test_an_address_with_a_secret_is_refused_and_never_repeated(text):
    for open_it in (Address.parse, shared_storage_at, locate, holdfast.Checkpointer, holdfast.open):
        with pytest.raises(HoldfastError) as caught:
            open_it(text)
        seen: list[str] = []
        error: BaseException | None = caught.value
        while error is not None:
            seen.append(f"{error!r} {error}")
            error = error.__cause__ or error.__context__
        assert SECRET not in " ".join(seen)
    assert SECRET not in repr(pickle.loads(pickle.dumps(caught.value)))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (f"s3://AKIA:{SECRET}@bucket/run", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "user and password"]),
        (f"s3://bucket/run?token={SECRET}", ["AWS_ACCESS_KEY_ID", "'token'"]),
        (f"gs://bucket/run?access_token={SECRET}", ["GOOGLE_APPLICATION_CREDENTIALS"]),
        (f"az://container/run?sig={SECRET}", ["AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY"]),
    ],
)
def test_the_error_says_where_credentials_belong(text, names):
    with pytest.raises(InvalidArgument) as caught:
        Address.parse(text)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ls", "show", "verify", "gc", "tag", "top"])
def test_commands_do_not_repeat_a_secret(command):
    done = subprocess.run(
        [sys.executable, "-m", "holdfast", command, f"s3://AKIA:{SECRET}@bucket/run?sig={SECRET}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "AWS_SECRET_ACCESS_KEY" in done.stderr
    assert SECRET not in done.stdout + done.stderr


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_address_that_pathlib_took_for_a_path_is_refused(scheme, tmp_path, monkeypatch):
    """Path("s3://bucket/run") is "s3:/bucket/run", which would be a folder of this machine."""
    monkeypatch.chdir(tmp_path)
    for open_it in (shared_storage_at, locate, holdfast.Checkpointer):
        with pytest.raises(InvalidArgument, match="pass the address as a str"):
            open_it(Path(f"{scheme}://bucket/run"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("open_it", [shared_storage_at, locate, holdfast.open, holdfast.Checkpointer])
def test_a_path_with_a_null_character_is_refused(open_it):
    with pytest.raises(InvalidArgument, match="null character"):
        open_it("run\0x")
