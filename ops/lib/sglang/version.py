"""The versions of SGLang that dflow supports, and the installed one. Loads neither torch nor sglang.

What differs between them is in a module for each version, behind the interface of adapter.py.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from dsl.errors import DataError

VERSIONS = ("0.5.21", "0.5.23")  # in the order of their release
INSTALL = ".venv/bin/pip install -c constraints.txt -e '.[sglang]' in dflow's folder"


def installed_version() -> str | None:
    """The installed version of SGLang, None without one."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def versions_of(engine: str | None) -> tuple[str, ...]:
    """The versions of SGLang for which a draft was exported. engine: as set in export_draft, None for all supported
    ones.
    """
    return VERSIONS if engine is None else (engine.removeprefix("sglang-"),)


def either(versions: tuple[str, ...]) -> str:
    """The versions joined by "or", for a sentence."""
    return " or ".join(versions)


def backend_info(server_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entry of features.json about the backend: SGLang's version, and its arguments, if any."""
    given = {"server_args": dict(server_args)} if server_args else {}
    return {"backend": "sglang", "backend_version": installed_version(), **given}


def require_sglang(what: str, engine: str | None = None) -> str:
    """Check that a supported version of SGLang is installed, and return it.

    engine: the one for which the draft was exported, see `versions_of`. what: the purpose, for the error. Raises
    DataError if SGLang is missing, unsupported or not that engine. Its internals change with every release, and calls
    might return something else.
    """
    found, wanted = installed_version(), versions_of(engine)
    if found in wanted:
        return found
    remedy = f"pip install sglang=={wanted[-1]}"
    if found is None:
        raise DataError(
            f"{what} needs SGLang {either(wanted)}, which is not installed: {INSTALL if engine is None else remedy}"
        )
    if engine is None:
        raise DataError(
            f"{what} is written for SGLang {either(wanted)}, whose internals change with every release, and {found} is "
            f"installed: {remedy}"
        )
    again = f', or export the draft with engine = "sglang-{found}"' if found in VERSIONS else ""
    raise DataError(
        f'{what} needs SGLang {either(wanted)}, for which the draft was exported (engine = "{engine}" of '
        f"export_draft), and {found} is installed: {remedy}{again}"
    )
