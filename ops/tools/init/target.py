"""Properties of a target that need no loading: its config.json, tokenizer and image processing."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
from attrs import Factory, field, frozen

from dsl.errors import ConfigError, DataError
from dsl.imports import child_environment, module_command
from ops.capture_targets.layers import spread_layers
from ops.lib.data.files import shown_json
from ops.lib.forecasts import read_target_config
from ops.lib.target.checkpoint_check import checkpoint_mistakes, loaded_template_notes, sizes_in
from ops.lib.target.probed import STARTING, in_silence, probe_of_copy
from ops.lib.target.sizes import TargetSizes, context_length
from ops.lib.target.token_ids import Vocabulary, mask_mistakes
from ops.lib.target.tokenizer_check import tokenizer_warnings
from ops.lib.vision.family_config import BY_TORCHVISION, is_qwen, sees_by_name
from ops.lib.vision.processor_files import has_tokenizer, image_settings, pixel_limits, template_texts
from ops.lib.vision.template_kinds import pinned, shows_tools
from ops.load_target.plan import TARGETS, dtype_of, find_config, hub_cache, snapshot

PAPER_LAYERS = 5  # of the paper
LARGE = (2048, 1024)  # pixels of the sides of a picture by which tokens of images are counted
AS_MEASURED = "measured on a small random copy (`dflow doctor --target DIR` lists them)"
NOT_EVALUATED = (
    "so the file has no nodes eval and check, and its training decodes nothing; a server reports accepted lengths "
    "(`dflow serve`)"
)
NOT_MEASURED = (
    "nothing was measured, since a run would refuse this checkpoint: correct it first. A copy of its config.json in a "
    "directory of its own is measured without any other file"
)
TOKENIZER = "tokenizer.json"
TEMPLATES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
THINKING = ("Qwen/Qwen3-8B", "Qwen/Qwen3.5-9B")  # of the models whose config.json dflow includes


def _sizes(target: Target) -> TargetSizes:
    return sizes_in(Path(target.checkpoint), target.config)


@frozen(kw_only=True)
class Target:
    """A target for which a pipeline is written. checkpoint: a directory, or a model id with its revision.

    mask: the mask token to set, and the reason; None if it is known already. tokenizer: its tokenizer.json, None if
    absent. thinks: whether its chat template has `enable_thinking`; shows_tools: whether it has `tools`, true if not
    known; dated: whether it writes the day.
    """

    checkpoint: str
    revision: str | None
    mask: tuple[int, str] | None
    config: Mapping[str, Any]
    tokenizer: Path | None
    pixel_limits: Mapping[str, int]
    thinks: bool
    shows_tools: bool = True
    dated: bool = False
    sizes: TargetSizes = field(default=Factory(_sizes, takes_self=True))

    @property
    def pixel_factor(self) -> int:
        seeing = self.sizes.seeing or {}
        return int(seeing.get("patch_size", 16)) * int(seeing.get("spatial_merge_size", 2))

    @property
    def context(self) -> int | None:
        """The number of positions that the target has; None if its config names none."""
        return context_length(self.sizes.text)

    @property
    def sees(self) -> bool:
        return self.sizes.seeing is not None or sees_by_name(self.config)

    @property
    def image_tokens(self) -> int | None:
        """The most tokens that its own processor makes of a large image; None for Qwen's, which count pixels.

        Raises DataError where it cannot be loaded.
        """
        return most_image_tokens(self.checkpoint, self.image_backend) if sees_by_name(self.config) else None

    @property
    def image_backend(self) -> str:
        """The library that resizes its images: Pillow, unless there is no such processor."""
        return "torchvision" if self.config.get("model_type") in BY_TORCHVISION else "pillow"

    @property
    def dtype(self) -> str:
        return dtype_of(self.config)

    @property
    def num_layers(self) -> int:
        """The number of layers to capture: up to PAPER_LAYERS, as far as the target's depth gives distinct ones."""
        depth = int(self.sizes.text["num_hidden_layers"])
        for count in range(PAPER_LAYERS, 1, -1):
            try:
                spread_layers(depth, count)
            except ConfigError:
                continue
            return count
        return 1

    @property
    def layer_ids(self) -> tuple[int, ...] | None:
        """The layers to capture by number, where a target is too small to spread any; else None."""
        return (0,) if int(self.sizes.text["num_hidden_layers"]) == 2 else None


