"""Declaration of `load_target`: an unchanged target from a checkpoint directory or a model id."""

from __future__ import annotations

from typing import Any

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import TargetModel
from ops.lib.vision.template_kinds import read_day


def _is_day(_config: object, attribute: Any, value: str) -> None:
    try:
        read_day(value)
    except ValueError as error:
        raise ValueError(f"{attribute.name} {error}") from None


@op(
    version=2,
    run="ops.load_target.run:load_target",
    key_libraries=("transformers",),
    single_process=True,
)
@frozen(kw_only=True)
class LoadTarget:
    """Use a Hugging Face checkpoint as the target; its files are copied into the store."""

    checkpoint: str = field(
        external=True, model_id=True, pinned_by="revision", help="a checkpoint directory, or a model id"
    )
    revision: str | None = field(default=None, help="the commit of a model id, 40 hex digits: a branch may move")
    mask_token_id: int | None = field(
        default=None,
        help="id of the mask token where train_dflash sets none. Change it there: here all that reads the target runs "
        "again. Default: that of the tokenizer or the family",
    )
    chat_template: str | None = field(
        default=None,
        external=True,
        help="a file with a chat template (jinja), which takes the place of the checkpoint's in all later nodes and in "
        "serving",
    )
    template_date: str | None = field(
        default=None,
        keyed_default=False,
        validator=validators.optional(_is_day),
        help='a day ("2026-01-31") that the chat template writes in the place of today\'s, in all later nodes and in '
        "serving; default: 2025-01-01 for a template that writes today's",
    )
    measure_minutes: float = field(
        default=30.0,
        neutral=True,
        validator=validators.ge(0),
        help="the longest time for measuring the weights on the CPU, by an estimate; if all checks take longer, only "
        "layers, head and embedding are measured on them. Does not affect caching: a target that is in the store keeps "
        "its measurements",
    )
    embed_key: str | None = field(
        default=None, help="name of the embedding's tensor in the checkpoint's files; default: detected"
    )
    lm_head_key: str | None = field(
        default=None, help="name of the head's tensor in the checkpoint's files; default: detected"
    )
    trust_remote_code: bool = field(
        default=False, help="run the *.py files of the checkpoint, which are then copied too; read them first"
    )
    output = TargetModel
