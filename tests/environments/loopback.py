"""Whether workers may have a network of their own on this machine."""

from __future__ import annotations

import functools
import os

import pytest

from slipstream.jail import isolation


@functools.cache
def has_loopback() -> bool:
    """Try it in a child: this process keeps its namespaces."""
    child = os.fork()
    if child == 0:
        is_held = False
        try:
            is_held = isolation.enter_namespaces(network="gateway").has_loopback
        finally:
            os._exit(0 if is_held else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def needs_loopback() -> None:
    if not has_loopback():
        pytest.skip("this machine gives workers no network namespaces")