def read_target(checkpoint: str) -> Target:
    """The target in a checkpoint directory, or for a model id whose config.json dflow includes.

    Raises DataError for other ids, and with all mistakes in a directory.
    """
    directory = Path(checkpoint)
    if directory.exists():
        tokenizer = directory / TOKENIZER
        mistakes = checkpoint_mistakes(directory)
        if has_tokenizer(directory) and not tokenizer.is_file():
            mistakes.append(f"{checkpoint}: {TOKENIZER} is missing; save it by `save_pretrained` of the fast tokenizer")
        mask = None
        if not mistakes:
            mask = _mask(directory)
            mistakes = [] if mask is not None else mask_mistakes(directory, None)
        if mistakes:
            raise DataError("\n".join(mistakes))
        return Target(
            checkpoint=str(directory.resolve()),
            revision=None,
            mask=mask,
            config=read_target_config(directory),
            tokenizer=tokenizer,
            pixel_limits=pixel_limits(*image_settings(directory)),
            thinks=_thinks(directory),
            shows_tools=shows_tools(template_texts(directory)) is not False,
            dated=any(pinned(text) != text for text in template_texts(directory)),
        )
    known = _known()
    if checkpoint not in known:
        listed = ", ".join(sorted(known))
        raise DataError(
            f"--target {checkpoint}: no such directory, and dflow only knows the model ids {listed}; "
            "download the checkpoint and name its directory"
        )
    return Target(
        checkpoint=checkpoint,
        revision=known[checkpoint],
        mask=None,
        config=find_config(checkpoint, known[checkpoint], Path()),
        tokenizer=None,
        pixel_limits={},
        thinks=checkpoint in THINKING,
    )


def _known() -> dict[str, str]:
    """The model ids whose config.json dflow includes, with their commits."""
    return {path.parent.relative_to(TARGETS).as_posix(): path.stem for path in TARGETS.glob("*/*/*.json")}


@frozen
class Measurable:
    """What of a target can be measured: a copy of its complete config.json, and the weights of its directory, None
    where that is no whole checkpoint. notes: on the directory's other files.
    """

    config: Mapping[str, Any]
    directory: Path | None
    notes: list[str] = field(factory=list)


def measurable(checkpoint: str) -> Measurable:
    """What of a checkpoint can be measured.

    checkpoint: a directory, or a model id whose config.json dflow includes or Hugging Face's cache holds, in the commit
    that came last. Nothing is downloaded. Raises DataError where there is no config.json, and with all mistakes of a
    directory that has a tokenizer or weights too.
    """
    directory = Path(checkpoint)
    if directory.exists():
        mistakes = checkpoint_mistakes(directory)
        if mistakes and (has_tokenizer(directory) or any(directory.glob("*.safetensors*"))):
            raise DataError("\n".join([*mistakes, NOT_MEASURED]))
        notes = [f"its config.json alone is no checkpoint: {mistake}" for mistake in mistakes]
        if not mistakes:
            notes += tokenizer_warnings(directory, template_texts(directory))
        return Measurable(find_config(checkpoint, None, Path()), None if mistakes else directory, notes)
    known = _known()
    cached = sorted(snapshot(checkpoint, "").glob("*/config.json"), key=lambda file: file.lstat().st_mtime)
    revision = known.get(checkpoint) or (cached[-1].parent.name if cached else None)
    if revision is None:
        raise DataError(
            f"--target {checkpoint}: no such directory, and no config.json of such a model id: dflow includes those of "
            f"{', '.join(sorted(known))}, and looked into Hugging Face's cache ({hub_cache()}). Put the model's "
            "config.json into a directory, and name that; no other file is needed"
        )
    folder = snapshot(checkpoint, revision)
    is_whole = folder.is_dir() and not checkpoint_mistakes(folder)
    return Measurable(find_config(checkpoint, revision, Path()), folder if is_whole else None)


