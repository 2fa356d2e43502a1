"""The engines that `dflow serve` starts: the command of each, the arguments that it refuses, and how it answers."""

from __future__ import annotations

import json
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from attrs import evolve

from dsl.errors import ConfigError, DataError
from executor.model_tools.served import ServedRun
from ops.lib.data.files import read_json
from ops.lib.drafts.algorithms import plain
from ops.lib.drafts.backbone.contract import range_warnings
from ops.lib.sglang import serve_command as sglang_command
from ops.lib.sglang.model_classes import served_class, unserved
from ops.lib.sglang.serve_command import REFUSAL, Address, Served
from ops.lib.sglang.version import either, installed_version, require_sglang
from ops.lib.vision.family_config import is_qwen
from ops.lib.vllm import serve_command as vllm_command
from ops.lib.vllm.serve_command import METHODS, draft_for_vllm, warnings_for_vllm
from ops.lib.vllm.version import require_vllm
from ops.tools.serve.chat import SGLANG, VLLM, Dialect

WHAT = "the command above, which runs wherever that version is installed,"
OF_THE_RUN = "the run decides it; for another draft name its run, or choose with --node"
IN_ARGUMENTS = "every user of this machine sees arguments"
IN_A_FILE = f"{IN_ARGUMENTS}; put it into a YAML file and give --config FILE"
ADDRESS = {"--port": "give --port before the --", "--host": "give --host before the --"}


class Engine(ABC):
    """An inference engine that can serve drafts.

    key_variable: the environment variable for the API key. own: arguments that dflow sets itself -> what to do instead.
    secret: arguments whose values are not printed. refusals: matches log lines of a server that cannot run without a
    GPU.
    """

    dialect: ClassVar[Dialect]
    key_variable: ClassVar[str]
    own: ClassVar[Mapping[str, str]]
    secret: ClassVar[Collection[str]]
    refusals: ClassVar[re.Pattern[str]]

    @property
    def name(self) -> str:
        """The engine's name for users."""
        return self.dialect.engine

    def refuse_own(self, extra: Sequence[str]) -> None:
        """Check the user's extra arguments. Raises ConfigError for one in `own`, even with "=", underscores or
        abbreviated.
        """
        wrong = []
        for argument in extra:
            name = self.long_name(argument).partition("=")[0].partition(".")[0].replace("_", "-")
            is_option = name.startswith("--") and len(name) > 2
            found = next((each for each in self.own if is_option and each.startswith(name)), None)
            if found is not None:
                shown = argument.partition("=")[0] if found in self.secret else argument
                wrong.append(f"  {shown}: {self.own[found]}")
        if wrong:
            raise ConfigError("arguments after -- that dflow serve sets itself:\n" + "\n".join(wrong))

    def long_name(self, argument: str) -> str:
        """The argument with its short option replaced by the long one."""
        return argument

    @abstractmethod
    def command(self, run: ServedRun, address: Address, extra: Sequence[str]) -> list[str]:
        """The shell command that starts a server, as users would type it."""

    @abstractmethod
    def program(self, run: ServedRun) -> list[str]:
        """The command that starts the engine here. Raises DataError where the supported version is not installed."""

    def block_size_refusal(self, run: ServedRun) -> str:
        """Why the engine cannot be asked to serve the draft in shorter blocks; empty if it can."""
        return ""

    def environment(self, run: ServedRun) -> Mapping[str, str]:
        """The environment variables that the server needs for this target."""
        return {}

    def warnings(self, run: ServedRun) -> Sequence[str]:
        """What the command cannot tell the engine."""
        of_range = range_warnings(read_json(run.target / "config.json"))
        return [found[self.name] for found in (run.of_embedding, of_range) if self.name in found]

    def notice(self, run: ServedRun) -> str | None:
        """A note for users about the command, None for none."""
        return None

    def key_arguments(self, key: str, extra: Sequence[str], folder: Path) -> list[str]:
        """Arguments by which the server reads its API key from a file in a private folder."""
        return []

    def refusal(self, log: str) -> str | None:
        """The last log line that says why the engine refuses the draft on this machine; None if there is none."""
        found = self.refusals.findall(log)
        return found[-1].strip() if found else None


