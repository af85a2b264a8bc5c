"""The error where torch is needed and not installed: it names the caller and what to install."""

from __future__ import annotations

from importlib.util import find_spec

from holdfast.core.errors import Unsupported


def require_torch(caller: str, extra: str = "torch") -> None:
    """Raise Unsupported if torch is not installed. `extra` is the extra of Holdfast that the caller needs."""
    if find_spec("torch") is None:
        raise Unsupported(torch_missing(caller, extra))


def torch_missing(caller: str, extra: str = "torch") -> str:
    """Return the message for a caller that needs torch."""
    return (
        f"{caller} needs torch, which is not installed: pip install 'holdfast[{extra}]' "
        "(without a GPU, install PyTorch's build for the CPU first: it is much smaller); "
        "`holdfast doctor` checks the rest"
    )
