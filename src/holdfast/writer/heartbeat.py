"""Attempts that are seen: a sign to other processes that a folder is being written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.host import host_identity
from holdfast.storage.base import SharedStorage
from holdfast.writer import mailbox as mail
from holdfast.writer.mailbox import Mailbox
from holdfast.writer.write_attempt import Beat


@contextmanager
def shown(storage: SharedStorage, attempt: str, begun: Mapping[str, Any]) -> Iterator[None]:
    """Show starts of other runs, also on other hosts, that the attempt is being written: by notes that change."""
    mailbox = Mailbox(storage, attempt)
    mailbox.make()
    hold = storage.hold(mailbox.folder)
    try:
        mailbox.post(mail.HOST, host_identity())
        mailbox.post(mail.BEGUN, begun)
        with Beat(mailbox, 0, begun["bytes"]) as beat:
            beat.phase = "writing"
            yield
    finally:
        hold.release()
        with contextlib.suppress(HoldfastError):  # the next start removes it
            mailbox.discard()
