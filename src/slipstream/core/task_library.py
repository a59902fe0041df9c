"""reasoning-gym by parts: all of it takes a second of imports, and matplotlib, for two of its datasets, another one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_LIBRARY = "reasoning_gym"
_REGISTER = "reasoning_gym.factory"
_DRAWS = "cellpylib"  # the library of its games of life, which imports matplotlib


def reasoning_gym() -> Any:
    """Return the module `reasoning_gym`, all of it but matplotlib; the first call imports it."""
    _defer_drawing()
    library = importlib.import_module(_LIBRARY)
    for module in list(sys.modules.values()):
        if isinstance(module, _Package):
            module.complete()
    return library


def create_dataset(name: str, **params: Any) -> Any:
    """Return what `reasoning_gym.create_dataset` does, or raise what that does; imported is what the dataset needs."""
    if name not in _registered():
        _import_part(name)
    if name not in _registered():  # its file has another name
        reasoning_gym()
    return sys.modules[_REGISTER].create_dataset(name, **params)


def _registered() -> Mapping[str, Any]:
    register: Any = sys.modules.get(_REGISTER)
    return {} if register is None else register.DATASETS


def _import_part(name: str) -> None:
    """Import the file called `name` of any package of the library, without the package and what else is in it."""
    spec = find_spec(_LIBRARY)
    folders = [] if spec is None else spec.submodule_search_locations or []
    if not folders or not name.isidentifier():
        return
    _defer_drawing()
    for file in Path(folders[0]).glob(f"*/{name}.py"):
        package = f"{_LIBRARY}.{file.parent.name}"
        for each in (_LIBRARY, package):
            if each not in sys.modules:
                sys.modules[each] = _Package.of(each)
        importlib.import_module(f"{package}.{name}")


def _defer_drawing() -> None:
    if _DRAWS not in sys.modules:
        module = _Deferred(_DRAWS)
        module.__spec__ = find_spec(_DRAWS)
        sys.modules[_DRAWS] = module


class _Deferred(ModuleType):
    """Stands for a module until something of it is used, which imports it."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


class _Package(ModuleType):
    """A package of the library that has not run yet, for parts of it; it does where anything else of it is used."""

    @classmethod
    def of(cls, name: str) -> ModuleType:
        """Return package `name`, whose own package is imported or one of these."""
        spec = find_spec(name)
        assert spec is not None, name
        module = module_from_spec(spec)
        module.__class__ = cls
        return module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in ("__all__", "__version__"):
            raise AttributeError(name)  # whoever looks at all modules asks for such
        if find_spec(f"{self.__name__}.{name}") is not None:
            return importlib.import_module(f"{self.__name__}.{name}")
        reasoning_gym()
        return getattr(self, name)

    def complete(self) -> None:
        """Run it, as its import does: then it is a package like any other."""
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__class__ = ModuleType  # type: ignore[assignment]
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self.__class__ = _Package
            raise
