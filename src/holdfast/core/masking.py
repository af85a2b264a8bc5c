"""Masks for secrets: addresses and the errors of object stores may hold keys, tokens and signatures.

An address goes into logs, events, error messages, notes under the root and the output of commands.
Holdfast refuses one that holds a secret; what other software says is masked before it is repeated.
"""

from __future__ import annotations

import re

_MASK = "***"
# Whole names, or their last part: "sas_token" and "X-Amz-Security-Token" end in "token", "sigma" is no "sig".
_NAMES = (
    r"(?:(?:[a-z0-9]{1,30}[_\-]){0,6}"
    r"(?:sig|sas|signature|token|secret|password|passwd|passphrase|pwd|credentials?|auth|authorization|bearer"
    r"|api[_\-]?key|access[_\-]?key(?:[_\-]?id)?|account[_\-]?key|secret[_\-]?key|private[_\-]?key|shared[_\-]?key)"
    r"|(?:access|secret|storage|client|session|security|sas){1,3}(?:key(?:id)?|token|secret))"
)
_NAME = re.compile(_NAMES, re.IGNORECASE)
_PAIR = re.compile(
    rf"""(?P<head>(?<![a-z0-9_\-]){_NAMES}["']?\s*[=:]\s*["']?(?:(?:bearer|basic)\s+)?)[^\s&;,"']+""", re.IGNORECASE
)
_USER = re.compile(r"(?<![a-z0-9+.\-])(?P<scheme>[a-z][a-z0-9+.\-]{0,30})://(?P<user>[^\s@?#]{0,2000})@", re.IGNORECASE)
_CONTAINER_SCHEMES = ("abfs", "abfss")  # container@account is no user


def is_secret_name(name: str) -> bool:
    """Whether an option of this name holds a secret, such as `aws_secret_access_key`, `sig` or `X-Amz-Signature`."""
    return _NAME.fullmatch(name) is not None


def holds_user(scheme: str, user: str) -> bool:
    """Whether what stands before an `@` is a user or a password, and not the container of an abfs address."""
    return scheme.lower() not in _CONTAINER_SCHEMES or ":" in user or "/" in user


def masked(text: str) -> str:
    """The text without users and passwords in addresses, and without the values of options that hold secrets."""
    return _PAIR.sub(rf"\g<head>{_MASK}", _USER.sub(_mask_user, text))


def _mask_user(match: re.Match[str]) -> str:
    scheme, user = match["scheme"], match["user"]
    # A slash before the `@`: a path such as https://host/a@b, unless a password with a slash stands there.
    first = user.partition("/")[0]
    if not holds_user(scheme, user) or ("/" in user and ":" not in first):
        return match[0]
    return f"{scheme}://{_MASK}@"
