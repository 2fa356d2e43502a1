"""The version of SGLang whose internals the modules beside this one use. Loads neither torch nor sglang."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError

SGLANG_VERSION = "0.5.21"
INSTALL = ".venv/bin/pip install -c constraints.txt -e '.[sglang]' in dflow's folder"


def installed_version() -> str | None:
    """The installed version of SGLang, None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def backend_info(server_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entry of features.json about the backend: SGLang's version, and its arguments, if any."""
    given = {"server_args": dict(server_args)} if server_args else {}
    return {"backend": "sglang", "backend_version": SGLANG_VERSION, **given}


def require_sglang(what: str) -> None:
    """Raises DataError if SGLang is missing or another version, so that `what` cannot work.

    Its internals change with every release, and a call that still runs may return something else.
    """
    found = installed_version()
    if found is None:
        raise DataError(f"{what} needs SGLang {SGLANG_VERSION}, which is not installed: {INSTALL}")
    if found != SGLANG_VERSION:
        raise DataError(
            f"{what} is written for SGLang {SGLANG_VERSION}, whose internals change with every release, and "
            f"{found} is installed: pip install sglang=={SGLANG_VERSION}"
        )
