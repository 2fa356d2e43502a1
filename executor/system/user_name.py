"""Who runs this process, by name."""

from __future__ import annotations

import getpass
import os


def user_name() -> str:
    """The user's name; a number where the machine knows no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
