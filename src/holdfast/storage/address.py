"""Addresses of object stores: `s3://bucket/run`, with options behind a question mark.

The address is all that a writer process is told, so everything that matters is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from holdfast.core.errors import InvalidArgument, Unsupported

SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss")
_OPTIONS = {"deadline_s": 120.0, "timeout_s": 60.0, "grace_s": 3600.0}


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

    @staticmethod
    def parse(text: str) -> Address:
        """Read an address; raises Unsupported for a scheme, InvalidArgument for an option that is not known."""
        parts = urlsplit(text)
        if parts.scheme.lower() not in SCHEMES:
            raise Unsupported(f"{text}: no storage is known for {parts.scheme}://; use a path, or {_known()}")
        segments = [segment for segment in parts.path.split("/") if segment]
        if not parts.netloc or parts.fragment or any(segment in (".", "..") for segment in segments):
            raise InvalidArgument(f"{text}: write it as {parts.scheme}://bucket/folder")
        options = {}
        for name, value in parse_qsl(parts.query, keep_blank_values=True):
            options[name] = _seconds(text, name, value)
        return Address("/".join([f"{parts.scheme.lower()}://{parts.netloc}", *segments]), **options)

    def split(self) -> tuple[Address, str]:
        """The root above a folder and the folder's name; raises InvalidArgument for a bucket alone."""
        head, _, folder = self.url.rpartition("/")
        if head.endswith("/"):
            raise InvalidArgument(f"{self.url} is a whole bucket: name a folder in it")
        return Address(head, self.deadline_s, self.timeout_s, self.grace_s), folder


def is_address(text: str) -> bool:
    """Whether a text is an address and not a path: `s3://bucket` must never become a local folder."""
    return "://" in text


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in SCHEMES)


def _seconds(text: str, name: str, value: str) -> float:
    if name not in _OPTIONS:
        raise InvalidArgument(f"{text}: there is no option {name!r}; there are {', '.join(_OPTIONS)}")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not (0 < seconds < float("inf") or (seconds == 0 and name == "grace_s")):
        raise InvalidArgument(
            f"{text}: {name}={value!r} is not a number of seconds; options go at the very end of an address"
        )
    return seconds
