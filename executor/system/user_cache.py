"""The user's cache folder, `$XDG_CACHE_HOME/dflow`, else `~/.cache/dflow`; torch's compiled code in it; and the folder
of what has to outlive the cache, `$XDG_STATE_HOME/dflow`, else `~/.local/state/dflow`.

Only the user can write to them. Files in a store can be forged by anyone who may write to the store, and files in the
temporary folder by any user of the machine. torch unpickles what it finds in its cache: its default,
<temporary folder>/torchinductor_<user>, can be created in advance by any user, who could then run code in every stage
that compiles.
"""

from __future__ import annotations

import functools
import getpass
import os
import stat
from collections.abc import Sequence
from pathlib import Path

MODE = 0o700
OTHERS = stat.S_IWGRP | stat.S_IWOTH
COMPILED = "TORCHINDUCTOR_CACHE_DIR"  # Triton's cache lies below, where TRITON_CACHE_DIR is not set


def user_cache(*names: str) -> Path | None:
    """A folder in the user's cache, created if missing. names: its path there. None where it is not writable."""
    return _own_folder("XDG_CACHE_HOME", ".cache", names)


def user_state() -> Path | None:
    """The folder for lasting data of the user (XDG_STATE_HOME), created if missing; None where it is not writable."""
    return _own_folder("XDG_STATE_HOME", ".local/state", ())


def _own_folder(variable: str, default: str, names: Sequence[str]) -> Path | None:
    chosen = os.environ.get(variable, "")
    try:
        base = Path(chosen) if Path(chosen).is_absolute() else Path.home() / default
        folders = [base.joinpath("dflow", *names[:count]) for count in range(len(names) + 1)]
        for folder in folders:
            folder.mkdir(mode=MODE, parents=True, exist_ok=True)
        is_own = all(map(_is_own, folders))
    except (OSError, RuntimeError):  # no home, or none that can be written to
        return None
    return folders[-1] if is_own and os.access(folders[-1], os.W_OK | os.X_OK) else None


def compile_cache() -> dict[str, str]:
    """The variable for the folder of torch's compiled code, with the user's value, else with a folder of dflow's."""
    return {COMPILED: os.environ.get(COMPILED) or str(_compiled_folder())}


@functools.cache
def _compiled_folder() -> Path:
    """The folder for torch's compiled code: in the user's cache, else a temporary one with mode 0700."""
    import tempfile

    return user_cache("compiled") or Path(tempfile.mkdtemp(prefix="dflow-compiled-"))


def _is_own(folder: Path) -> bool:
    """Whether only this user can write to a folder."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS


def user_name() -> str:
    """The user's name; a number where the machine knows no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
