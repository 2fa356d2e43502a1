"""The key of a server that answers, from the environment."""

from __future__ import annotations

import os

from dsl.errors import ConfigError
from ops.regenerate_answers.op import RegenerateAnswers


def api_key(config: RegenerateAnswers) -> str | None:
    """None without a variable for it. Raises ConfigError if that is not set, or holds no key."""
    name = config.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f'api_key_env = "{name}": this environment variable is not set: '
            f"export {name}=... with the server's API key"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(f'api_key_env = "{name}": the variable must be one line of ASCII')
    return key
