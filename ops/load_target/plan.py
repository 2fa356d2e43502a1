"""What loading a target needs, and mistakes of its checkpoint."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsl.errors import DataError, NotKnown
from dsl.estimate import Estimate, PlanContext
from dsl.memory import free_memory
from dsl.shown import shown_bytes
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.forecasts import TargetForecast, read_config, read_target_config
from ops.lib.target.checkpoint_check import (
    chat_template_mistakes,
    chosen_templates,
    date_mistakes,
    ends_mistakes,
    layers_mistake,
    loaded_template_notes,
    loading_mistakes,
    running_mistake,
)
from ops.lib.target.checkpoint_files import WEIGHTS
from ops.lib.target.probed import is_measured, kept_probes, measured_turns, measuring_time, shortened
from ops.lib.target.quantised import method_of
from ops.lib.target.sizes import ITEM_SIZES, named_dtype
from ops.lib.target.token_ids import GENERATION, Vocabulary, mask_mistakes, mask_warning
from ops.lib.vision.family_config import is_qwen, with_defaults
from ops.lib.vision.processor_files import NO_IMAGE_PROCESSOR, image_settings, lacks_image_processor
from ops.lib.vision.template_kinds import shows_tools
from ops.load_target.op import LoadTarget

LARGE = 1_000_000_000  # bytes of weights whose measuring is announced
TARGETS = Path(__file__).resolve().parents[2] / "pipelines" / "targets"


def estimate(config: LoadTarget, context: PlanContext) -> Estimate:
    """Estimate disk by the sizes of the weights' files, and the memory of what is measured.

    Raises DataError without a config.json that has the sizes.
    """
    if context.artifact is not None:
        made = TargetForecast.made(context.artifact, context.identity)
        return Estimate(forecast=made, notes=() if is_qwen(made.config) else _found(context.artifact))
    directory = Path(config.checkpoint)
    found = find_config(config.checkpoint, config.revision, context.root)
    target = TargetForecast.of(found, directory, **_ids(config), identity=context.identity)
    memory, notes = _measuring(config, target, directory if directory.is_dir() else None)
    if directory.is_dir():
        size = sum(file.stat().st_size for pattern in WEIGHTS for file in directory.glob(pattern))
        notes = (*notes, *_notes(config))
        return Estimate(memory=memory, disk={"checkpoint": size}, forecast=target, notes=notes)
    size = (target.sizes.parameters + target.sizes.mtp) * ITEM_SIZES[dtype_of(target.config)]
    bound = "at most " if method_of(target.config) else ""  # what is quantised is known by the files only
    note = f"the download needs another {bound}{shown_bytes(size)} in Hugging Face's cache ({hub_cache()})"
    return Estimate(memory=memory, disk={"checkpoint": size}, notes=(note, *notes), forecast=target)


def _found(artifact: Path) -> tuple[str, ...]:
    """What load_target measured of a target in the store, in a sentence for each of its models."""
    return tuple(
        f"warning: {probe.refusal or probe.warning}"
        if probe.failed
        else f"measured on {probe.on}: all {len(probe.checks)} checks hold"
        for probe in kept_probes(artifact)
    )


def _measuring(
    config: LoadTarget, target: TargetForecast, directory: Path | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    """What load_target loads to measure the target: the memory by part, and for LARGE weights a sentence.

    directory: None for a model id.
    """
    with suppress(OSError, DataError):  # reported as mistakes of the files
        if running_mistake(target.config, directory):
            return {}, ()
    size = target.sizes.parameters * ITEM_SIZES["float32"]
    is_loaded = is_measured(size, free_memory())
    memory = {"weights to measure": size} if is_loaded else {}
    if size < LARGE:
        return memory, ()
    copied = [] if target.config.get("auto_map") else ["a small random copy"]
    weights = f"its weights, {shown_bytes(size)} in float32"
    if is_loaded:
        weights += f", {measuring_time(target.sizes.parameters, config.measure_minutes)}"
    else:
        weights += ", where half of the free memory holds them: here it does not"
    notes = [f"measures what holds of the target on {' and on '.join([*copied, weights])} (docs/targets.md)"]
    if is_loaded and not measured_turns(target.sizes.parameters, config.measure_minutes):
        notes.append(shortened(target.sizes.parameters, config.measure_minutes))
    return memory, tuple(notes)


def _ids(config: LoadTarget) -> dict[str, Any]:
    """The token ids for target.json, as far as the checkpoint's files say; a wrong mask token is left out, so that only
    `missing_here` reports it.
    """
    directory = Path(config.checkpoint)
    vocabulary = None
    if directory.is_dir() and not loading_mistakes(config.checkpoint, config.trust_remote_code):
        vocabulary = Vocabulary.of(directory)
    if vocabulary is None:
        return {"mask_token_id": config.mask_token_id}
    given = config.mask_token_id
    mask = vocabulary.known_mask_id if given is None else given
    return {
        "generation": read_settings(directory / GENERATION),
        "mask_token_id": None if mask_mistakes(directory, given) else mask,
        "eos_token_ids": vocabulary.eos_token_ids,
        "pad_token_id": vocabulary.pad_token_id,
        "image_settings": image_settings(directory)[1],
        "shows_tools": shows_tools(chosen_templates(config.chat_template, config.checkpoint)),
    }


def _notes(config: LoadTarget) -> tuple[str, ...]:
    if loading_mistakes(config.checkpoint, config.trust_remote_code):
        return ()
    given = config.mask_token_id
    warning = None if given is None else mask_warning(Path(config.checkpoint), given)
    of_template = loaded_template_notes(config.chat_template, config.checkpoint, config.template_date)
    return (*((f"warning: {warning}",) if warning else ()), *of_template)


def find_config(checkpoint: str, revision: str | None, root: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory, or of a model id; nothing is downloaded.

    For a model id it is targets/<owner>/<name>/<commit>.json beside the pipeline file or in pipelines/, else in Hugging
    Face's cache. Raises NotKnown if there is none, and DataError for a file in place of a directory.
    """
    directory = Path(checkpoint)
    if directory.is_file():
        raise DataError(f"{directory} is a file; a checkpoint is the directory with config.json and *.safetensors")
    if directory.is_dir():
        return read_target_config(directory)
    kept = Path(checkpoint) / f"{revision}.json"
    for path in (root / "targets" / kept, TARGETS / kept, snapshot(checkpoint, str(revision)) / "config.json"):
        if path.is_file():
            return with_defaults(read_config(path))
    raise NotKnown(f"the sizes of {checkpoint} are unknown: put its config.json at {root / 'targets' / kept}")


