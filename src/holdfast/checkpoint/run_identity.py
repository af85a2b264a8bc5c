"""The key of a run's arenas on a host, made from the root's identity, which all ranks agree on."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass

from holdfast.core.errors import NotFound, StorageError
from holdfast.core.ranks import Ranks, run_on_all_ranks
from holdfast.format.digest import digest_hex
from holdfast.storage import is_address
from holdfast.storage.base import IdentifiedStorage, SharedStorage
from holdfast.storage.identity import Identity

_VISIBLE_S = 3.0  # until another host sees a new file on a network file system
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunKey:
    """The key of a run's arenas on this host; if `persistent`, a later start finds them by it.

    Without an identity the key is random. Memory could not be told from another root's, so none
    is left behind.
    """

    key: str
    persistent: bool

    @property
    def card_key(self) -> str:
        """The key to write into cards; "" if no card may be written."""
        return self.key if self.persistent else ""


def key_of(identity: Identity) -> str:
    """Return the key of a root's arenas. The key is guessable, but the arenas' names end in a random part."""
    return digest_hex(f"{os.getuid()}:{identity.id}:{identity.place}".encode())


def run_id(storage: SharedStorage) -> str:
    """Return the key of a root's arenas on this host; a random one for a root without an identity."""
    return _key(_identity(storage, make=False)).key


def older_run_id(storage: SharedStorage) -> str:
    """Return the key that older versions, without identities, gave to a root: only its path."""
    place = storage.name if is_address(storage.address) else os.path.realpath(storage.address)
    return digest_hex(f"{os.getuid()}:{place}".encode())


def identify(ranks: Ranks, storage: SharedStorage) -> RunKey:
    """Give the root an identity if it has none, and return this host's key. Collective.

    Rank 0 creates the identity; the others wait for the same id. If a rank does not find it, no
    rank leaves anything in memory.
    """
    own: list[Identity | None] = []

    def make() -> str:
        own.append(_identity(storage, make=True) if ranks.rank == 0 else None)
        return own[0].id if own[0] is not None else ""

    wanted = run_on_all_ranks(ranks, make)[0]
    if ranks.rank:
        own = [_wait_for(storage, wanted) if wanted else None]
    found = own[0]
    if ranks.all_max([int(found is None)])[0]:
        return _key(None)
    return _key(found)


def _wait_for(storage: SharedStorage, wanted: str) -> Identity | None:
    end = time.monotonic() + _VISIBLE_S
    while True:
        found = _identity(storage, make=False)
        if found is not None and found.id == wanted:
            return found
        if time.monotonic() > end:
            return None
        time.sleep(_POLL_S)


def _identity(storage: SharedStorage, *, make: bool) -> Identity | None:
    """Return a root's identity, or None if it can be neither read nor made: a restore works without."""
    if not isinstance(storage, IdentifiedStorage):
        return None
    try:
        return storage.identity(make=make)
    except (StorageError, NotFound):
        return None


def _key(identity: Identity | None) -> RunKey:
    if identity is None:
        return RunKey(secrets.token_hex(16), persistent=False)
    return RunKey(key_of(identity), persistent=True)
