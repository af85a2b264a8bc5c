"""Addresses of object stores, `s3://bucket/run?option=value`: parsed, checked for secrets, split.

A writer process receives only the address, so the address carries every option.
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


@dataclass(frozen=True, slots=True)
class Address:
    """A root in an object store.

    `deadline_s` limits a call with all its retries, `timeout_s` one request. Removed data is kept
    for `grace_s`.
    """

    url: str
    deadline_s: float = _OPTIONS["deadline_s"]
    timeout_s: float = _OPTIONS["timeout_s"]
    grace_s: float = _OPTIONS["grace_s"]

    @property
    def text(self) -> str:
        """The address with its options, as accepted by `Address.parse`."""
        options = {
            name: f"{getattr(self, name):g}" for name, default in _OPTIONS.items() if getattr(self, name) != default
        }
        return f"{self.url}?{urlencode(options)}" if options else self.url

    @property
    def bucket(self) -> str:
        """The bucket or container."""
        return self.url.split("/")[2]

    @property
    def prefix(self) -> str:
        """The common prefix of the root's keys, "" for a whole bucket."""
        return unquote("/".join(self.url.split("/")[3:]))

    @staticmethod
    def parse(text: str) -> Address:
        """Parse an address. Raises Unsupported for an unknown scheme, InvalidArgument for any other error.

        Different spellings of one location give the same address. No error message repeats the text,
        because it may contain a secret.
        """
        scheme, bucket, path, query, fragment = _parts(text)
        if scheme not in SCHEMES:
            raise Unsupported(f"{scheme}://...: no storage supports {scheme}://; use a path, or {_known()}")
        options = dict(parse_qsl(query, keep_blank_values=True))
        _refuse_secrets(scheme, bucket, options)
        if not _BUCKET.fullmatch(bucket) or fragment:
            why = "it has a fragment after '#'" if fragment else "its bucket name has an invalid character"
            raise InvalidArgument(f"{scheme}://...: {why}; write it as {scheme}://bucket/folder")
        segments = [_segment(segment, f"{scheme}://{bucket}") for segment in path.split("/") if segment]
        url = "/".join([f"{scheme}://{bucket}", *segments])
        return Address(url, **{name: _seconds(url, name, value) for name, value in options.items()})

    def split(self) -> tuple[Address, str]:
        """Split off the folder's name from its root. Raises InvalidArgument for a whole bucket."""
        head, _, folder = self.url.rpartition("/")
        if head.endswith("/"):
            raise InvalidArgument(f"{self.url} is a whole bucket; give a folder in it")
        return Address(head, self.deadline_s, self.timeout_s, self.grace_s), folder


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)


def _parts(text: str) -> tuple[str, str, str, str, str]:
    if not text.isprintable():  # urlsplit would silently drop tabs and line breaks
        raise InvalidArgument("the address contains a control character; write it as s3://bucket/folder")
    try:
        parts = urlsplit(text)
    except ValueError:
        raise InvalidArgument("the address cannot be parsed; write it as s3://bucket/folder") from None
    return parts.scheme.lower(), parts.netloc, parts.path, parts.query, parts.fragment


def _refuse_secrets(scheme: str, bucket: str, options: Mapping[str, str]) -> None:
    """Raise InvalidArgument for credentials in an address, because addresses appear in logs, messages and files."""
    secret = [f"the option {name!r}" for name in options if is_secret_name(name)]
    user = bucket.rpartition("@")[0]
    if user and is_user_info(scheme, user):
        secret.insert(0, "a user and password before the bucket")
    if secret:
        raise InvalidArgument(
            f"{scheme}://...: the address contains credentials ({', '.join(secret)}), and addresses are written "
            "to logs, error messages and files; remove them, and set them in the environment: "
            f"{_ENVIRONMENT[scheme[:2]]}"
        )


def _segment(text: str, where: str) -> str:
    """Normalize one segment of a path. Raises InvalidArgument if a store could resolve it outside the root."""
    decoded = [text]
    while (further := _decoded(decoded[-1], where)) != decoded[-1]:
        decoded.append(further)
    for form in decoded:
        if form in (".", "..") or not form.isprintable() or set(form) & set("/\\"):
            raise InvalidArgument(
                f"{where}/...: {text[:80]!a} is not a valid folder name; write it as {where}/folder without "
                "'.', '..', backslashes, control characters and encoded slashes"
            )
    # Only characters that end a path or start an escape stay encoded, so that messages are readable.
    return re.sub("[%?#]", lambda match: quote(match[0]), decoded[min(1, len(decoded) - 1)])


def _decoded(text: str, where: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidArgument(
            f"{where}/...: {text[:80]!a} does not decode to text; write it as {where}/folder"
        ) from None


def _seconds(url: str, name: str, value: str) -> float:
    if name not in _OPTIONS:
        # A name without a value may be a secret.
        problem = f"unknown option {name[:40]!r}" if value else "an option without a value"
        raise InvalidArgument(f"{url}: {problem}; the options are {', '.join(_OPTIONS)}")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not (0 < seconds < float("inf") or (seconds == 0 and name == "grace_s")):
        raise InvalidArgument(
            f"{url}: {name} is not a valid number of seconds; options belong at the end of the address"
        )
    return seconds
