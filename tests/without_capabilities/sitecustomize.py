"""Found by each Python that has this folder on its PYTHONPATH: a user namespace is granted, and no capability in it.

So does AppArmor on Ubuntu 24.04, where `kernel.apparmor_restrict_unprivileged_userns` is 1.
"""

from __future__ import annotations

import struct
from typing import Any

from slipstream.jail import isolation

_call = isolation._call


def _without_capabilities(name: str, *arguments: Any) -> bool:
    done = _call(name, *arguments)
    if done and name == "unshare" and arguments[0] & isolation._CLONE_NEWUSER:
        assert _call("capset", struct.pack("<Ii", isolation._CAPABILITY_VERSION_3, 0), bytes(24))
    return done


isolation._call = _without_capabilities
