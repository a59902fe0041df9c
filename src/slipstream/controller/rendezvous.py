"""How the torchrun agents of one group meet: torch's dynamic rendezvous, over a state that only this run can write.

torch keeps the state of a rendezvous as a pickle in a TCP store, and unpickles what it reads there: whoever reaches the
store could run code on every machine of the group. Here the state is sealed with the run's key, for this group of this
run, and nothing is decoded that does not bear the seal. A state that was sealed earlier and is put back is one of ours:
agents then disagree about who is there, and the group does not form, or ends.

Both stores of a group, this one and that of its processes, listen at one address: torch's own listen on all of them.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousBackend, Token

from slipstream.controller.meeting import Listen, host_store
from slipstream.core.errors import ConfigError
from slipstream.core.keys import RunKeys

BACKEND = "slipstream"
"""What torchrun calls it: --rdzv-backend."""


class SealedState(RendezvousBackend):
    """The state of a rendezvous at one key of a store, sealed; an empty text is none."""

    def __init__(self, store: Store, name: str, keys: RunKeys) -> None:
        self._store, self._key, self._keys = store, f"rendezvous/{name}", keys

    @property
    def name(self) -> str:
        return BACKEND

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state, and the token that `set_state` needs to replace it; None where there is none yet.

        RendezvousStateError, with nothing decoded, for a state without this run's seal.
        """
        found = self._swapped("", "")
        return (self._opened(found), found) if found else None

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` came with (None: where there is none); the state there is then, its token,
        and whether it is `state`. Errors as `get_state`'s."""
        sealed = self._keys.seal(b64encode(state).decode(), self._key)
        found = self._swapped("" if token is None else token.decode(), sealed)
        return self._opened(found), found, found == sealed.encode()

    def _swapped(self, expected: str, wanted: str) -> bytes:
        """What the store has after `wanted` was put in the place of `expected`, or was not. Waits for nothing."""
        try:
            found: bytes = self._store.compare_set(self._key, expected, wanted)
        except DistError as error:
            raise RendezvousConnectionError("the store of the rendezvous is gone") from error
        return found

    def _opened(self, found: bytes) -> bytes:
        try:
            return b64decode(self._keys.unseal(found.decode(errors="replace"), self._key))
        except ConfigError as error:
            raise RendezvousStateError(
                "somebody without this run's key has written to the store of the rendezvous"
            ) from error


class Rendezvous(DynamicRendezvousHandler):
    """torch's, but the store that it makes for the group's processes listens at this machine's address only."""

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> Any:
        return host_store(Listen(master_addr, master_port), timeout=timedelta(minutes=5))


def use_rendezvous(store: Store, keys: RunKeys) -> None:
    """Have `--rdzv-backend slipstream` mean a rendezvous over `store`, sealed with `keys`, in this process."""
    rendezvous_handler_registry.register(BACKEND, partial(_handler, store, keys))


def _handler(store: Store, keys: RunKeys, parameters: RendezvousParameters) -> RendezvousHandler:
    state = SealedState(store, parameters.run_id, keys)
    handler: RendezvousHandler = Rendezvous.from_backend(
        parameters.run_id, store, state, parameters.min_nodes, parameters.max_nodes, parameters.local_addr
    )
    return handler