def snapshot(model_id: str, revision: str) -> Path:
    """The folder of a commit in Hugging Face's cache; it exists only if the commit was downloaded."""
    return hub_cache() / f"models--{model_id.replace('/', '--')}" / "snapshots" / revision


def hub_cache() -> Path:
    """The folder of huggingface_hub's downloads."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def dtype_of(config: Any) -> str:
    """The dtype of a checkpoint's weights; bfloat16 if its config names none or an unknown one.

    Raises DataError as `named_dtype` does.
    """
    named = named_dtype(config)
    return named if named in ITEM_SIZES else "bfloat16"


def missing_here(config: LoadTarget) -> dict[str, str]:
    """Mistakes by which the checkpoint or its chat template cannot be used, by field. A model id is not looked up."""
    missing = chat_template_mistakes(config.chat_template)
    mistakes = loading_mistakes(config.checkpoint, config.trust_remote_code)
    directory = Path(config.checkpoint)
    if not mistakes and directory.is_dir() and lacks_image_processor(directory):
        mistakes = [f"{directory}: {NO_IMAGE_PROCESSOR}"]
    if mistakes:
        missing["checkpoint"] = "\n".join(mistakes)
    elif directory.is_dir() and (wrong := layers_mistake(directory)):
        missing["checkpoint"] = wrong
    elif directory.is_dir():
        missing |= ends_mistakes(directory, config.embed_key, config.lm_head_key)
        if of_mask := mask_mistakes(directory, config.mask_token_id):
            missing["mask_token_id"] = "\n".join(of_mask)
        missing |= date_mistakes(config.template_date, config.chat_template, config.checkpoint)
    return missing
