"""Use a checkpoint as the target: copy its weights, config and processor, and describe it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dsl.errors import DataError
from dsl.stage import Stage
from ops.lib.data.files import shown_json, write_json
from ops.lib.target.checkpoint_files import copy_files
from ops.lib.target.fetch import find_checkpoint, patterns
from ops.lib.target.measure import measure_weights
from ops.lib.target.model import complete_config, describe_target, read_config, write_target_json
from ops.lib.target.probe import probe_config
from ops.lib.target.probed import A_MINUTE, MEASURED, MEASURING_COPY, UNMEASURED, Probe, failed_checks
from ops.lib.target.token_ids import TOKENIZER, mask_warning
from ops.lib.target.tokenizer_check import tokenizer_warnings
from ops.lib.vision.chat_template import read_chat_template, replace_chat_template
from ops.lib.vision.family_config import is_qwen
from ops.lib.vision.processor import load_processor
from ops.lib.vision.processor_files import NO_IMAGE_PROCESSOR
from ops.lib.vision.template_kinds import DAY, pinned, pinned_note, read_day, template_warnings, with_day
from ops.load_target.op import LoadTarget

TEXT = "The draft took 12 tokens (3.5 + 4 = 7.5), so it's faster: that is what we asked for."


class UnfitTarget(DataError):
    """A model whose states or answers cannot be those of a target; no setting changes that."""


def load_target(config: LoadTarget, stage: Stage) -> None:
    """Write the TargetModel artifact of a local directory or of a model id."""
    trust = config.trust_remote_code
    directory = find_checkpoint(config.checkpoint, config.revision, trust)
    chat_template = read_chat_template(config.chat_template)
    processor = load_processor(str(directory), trust_remote_code=trust, chat_template=chat_template)
    template = processor.tokenizer.get_chat_template()
    day = config.template_date
    if day is not None:
        template = chat_template = with_day(template, read_day(day), str(directory))
    elif isinstance(processor.tokenizer.chat_template, str) and (note := pinned_note(template, config.checkpoint)):
        stage.info(note)
        template = chat_template = pinned(template)
        day = str(DAY)
    of_tokenizer = (*tokenizer_warnings(directory, [template]), round_trip_warning(directory, processor.tokenizer))
    for found in (*template_warnings([template], processor.special_tokens), *filter(None, of_tokenizer)):
        stage.warn(found)
    mask_token_id = processor.mask_token_id if config.mask_token_id is None else config.mask_token_id
    info = describe_target(  # before gigabytes are copied
        directory, mask_token_id, processor.eos_token_ids, config.embed_key, config.lm_head_key, trust
    )
    if info["vision"] and processor.image_processor is None:
        raise DataError(f"{directory}: {NO_IMAGE_PROCESSOR}")
    if warning := mask_warning(directory, info["mask_token_id"]):
        stage.warn(warning)
    if not Path(config.checkpoint).is_dir():  # a path is content, not a name
        info |= {"model_id": config.checkpoint, "revision": config.revision}
    if day is not None:
        info["template_date"] = day
    probes = _probe(directory, info, config.measure_minutes, stage)
    copy_files(directory, stage.out_dir / "model", patterns(trust))
    if chat_template is not None:
        replace_chat_template(stage.out_dir / "model", chat_template)
    complete_config(stage.out_dir / "model", trust)
    write_target_json(stage.out_dir, info if is_qwen(read_config(directory)) else info | failed_checks(probes), {})
    write_json(stage.out_dir / MEASURED, {"probes": [probe.to_json() for probe in probes]})


def round_trip_warning(source: Path, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A warning if a tokenizer does not give back a plain text from its ids; None if it does."""
    back = tokenizer.decode(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    if back.strip() == TEXT:
        return None
    return (
        f"the tokenizer of {source} does not give back a text: of {shown_json(TEXT)} it makes {shown_json(back)}; "
        f"answers would be learnt so. Copy {TOKENIZER} again from the target's source, or correct its decoder"
    )


def _probe(directory: Path, info: Mapping[str, Any], minutes: float, stage: Stage) -> list[Probe]:
    """Measure what holds of the target, on a small copy and, where half of the free memory holds them, on its weights.

    minutes: the longest time for the weights; if all checks take longer, only some run on them.
    Raises DataError for a target with which nothing works, by its weights if they are measured. Qwen's families are
    tested: of them, and of what else does not hold, it warns. Raises MemoryError where memory is lacking.
    """
    config = read_config(directory)
    probes = []
    try:
        if not config.get("auto_map"):
            stage.info(f"{MEASURING_COPY}, {A_MINUTE}")
            probes.append(probe_config(config))
    except DataError as error:
        stage.info(f"only the weights are measured: {error}")
    note = stage.info if probes or is_qwen(config) else stage.warn
    try:
        copy = probes[0] if probes else None
        of_weights = measure_weights(directory, info, copy, minutes, stage.info, note, stage.progress)
        probes += [of_weights] if of_weights else []
    except DataError as error:
        if not is_qwen(config):
            raise
        stage.warn(f"{UNMEASURED}: {error}")
    if not probes:
        stage.warn(f"nothing was measured of this {info['model_type']}: wrong states and answers of it are not noticed")
    for probe in probes:
        if probe.refusal and probe is probes[-1] and not is_qwen(config):
            raise UnfitTarget(f"{directory}: this {info['model_type']} cannot be a target, {probe.refusal}")
        if found := probe.refusal or probe.warning:
            stage.warn(found)
    return probes
