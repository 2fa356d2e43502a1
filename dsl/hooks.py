"""Where the hooks of an op are found: what dflow asks of an op beside running it (dsl/op_class.py lists them)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from dsl.op import OpSpec
from dsl.op_class import HOOK_FILES, members_of


def hook(op: OpSpec, name: str) -> Callable[..., Any] | None:
    """The method of the op's config class, else the function in the file beside a built-in op's op.py, else None.

    The file is imported here, when it is needed. The caller declares the type.
    """
    cls = op.config_class
    if name in members_of(cls, (*op.fields, *op.edges)):
        method: Callable[..., Any] = getattr(cls, name)
        return method
    package, _, module = cls.__module__.rpartition(".")
    file = f"{package}.{HOOK_FILES[name]}"
    if not package or module != "op" or importlib.util.find_spec(file) is None:
        return None
    function: Callable[..., Any] | None = getattr(importlib.import_module(file), name, None)
    return function
