"""The engines that `dflow serve` starts: the command of each, what it refuses, and how it answers."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from attrs import evolve

from dsl.errors import DataError
from executor.model_tools.served import ServedRun
from ops.lib.drafts.algorithms import plain
from ops.lib.sglang import serve_command as sglang_command
from ops.lib.sglang.serve_command import Address, Served
from ops.lib.sglang.version import either, installed_version, require_sglang
from ops.lib.vllm import serve_command as vllm_command
from ops.lib.vllm.serve_command import METHODS, draft_for_vllm, warnings_for_vllm
from ops.lib.vllm.version import require_vllm
from ops.tools.serve import sglang_arguments, vllm_arguments
from ops.tools.serve.chat import SGLANG, VLLM, Dialect

WHAT = "the command above, which runs wherever that version is installed,"


class Engine(ABC):
    """key_variable: the environment variable that holds the API key."""

    dialect: ClassVar[Dialect]
    key_variable: ClassVar[str]

    @property
    def name(self) -> str:
        """As users know it."""
        return self.dialect.engine

    @abstractmethod
    def refuse_own(self, extra: Sequence[str]) -> None:
        """Raises ConfigError for arguments that dflow sets itself."""

    @abstractmethod
    def command(self, run: ServedRun, address: Address, extra: Sequence[str]) -> list[str]:
        """The command, with the program as users call it."""

    @abstractmethod
    def program(self, run: ServedRun) -> list[str]:
        """The program as it lies on this machine. Raises DataError where the version that dflow supports is missing."""

    def environment(self, run: ServedRun) -> Mapping[str, str]:
        """Environment variables that the server needs for this target."""
        return {}

    def warnings(self, run: ServedRun) -> Sequence[str]:
        """What the command cannot tell the engine."""
        return ()

    def notice(self, run: ServedRun) -> str | None:
        """What to know of the command."""
        return None

    def key_arguments(self, key: str, extra: Sequence[str], folder: Path) -> list[str]:
        """Arguments by which the server reads its API key from a file in a private folder."""
        return []

    @abstractmethod
    def refusal(self, log: str) -> str | None:
        """The line of a server's log by which the engine refuses this machine."""


class SGLangEngine(Engine):
    dialect = SGLANG
    key_variable = sglang_arguments.API_KEY

    def refuse_own(self, extra: Sequence[str]) -> None:
        sglang_arguments.refuse_own(extra)

    def command(self, run: ServedRun, address: Address, extra: Sequence[str]) -> list[str]:
        served = _for_installed(run)
        command = sglang_command.launch_command(str(run.target), served, run.draft, address=address, extra=extra)
        return [sys.executable, *command[1:]]

    def program(self, run: ServedRun) -> list[str]:
        require_sglang(WHAT, run.engine)
        return [sys.executable]

    def environment(self, run: ServedRun) -> Mapping[str, str]:
        return run.served.environment

    def notice(self, run: ServedRun) -> str | None:
        unfit = _for_installed(run).unfit_versions
        if not unfit:
            return None
        return (
            f"SGLang {either(unfit)} lacks a method that DFLASH needs for {run.served.model_type} targets; "
            "this launcher adds it and then runs SGLang's own"
        )

    def key_arguments(self, key: str, extra: Sequence[str], folder: Path) -> list[str]:
        return sglang_arguments.key_config(key, extra, folder)

    def refusal(self, log: str) -> str | None:
        return sglang_arguments.refusal(log)


def _for_installed(run: ServedRun) -> Served:
    """Of SGLang's versions that may serve, the installed one alone, if it is one of them."""
    found = installed_version()
    return evolve(run.served, versions=(found,)) if found in run.served.versions else run.served


class VLLMEngine(Engine):
    """vLLM reads its API key from the same variable itself."""

    dialect = VLLM
    key_variable = vllm_arguments.API_KEY

    def refuse_own(self, extra: Sequence[str]) -> None:
        vllm_arguments.refuse_own(extra)

    def command(self, run: ServedRun, address: Address, extra: Sequence[str]) -> list[str]:
        if run.draft.algorithm not in METHODS:
            raise DataError(
                f"vLLM does not serve drafts of the algorithm {run.algorithm}, as far as dflow knows; it serves what "
                f"SGLang serves as {' or '.join(METHODS)}: leave --engine vllm out"
            )
        draft = evolve(run.draft, path=str(draft_for_vllm(Path(run.draft.path))))
        return vllm_command.launch_command(str(run.target), run.served, draft, address=address, extra=extra)

    def program(self, run: ServedRun) -> list[str]:
        return [str(require_vllm(WHAT))]

    def environment(self, run: ServedRun) -> Mapping[str, str]:
        return vllm_command.environment(run.served)

    def warnings(self, run: ServedRun) -> Sequence[str]:
        warnings = list(warnings_for_vllm(run.served))
        if run.algorithm != plain().name:
            warnings.append(
                f"vLLM serves {run.algorithm} drafts with its newer model runner only, which needs a GPU and was not "
                "tried: compare the accepted lengths with the tau of the evaluation"
            )
        if run.engine is not None:
            warnings.append(f"the draft was exported for {run.engine} (engine of export_draft), not for vLLM")
        return warnings

    def refusal(self, log: str) -> str | None:
        return vllm_arguments.refusal(log)


ENGINES: Mapping[str, Engine] = {"sglang": SGLangEngine(), "vllm": VLLMEngine()}
