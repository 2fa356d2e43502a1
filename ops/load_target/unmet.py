"""Mistakes of a target's checkpoint, before a run's first stage."""

from __future__ import annotations

from pathlib import Path

from ops.lib.target.checkpoint_check import chat_template_mistakes, ends_mistakes, loading_mistakes
from ops.lib.target.token_ids import mask_mistakes
from ops.lib.vision.processor_files import NO_IMAGE_PROCESSOR, lacks_image_processor
from ops.load_target.op import LoadTarget


def unmet(config: LoadTarget) -> dict[str, str]:
    """Why the checkpoint directory cannot be a target, or the template not its own. A model id is not looked up."""
    missing = chat_template_mistakes(config.chat_template)
    mistakes = loading_mistakes(config.checkpoint, config.trust_remote_code)
    directory = Path(config.checkpoint)
    if not mistakes and directory.is_dir() and lacks_image_processor(directory):
        mistakes = [f"{directory}: {NO_IMAGE_PROCESSOR}"]
    if mistakes:
        missing["checkpoint"] = "\n".join(mistakes)
    elif directory.is_dir():
        missing |= ends_mistakes(directory, config.embed_key, config.lm_head_key)
        if wrong := mask_mistakes(directory, config.mask_token_id):
            missing["mask_token_id"] = "\n".join(wrong)
    return missing
