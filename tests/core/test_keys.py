"""The run's secret lies only in private places, and in no text that others can read."""

from __future__ import annotations

import copy
import os
import pickle
from pathlib import Path

import pytest
import zmq

from slipstream.core.errors import ConfigError
from slipstream.core.keys import RUN_KEY_VARIABLE, RunKeys

HEX = "5eC7e7" * 10 + "beef"


def keys_of(text: str) -> RunKeys:
    found = RunKeys.take({RUN_KEY_VARIABLE: text})
    assert found is not None
    return found


class Options(dict[int, object]):
    """A fake socket that keeps its options: a real one does not return keys."""

    set = dict.__setitem__


def curve_keys(keys: RunKeys, port: str, incarnation: int) -> tuple[bytes, bytes, bytes]:
    """Return secret and public key of the listener, and the public key that callers expect."""
    listener, caller = Options(), Options()
    keys.secure_listener(listener, port, incarnation)  # type: ignore[arg-type]
    keys.secure_caller(caller, port, incarnation)  # type: ignore[arg-type]
    assert zmq.CURVE_SERVER in listener
    assert caller[zmq.CURVE_PUBLICKEY] == zmq.curve_public(caller[zmq.CURVE_SECRETKEY])  # type: ignore[arg-type]
    return listener[zmq.CURVE_SECRETKEY], listener[zmq.CURVE_PUBLICKEY], caller[zmq.CURVE_SERVERKEY]  # type: ignore


def test_a_file_keeps_the_keys_and_is_private(tmp_path: Path) -> None:
    keys, path = RunKeys.new(), tmp_path / "run.key"
    before = os.umask(0)
    try:
        keys.save(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    assert RunKeys.load(path) == keys
    assert RunKeys.new() != keys
    with pytest.raises(ConfigError, match="cannot be written"):
        keys.save(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o666, 0o700, 0o610])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.key"
    RunKeys.new().save(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"not a private file[\s\S]*0600"):
        RunKeys.load(path)


def test_files_that_hold_no_key_are_refused_without_quoting_them(tmp_path: Path) -> None:
    path = tmp_path / "run.key"
    for text in ("", HEX[:-1], HEX + "00", "g" + HEX[1:], "é" * 64):
        path.write_text(text)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="malformed") as caught:
            RunKeys.load(path)
        assert not text or text not in str(caught.value)
        assert caught.value.__context__ is None or caught.value.__suppress_context__
    with pytest.raises(ConfigError, match="cannot be read"):
        RunKeys.load(tmp_path / "none")
    with pytest.raises(ConfigError):
        RunKeys.load(tmp_path)


def test_the_environment_gives_the_keys_once() -> None:
    environment = {"OTHER": "1"} | keys_of(HEX).as_environment()
    assert RunKeys.take(environment) == keys_of(HEX)
    assert environment == {"OTHER": "1"}, "what this process starts must not find it"
    assert RunKeys.take(environment) is None


def test_no_text_shows_the_keys() -> None:
    keys = keys_of(HEX)
    for text in (repr(keys), str(keys), f"{keys}", repr({"keys": keys})):
        assert HEX[:6] not in text.lower()
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            duplicate(keys)


def test_keys_differ_by_run_port_and_incarnation_and_by_nothing_else() -> None:
    keys = keys_of(HEX)
    secret, public, looked_for = curve_keys(keys, "b.in", 1)
    assert public == looked_for == zmq.curve_public(secret)
    assert curve_keys(keys_of(HEX), "b.in", 1)[0] == secret
    others = [curve_keys(keys, "b.in", 2), curve_keys(keys, "b.in2", 1), curve_keys(RunKeys.new(), "b.in", 1)]
    assert len({secret, *(other[0] for other in others)}) == 4


def test_a_seal_is_of_one_run_one_place_and_one_text() -> None:
    keys, other, text = RunKeys.new(), RunKeys.new(), '{"nodes": []}'
    sealed = keys.seal(text, "run")
    assert keys.unseal(sealed, "run") == text
    flipped = ("1" if sealed[0] == "0" else "0") + sealed[1:]
    elsewhere = [other.seal(text, "run"), keys.seal(text, "rendezvous/run"), keys.seal(text, "")]
    for refused in (*elsewhere, sealed + " ", sealed[:-1], flipped, text, "", "\u00e9"):
        with pytest.raises(ConfigError, match="not sealed with the key of the run"):
            keys.unseal(refused, "run")


def test_every_start_has_keys_of_its_own() -> None:
    keys = keys_of(HEX)
    assert keys.of_start("a") == keys_of(HEX).of_start("a")
    assert len({curve_keys(one, "b.in", 1)[0] for one in (keys, keys.of_start("a"), keys.of_start("b"))}) == 3
    assert keys.of_start("a") != keys.of_start("b")
