"""What a run is known by outside of its root: the root's identity, agreed on by all ranks."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass

from holdfast.core.errors import NotFound, StorageError
from holdfast.core.ranks import Ranks, together
from holdfast.format.digest import digest_hex
from holdfast.storage.base import IdentifiedStorage, SharedStorage
from holdfast.storage.identity import Identity
from holdfast.storage.objects.address import is_address

_SEEN_S = 3.0  # until what one host created is seen by another, on a network file system
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class RunKey:
    """The key of a run's arenas on this host, and whether a later start finds them by it.

    Without an identity the key is random: nothing that is left in memory could be told from
    another root's, so nothing is left there.
    """

    key: str
    lasting: bool

    @property
    def of_cards(self) -> str:
        """The key as cards carry it; "" if no card may be written."""
        return self.key if self.lasting else ""


def key_of(identity: Identity) -> str:
    """Return the key of a root's arenas. It can be guessed; the arenas' own names end in what cannot."""
    return digest_hex(f"{os.getuid()}:{identity.id}:{identity.place}".encode())


def run_id(storage: SharedStorage) -> str:
    """Return the key of a root's arenas on this host; of a root without an identity, one that nothing has."""
    return _key(_identity(storage, make=False)).key


def older_run_id(storage: SharedStorage) -> str:
    """Return the key that versions before identities gave to a root: its path alone."""
    place = storage.name if is_address(storage.address) else os.path.realpath(storage.address)
    return digest_hex(f"{os.getuid()}:{place}".encode())


def identify(ranks: Ranks, storage: SharedStorage) -> RunKey:
    """Give the root an identity if it has none, and return this host's key. Collective.

    Rank 0 makes it; the others look for the same id. Where a rank does not find that, no rank
    leaves anything in memory.
    """
    own: list[Identity | None] = []

    def make() -> str:
        own.append(_identity(storage, make=True) if ranks.rank == 0 else None)
        return own[0].id if own[0] is not None else ""

    wanted = together(ranks, make)[0]
    if ranks.rank:
        own = [_wait_for(storage, wanted) if wanted else None]
    found = own[0]
    if ranks.highest([int(found is None)])[0]:
        return _key(None)
    return _key(found)


def _wait_for(storage: SharedStorage, wanted: str) -> Identity | None:
    end = time.monotonic() + _SEEN_S
    while True:
        found = _identity(storage, make=False)
        if found is not None and found.id == wanted:
            return found
        if time.monotonic() > end:
            return None
        time.sleep(_POLL_S)


def _identity(storage: SharedStorage, *, make: bool) -> Identity | None:
    """Return a root's identity; None also where it can be neither read nor made, which is no reason not to restore."""
    if not isinstance(storage, IdentifiedStorage):
        return None
    try:
        return storage.identity(make=make)
    except (StorageError, NotFound):
        return None


def _key(identity: Identity | None) -> RunKey:
    return RunKey(secrets.token_hex(16), lasting=False) if identity is None else RunKey(key_of(identity), lasting=True)
