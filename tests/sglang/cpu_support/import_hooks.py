"""Functions that run before or after a module's first import, in whatever process and whoever imports it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

Before = Callable[[], None]
After = Callable[[ModuleType], None]

_before: dict[str, list[Before]] = {}
_after: dict[str, list[After]] = {}


def before_import(name: str) -> Callable[[Before], Before]:
    """Decorates a function to be called once, just before the module is loaded."""

    def register(function: Before) -> Before:
        _before.setdefault(name, []).append(function)
        return function

    return register


def after_import(name: str) -> Callable[[After], After]:
    """Decorates a function to be called with the module once it is loaded, before its importer sees it.

    A module that has been imported `from` elsewhere keeps its old names there: register for that module as well.
    """

    def register(function: After) -> After:
        _after.setdefault(name, []).append(function)
        return function

    return register


class HookFinder(importlib.abc.MetaPathFinder):
    """Finds the modules with hooks as the other finders do, and wraps their loader."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in _before and fullname not in _after:
            return None
        spec = next(
            (
                found
                for finder in sys.meta_path
                if finder is not self and (found := finder.find_spec(fullname, path, target)) is not None
            ),
            None,
        )
        if spec is not None and spec.loader is not None:
            spec.loader = HookLoader(spec.loader)
        return spec


class HookLoader(importlib.abc.Loader):
    """Loads as the wrapped loader does, the hooks around it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for before in _before.get(module.__name__, ()):
            before()
        self.loader.exec_module(module)
        for after in _after.get(module.__name__, ()):
            after(module)


def install() -> None:
    if not any(isinstance(finder, HookFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, HookFinder())
