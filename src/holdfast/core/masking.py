"""Masking of secrets in addresses, options and errors of object stores: passwords, keys, tokens, signatures.

An address appears in logs, events, error messages, notes under the root and command output.
Holdfast refuses an address with a secret, and masks messages of other software before repeating them.
"""

from __future__ import annotations

import re

_MASK = "***"
# Whole names, or their last part: "sas_token" and "X-Amz-Security-Token" end in "token", "sigma" is not "sig".
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
_CONTAINER_SCHEMES = ("abfs", "abfss")  # the container in container@account is not a user


def is_secret_name(name: str) -> bool:
    """Return True if an option of this name holds a secret, such as `aws_secret_access_key` or `sig`."""
    return _NAME.fullmatch(name) is not None


def is_user_info(scheme: str, user: str) -> bool:
    """Return True if the text before an `@` is a user or password, not the container of an abfs address."""
    return scheme.lower() not in _CONTAINER_SCHEMES or ":" in user or "/" in user


def masked(text: str) -> str:
    """Mask users and passwords in addresses, and the values of options that hold secrets."""
    return _PAIR.sub(rf"\g<head>{_MASK}", _USER.sub(_mask_user, text))


def _mask_user(match: re.Match[str]) -> str:
    scheme, user = match["scheme"], match["user"]
    # A slash before the `@` means a path such as https://host/a@b, unless it is part of a password.
    first = user.partition("/")[0]
    if not is_user_info(scheme, user) or ("/" in user and ":" not in first):
        return match[0]
    return f"{scheme}://{_MASK}@"