class SGLangEngine(Engine):
    dialect = SGLANG
    key_variable = "SGLANG_API_KEY"
    own: ClassVar[Mapping[str, str]] = {
        **ADDRESS,
        "--model-path": OF_THE_RUN,  # or --model
        "--speculative-algorithm": OF_THE_RUN,
        "--speculative-draft-model-path": OF_THE_RUN,  # or --speculative-draft-model
        "--api-key": f"{IN_ARGUMENTS}; set the variable {key_variable}",
        "--admin-api-key": IN_A_FILE,
        "--ssl-keyfile-password": IN_A_FILE,
    }
    secret = ("--api-key", "--admin-api-key", "--ssl-keyfile-password")
    refusals = REFUSAL

    def command(self, run: ServedRun, address: Address, extra: Sequence[str]) -> list[str]:
        served = _for_installed(run)
        if reason := _unserved(run):
            raise DataError(reason)
        command = sglang_command.launch_command(str(run.target), served, run.draft, address=address, extra=extra)
        return [sys.executable, *command[1:]]

    def program(self, run: ServedRun) -> list[str]:
        require_sglang(WHAT, run.engine)
        return [sys.executable]

    def block_size_refusal(self, run: ServedRun) -> str:
        return (
            "SGLang reads the block of a DSPARK draft from its config.json" if run.draft.algorithm == "DSPARK" else ""
        )

    def warnings(self, run: ServedRun) -> Sequence[str]:
        config = read_json(run.target / "config.json")
        if is_qwen(config) or not config.get("vision_config"):
            return super().warnings(run)
        untried = (
            f"the target ({config.get('model_type')}) has a vision tower, and with one dflow has tried Qwen's targets "
            "only in SGLang: compare its answers to images, and the accepted lengths with the tau of the evaluation"
        )
        return [*super().warnings(run), untried]

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
        """The arguments that give a server its API key.

        Empty without a key, or where `extra` names a config file, which may hold the key.
        """
        if not key or any(argument.partition("=")[0] == "--config" for argument in extra):
            return []
        file = folder / "sglang.yaml"
        file.write_text(json.dumps({"api-key": key}))  # JSON of it is YAML
        return ["--config", str(file)]


def _for_installed(run: ServedRun) -> Served:
    """The serving settings, reduced to the installed version of SGLang and what its class of the target lacks;
    unchanged if that version may not serve the draft.
    """
    found = installed_version()
    if found not in run.served.versions:
        return run.served
    target = served_class(read_json(run.target / "config.json"))
    return evolve(run.served, versions=(found,), lacking=target is not None and target.way == "patch")


def _unserved(run: ServedRun) -> str | None:
    """Why the installed SGLang does not serve a draft for the target; None if it does, or is not the one to serve."""
    return unserved(read_json(run.target / "config.json")) if installed_version() in run.served.versions else None


class VLLMEngine(Engine):
    """The vLLM engine; it reads its API key from the environment variable itself."""

    dialect = VLLM
    key_variable = "VLLM_API_KEY"
    own: ClassVar[Mapping[str, str]] = {
        **ADDRESS,
        "--uds": "dflow serve asks it by its host and port",
        "--model": OF_THE_RUN,
        "--speculative-config": OF_THE_RUN,
        "--spec-method": OF_THE_RUN,
        "--spec-model": OF_THE_RUN,
        "--spec-tokens": OF_THE_RUN,
        "--api-key": f"{IN_ARGUMENTS}; set the variable {key_variable}",
    }
    secret = ("--api-key",)
    refusals = re.compile(r"^.*Failed to infer device type.*$", re.MULTILINE)

    def long_name(self, argument: str) -> str:
        return re.sub(r"^-sc(?=[=.]|$)", "--speculative-config", argument)

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
        warnings = [*super().warnings(run), *warnings_for_vllm(run.served)]
        if run.algorithm != plain().name:
            warnings.append(
                f"vLLM serves {run.algorithm} drafts with its newer model runner only, which needs a GPU and was not "
                "tried: compare the accepted lengths with the tau of the evaluation"
            )
        if run.engine is not None:
            warnings.append(f"the draft was exported for {run.engine} (engine of export_draft), not for vLLM")
        return warnings


ENGINES: Mapping[str, Engine] = {"sglang": SGLangEngine(), "vllm": VLLMEngine()}
