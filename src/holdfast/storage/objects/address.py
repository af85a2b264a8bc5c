"""Addresses of object stores: `s3://bucket/run`, with options behind a question mark.

The address is all that a writer process is told, so everything that matters is in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from holdfast.core.errors import InvalidArgument, Unsupported
from holdfast.core.masking import is_secret_name, is_user_info

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
_OPTIONS = {"deadline_s": 120.0, "timeout_s": 60.0, "grace_s": 3600.0}
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]*(@[A-Za-z0-9][A-Za-z0-9._\-]*)?")  # abfs: container@account
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN"
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), or an instance role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the path of a key file",
    "az": _AZURE,
    "ab": _AZURE,
}
_LOST_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/[^/]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """A root in an object store. Seconds: of a call with all its retries, of one request, of what is removed."""

    url: str
    deadline_s: float = _OPTIONS["deadline_s"]
    timeout_s: float = _OPTIONS["timeout_s"]
    grace_s: float = _OPTIONS["grace_s"]

    @property
    def text(self) -> str:
        """The address with its options, such as `Address.parse` takes."""
        told = {name: f"{getattr(self, name):g}" for name, usual in _OPTIONS.items() if getattr(self, name) != usual}
        return f"{self.url}?{urlencode(told)}" if told else self.url

    @property
    def bucket(self) -> str:
        """The bucket or container."""
        return self.url.split("/")[2]

    @property
    def prefix(self) -> str:
        """What the keys of all objects of this root begin with, "" for a whole bucket."""
        return unquote("/".join(self.url.split("/")[3:]))

    @staticmethod
    def parse(text: str) -> Address:
        """Read an address; raises Unsupported for a scheme, InvalidArgument for anything else that is odd.

        Different spellings of one place give the same address. No error repeats the text: it may
        hold a secret in a place where none belongs.
        """
        scheme, bucket, path, query, fragment = _parts(text)
        if scheme not in SCHEMES:
            raise Unsupported(f"{scheme}://...: no storage is known for {scheme}://; use a path, or {_known()}")
        options = dict(parse_qsl(query, keep_blank_values=True))
        _refuse_secrets(scheme, bucket, options)
        if not _BUCKET.fullmatch(bucket) or fragment:
            why = "it has a part after '#'" if fragment else "its bucket has a character that no bucket has"
            raise InvalidArgument(f"{scheme}://...: {why}; write it as {scheme}://bucket/folder")
        segments = [_segment(segment, f"{scheme}://{bucket}") for segment in path.split("/") if segment]
        url = "/".join([f"{scheme}://{bucket}", *segments])
        return Address(url, **{name: _seconds(url, name, value) for name, value in options.items()})

    def split(self) -> tuple[Address, str]:
        """The root above a folder and the folder's name; raises InvalidArgument for a bucket alone."""
        head, _, folder = self.url.rpartition("/")
        if head.endswith("/"):
            raise InvalidArgument(f"{self.url} is a whole bucket: name a folder in it")
        return Address(head, self.deadline_s, self.timeout_s, self.grace_s), folder


def is_address(text: str) -> bool:
    """Whether a text is an address and not a path: `s3://bucket` must never become a local folder.

    Raises InvalidArgument for an address that went through `pathlib.Path`.
    """
    if _LOST_SLASH.match(text):
        raise InvalidArgument(
            f"{text.partition(':')[0]}:/...: pathlib merges the slashes of an address: give it as a text"
        )
    return "://" in text


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)


def _parts(text: str) -> tuple[str, str, str, str, str]:
    if not text.isprintable():  # urlsplit would drop tabs and line breaks without a word
        raise InvalidArgument("an address with a control character; write it as s3://bucket/folder")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise InvalidArgument("an address that cannot be read; write it as s3://bucket/folder") from None
    return parts.scheme.lower(), parts.netloc, parts.path, parts.query, parts.fragment


def _refuse_secrets(scheme: str, bucket: str, options: Mapping[str, str]) -> None:
    """Raise InvalidArgument for an address with credentials: it goes into logs, messages and files."""
    secret = [f"the option {name!r}" for name in options if is_secret_name(name)]
    user = bucket.rpartition("@")[0]
    if user and is_user_info(scheme, user):
        secret.insert(0, "a user and password before the bucket")
    if secret:
        raise InvalidArgument(
            f"{scheme}://...: the address holds credentials ({', '.join(secret)}), and addresses are written "
            "into logs, error messages and files; take them out, and give them by the environment: "
            f"{_ENVIRONMENT[scheme[:2]]}"
        )


def _segment(text: str, where: str) -> str:
    """One part of a path in its one spelling; raises InvalidArgument if some reader could take it for a way out."""
    decoded = [text]
    while (further := _decoded(decoded[-1], where)) != decoded[-1]:
        decoded.append(further)
    for form in decoded:
        if form in (".", "..") or not form.isprintable() or set(form) & set("/\\"):
            raise InvalidArgument(
                f"{where}/...: {text[:80]!a} is not a folder's name; write it as {where}/folder without "
                "'.', '..', backslashes, control characters and encoded slashes"
            )
    # Only what would end the path or be decoded again stays encoded, so that messages can be read.
    return re.sub("[%?#]", lambda found: quote(found[0]), decoded[min(1, len(decoded) - 1)])


def _decoded(text: str, where: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"{where}/...: {text[:80]!a} does not decode to text; write it as {where}/folder"
        ) from None


def _seconds(url: str, name: str, value: str) -> float:
    if name not in _OPTIONS:
        what = f"no option {name[:40]!r}" if value else "no option without a value"  # a name alone may be a secret
        raise InvalidArgument(f"{url}: there is {what}; there are {', '.join(_OPTIONS)}")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not (0 < seconds < float("inf") or (seconds == 0 and name == "grace_s")):
        raise InvalidArgument(f"{url}: {name} is not a number of seconds; options go at the very end of an address")
    return seconds
