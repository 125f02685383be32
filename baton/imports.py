"""Imports of a command, without garbage collection and without what no command uses."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib._bootstrap import (  # type: ignore[attr-defined]
    _DeadlockError,
    _ModuleLockManager,
)
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType

from baton.method_cache import open_method_cache

# torch imports them with itself, for compilers, training and GPUs alone.
SELDOM_USED = frozenset(
    {
        "cuda.bindings.driver",
        "cuda.bindings.runtime",
        "pynvml",
        "torch._meta_registrations",
        "torch.ao.nn",
        "torch.distributions",
        "torch.export",
        "torch.masked",
        "torch.nested",
        "torch.optim",
        "torch.profiler",
        "torch.testing",
        "torch.utils.data",
        "torchgen.model",
        "unittest.mock",
    }
)
_METHODS = open_method_cache()
_REAL_GETMODULE = inspect.getmodule


@contextmanager
def quick_imports() -> Iterator[None]:
    """Defer garbage collections to the end of the block, and imports of what is seldom used.

    For processes of Baton only: all objects up to the end of the block are exempt from collection,
    and one that becomes garbage is not freed.
    """
    gc.disable()
    sys.meta_path.insert(0, _FINDER)
    setattr(inspect, "getmodule", _getmodule)  # noqa: B010
    try:
        with nullcontext() if _METHODS is None else _METHODS.in_use():
            yield
    finally:
        setattr(inspect, "getmodule", _REAL_GETMODULE)  # noqa: B010
        sys.meta_path.remove(_FINDER)
        gc.freeze()
        gc.enable()


def _getmodule(found: object, _filename: str | None = None) -> ModuleType | None:
    """Return the module of a frame by its name, as torch asks for when it registers an operator.

    `inspect` looks up the files of all modules, which takes 0.06 s.
    """
    if isinstance(found, FrameType):
        return sys.modules.get(found.f_globals.get("__name__", ""))
    return _REAL_GETMODULE(found, _filename)


class _LateModule(ModuleType):
    """Module that is executed when a name in it is read for the first time. Thread-safe.

    `importlib.util.LazyLoader` executes it as soon as `from package import module` finds it. The
    lock is that of the module's import: where threads wait for each other's imports, Python lets
    one of them continue with what the module has so far.
    """

    def __getattr__(self, name: str) -> object:
        spec = self.__spec__
        assert spec is not None
        with suppress(_DeadlockError), _ModuleLockManager(spec.name):
            if not name.startswith("__") and isinstance(spec.loader, _LateLoader):
                spec.loader = spec.loader.real
                spec.loader.exec_module(self)
        return super().__getattribute__(name)


class _LateLoader(Loader):
    def __init__(self, real: Loader) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it to the first read of an attribute."""


class _LateFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in SELDOM_USED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _LateLoader(spec.loader)
        return spec


_FINDER = _LateFinder()
