"""reasoning-gym, imported without what it needs for two of its datasets only: matplotlib, a second of CPU time."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_DRAWS = "cellpylib"  # the library of its games of life, which imports matplotlib


def reasoning_gym() -> Any:
    """Return the module `reasoning_gym`; the first call imports it."""
    if _DRAWS not in sys.modules:
        module = _Deferred(_DRAWS)
        module.__spec__ = find_spec(_DRAWS)
        sys.modules[_DRAWS] = module
    return importlib.import_module("reasoning_gym")


class _Deferred(ModuleType):
    """Stands for a module until something of it is used, which imports it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)
