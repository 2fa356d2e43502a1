"""Arguments of a server that `dflow serve` sets itself, or that hold secrets, are refused after `--`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dsl.errors import ConfigError

OF_THE_RUN = "the run decides it; for another draft name its run, or choose with --node"
IN_ARGUMENTS = "every user of this machine sees arguments"


def refuse(given: Sequence[str], own: Mapping[str, str], secret: Collection[str], shown: Sequence[str] = ()) -> None:
    """Raises ConfigError for arguments that begin one of `own`: with "=", with underscores, and abbreviated.

    own: argument -> what to do instead. secret: those whose value is not repeated. shown: `given` as the user wrote it.
    """
    wrong = []
    for argument, written in zip(given, shown or given, strict=True):
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        found = next((each for each in own if name.startswith("--") and len(name) > 2 and each.startswith(name)), None)
        if found is not None:
            wrong.append(f"  {written.partition('=')[0] if found in secret else written}: {own[found]}")
    if wrong:
        raise ConfigError("arguments after -- that dflow serve sets itself:\n" + "\n".join(wrong))
