"""Where the methods and hooks of an op are found (dsl/op_class.py lists them)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from dsl.op import OpSpec
from dsl.op_class import HOOK_FILES


def method(op: OpSpec, name: str) -> Callable[..., Any] | None:
    """The method `name` of an op's config class; None without one, or if a field or edge has that name.

    It takes the config as self unless it is static. The caller declares the function's type.
    """
    if name in op.fields or name in op.edges:
        return None
    found: Callable[..., Any] | None = getattr(op.config_class, name, None)
    return found


def hook(op: OpSpec, name: str) -> Callable[..., Any] | None:
    """The hook `name` of an op: a method of its config class, or a function in a file beside a built-in op's op.py.

    None without one. The file is imported only here. The caller declares the function's type.
    """
    own = method(op, name)
    if own is not None:
        return own
    package, _, module = op.config_class.__module__.rpartition(".")
    file = f"{package}.{HOOK_FILES[name]}"
    if not package or module != "op" or importlib.util.find_spec(file) is None:
        return None
    function: Callable[..., Any] | None = getattr(importlib.import_module(file), name, None)
    return function