@frozen
class Measured:
    """What was measured of a target, in lines to show. is_verified: whether drafts can be evaluated with it."""

    lines: list[str]
    is_verified: bool = True


def with_unseen_mask(target: Target, seen: Collection[int], examined: int) -> Target:
    """The target, with another mask token if its vocabulary has only tokens of texts for it: the last that the data
    does not have.

    seen: ids of the `examined` samples. A data set that has every token changes nothing.
    """
    vocabulary = Vocabulary.of(Path(target.checkpoint))
    if target.mask is None or vocabulary is None or not vocabulary.is_of_texts(target.mask[0]):
        return target
    taken = {*seen, *(vocabulary.eos_token_ids or ()), vocabulary.pad_token_id}
    unseen = [number for number in vocabulary.ordinary if number < vocabulary.size and number not in taken]
    if not unseen:
        return target
    shown = shown_json(vocabulary.ordinary[max(unseen)])
    why = f"the token {shown}, which none of the {examined:,} samples examined has; another text may"
    return attrs.evolve(target, mask=(max(unseen), why))


def measured(
    target: Target, show: Callable[[str], None] = in_silence, detail: Callable[[str], None] = in_silence
) -> Measured:
    """Measure what holds of a small random copy of a target that is not Qwen's, and look at its chat template; Qwen's
    are tested.

    show: called before what takes long, with its time; detail: while it goes on. Raises DataError where it cannot be a
    target.
    """
    of_template = [f"target: {note}" for note in loaded_template_notes(None, target.checkpoint)]
    if is_qwen(target.config):
        return Measured(of_template)
    kind = target.config.get("model_type")
    show(STARTING)
    try:
        probe = probe_of_copy(target.config, detail)
    except DataError as error:
        return Measured([f"target: {error}; load_target measures its weights", *of_template])
    if probe.refusal:
        raise DataError(
            f"{target.checkpoint}: this {kind} cannot be a target, {probe.refusal}; choose another: docs/targets.md"
        )
    if probe.unverified:
        return Measured([f"target: {kind}, {probe.warning}", f"target: {NOT_EVALUATED}", *of_template], False)
    if probe.warning:
        return Measured([f"target: {kind}, {probe.warning}", *of_template])
    return Measured([f"target: {kind}; all {len(probe.checks)} checks of a target hold, {AS_MEASURED}", *of_template])


@cache
def most_image_tokens(checkpoint: str, image_backend: str) -> int:
    """The most tokens that a checkpoint's processor makes of a picture of LARGE, wide or high, in a process of its own.

    Raises DataError where it cannot be loaded.
    """
    command = module_command("ops.lib.vision.processor", checkpoint, image_backend, *map(str, LARGE))
    made = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    if made.returncode:
        raise DataError(f"{checkpoint}: images cannot be read: {made.stderr.strip().rpartition(chr(10))[2]}")
    return int(made.stdout)


def _mask(directory: Path) -> tuple[int, str] | None:
    """A mask token to set, and why it is possible; None if one is known already, or there is no such id."""
    vocabulary = Vocabulary.of(directory)
    if vocabulary is None or vocabulary.known_mask_id is not None:
        return None
    return next(vocabulary.possible_mask_ids(), None)


def _thinks(directory: Path) -> bool:
    """Whether a file that may contain the chat template mentions enable_thinking."""
    return any(
        "enable_thinking" in file.read_text("utf-8", "replace")
        for file in map(directory.joinpath, TEMPLATES)
        if file.is_file()
    )
