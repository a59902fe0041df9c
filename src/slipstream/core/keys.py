"""The keys of one run: every socket of a run over TCP is encrypted and authenticated with keys derived from one secret.

The secret is 32 random bytes, made for the run, in a file of mode 0600 or in the environment. Only processes that have
it get past the handshake (CurveZMQ, RFC 26): a caller has to know the listener's public key, which is derived from the
secret and never shown or sent. The secret is never written to a store, config, log or error.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import NoReturn

import zmq
from zmq.utils import z85

from slipstream.core.errors import ConfigError

RUN_KEY_VARIABLE = "SLIPSTREAM_RUN_KEY"
_SECRET_BYTES = 32
_PURPOSE = b"slipstream curve 1"
_MARK_CHARS = 64


class RunKeys:
    """All keys of a run. Its `repr` shows none of them, and it cannot be pickled."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != _SECRET_BYTES:
            raise ConfigError("a run key has a wrong length", got=f"{len(secret)} bytes", allowed=_SECRET_BYTES)
        self.__secret = secret

    @classmethod
    def new(cls) -> RunKeys:
        """Make the keys of a new run, from the system's randomness."""
        return cls(secrets.token_bytes(_SECRET_BYTES))

    @classmethod
    def load(cls, path: Path) -> RunKeys:
        """Read the keys that `save` wrote. ConfigError unless the file is private and belongs to this user or root."""
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                mode = stat.S_IMODE(about.st_mode)
                if not stat.S_ISREG(about.st_mode) or mode & 0o177 or about.st_uid not in (0, os.geteuid()):
                    raise ConfigError(
                        f"the run key '{path}' is not a private file",
                        got=f"mode {mode:04o}, owner {about.st_uid}",
                        allowed=f"a regular file of mode 0600 that belongs to user {os.geteuid()}",
                        hint=f"chmod 600 {path}",
                    )
                return cls._parsed(file.read(4096), f"'{path}'")
        except OSError as error:
            raise ConfigError(f"the run key '{path}' cannot be read", got=error.strerror) from None

    def save(self, path: Path) -> None:
        """Write the secret to a new file of mode 0600. ConfigError when it cannot be made, or exists already."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"the run key '{path}' cannot be written", got=error.strerror) from None
        with os.fdopen(descriptor, "w") as file:
            os.fchmod(descriptor, 0o600)
            file.write(self.__secret.hex() + "\n")

    @classmethod
    def take(cls, environment: MutableMapping[str, str] = os.environ) -> RunKeys | None:
        """Return the keys in the variable SLIPSTREAM_RUN_KEY, None when it is not set, and remove it.

        Children do not inherit it then: a process that needs the keys is given `as_environment()`.
        """
        text = environment.pop(RUN_KEY_VARIABLE, None)
        return None if text is None else cls._parsed(text.encode(), f"${RUN_KEY_VARIABLE}")

    def as_environment(self) -> dict[str, str]:
        """Return the variable that gives the keys to a process of the run."""
        return {RUN_KEY_VARIABLE: self.__secret.hex()}

    def secure_listener(self, socket: zmq.Socket[bytes], port: str, incarnation: int) -> None:
        """Let `socket` admit callers of this run only; called before it binds."""
        secret = self._derived("listen", port, incarnation)
        socket.set(zmq.CURVE_SERVER, 1)
        socket.set(zmq.CURVE_SECRETKEY, secret)
        socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))

    def secure_caller(self, socket: zmq.Socket[bytes], port: str, incarnation: int) -> None:
        """Let `socket` talk to this port of this run only; called before it connects.

        Keys differ by port and incarnation, so an outdated address never leads to another port of the run.
        """
        secret = self._derived("call", port, incarnation)
        socket.set(zmq.CURVE_SECRETKEY, secret)
        socket.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
        socket.set(zmq.CURVE_SERVERKEY, zmq.curve_public(self._derived("listen", port, incarnation)))

    def of_start(self, start: str) -> RunKeys:
        """Return the keys for the channels of one start of the controller; `start` is a name used only once.

        A group that was handed the sealed specification of an earlier start can therefore connect to no port.
        """
        return RunKeys(hmac.digest(self.__secret, _PURPOSE + b"\0start\0" + start.encode(), hashlib.sha256))

    def seal(self, text: str, place: str) -> str:
        """Return `text` with a mark that only these keys can make: for a store, to which others can write.

        The mark is valid for `place` alone, the name of the text and of where it is stored.
        """
        return self._mark(text, place) + text

    def unseal(self, sealed: str, place: str) -> str:
        """Return the text that `seal` was given. ConfigError unless these keys sealed exactly it for this `place`.

        It need not be the newest: anyone who can write there may put an earlier sealed text back.
        """
        mark, text = sealed[:_MARK_CHARS], sealed[_MARK_CHARS:]
        if not hmac.compare_digest(mark.encode(), self._mark(text, place).encode()):
            got = "a mark made with another key, or a text that was changed"
            hint = "all processes of a run need its key; is this the address of another run?"
            raise ConfigError("this text was not sealed with the key of the run", got=got, hint=hint)
        return text

    def _mark(self, text: str, place: str) -> str:
        key = hmac.digest(self.__secret, _PURPOSE + b"\0seal\0" + place.encode(), hashlib.sha256)
        return hmac.digest(key, text.encode(), hashlib.sha256).hex()

    def _derived(self, role: str, port: str, incarnation: int) -> bytes:
        """Return a CURVE secret key in Z85: HMAC-SHA256 of its use. Any 32 bytes are a key of X25519."""
        message = b"\0".join((_PURPOSE, role.encode(), port.encode(), str(incarnation).encode()))
        derived: bytes = z85.encode(hmac.digest(self.__secret, message, hashlib.sha256))
        return derived

    @classmethod
    def _parsed(cls, text: bytes, where: str) -> RunKeys:
        try:
            return cls(bytes.fromhex(text.decode("ascii").strip()))
        except ValueError:  # also ConfigError; the error must not quote the text
            what = f"the run key in {where} is malformed"
            allowed = f"{2 * _SECRET_BYTES} hexadecimal digits"
            raise ConfigError(what, got=f"{len(text.strip())} characters", allowed=allowed) from None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunKeys) and hmac.compare_digest(self.__secret, other.__secret)

    def __hash__(self) -> int:
        return hash(RunKeys)

    def __repr__(self) -> str:
        return "RunKeys(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("keys are not pickled")
