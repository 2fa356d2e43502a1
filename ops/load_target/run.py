"""Use a checkpoint as the target: copy its weights, config and processor, and describe it."""

from __future__ import annotations

from pathlib import Path

from dsl.errors import DataError
from dsl.stage import Stage
from ops.lib.target.checkpoint_files import copy_files
from ops.lib.target.fetch import find_checkpoint, patterns
from ops.lib.target.model import complete_config, describe_target, write_target_json
from ops.lib.target.token_ids import mask_warning
from ops.lib.vision.chat_template import read_chat_template, replace_chat_template
from ops.lib.vision.processor import load_processor
from ops.lib.vision.processor_files import NO_IMAGE_PROCESSOR
from ops.load_target.op import LoadTarget


def load_target(config: LoadTarget, stage: Stage) -> None:
    """Write the TargetModel artifact of a local directory or of a model id."""
    trust = config.trust_remote_code
    directory = find_checkpoint(config.checkpoint, config.revision, trust)
    chat_template = read_chat_template(config.chat_template)
    processor = load_processor(str(directory), trust_remote_code=trust, chat_template=chat_template)
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
    copy_files(directory, stage.out_dir / "model", patterns(trust))
    if chat_template is not None:
        replace_chat_template(stage.out_dir / "model", chat_template)
    complete_config(stage.out_dir / "model", trust)
    write_target_json(stage.out_dir, info, {})
