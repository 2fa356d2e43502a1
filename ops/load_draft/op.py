"""Declaration of `load_draft`: a draft that was trained elsewhere, from a directory or a model id."""

from __future__ import annotations

from attrs import frozen, validators

from dsl.op import field, op
from ops.artifacts import Draft, TargetModel
from ops.lib.drafts.algorithms import CONFIGS, code_of


@op(
    version=2,
    run="ops.load_draft.run:load_draft",
    key_libraries=("safetensors",),
    single_process=True,
)
@frozen(kw_only=True)
class LoadDraft:
    """Read a draft that z-lab, SpecForge, ModelOpt, DeepSpec, speculators or dflow wrote, or refuse it by name."""

    target: TargetModel
    source: str = field(external=True, model_id=True, pinned_by="revision", help="a draft's directory, or a model id")
    revision: str | None = field(default=None, help="the commit of a model id, 40 hex digits: a branch may move")
    partial_rotary_factor: float | None = field(
        default=None,
        validator=validators.optional(validators.and_(validators.gt(0), validators.le(1))),
        help="which share of a head the draft was trained to rotate, for a config.json that says less than 1: "
        "transformers' Qwen3 class rotates all of it then, and engines that share",
    )
    output = Draft

    def chosen_code(self) -> tuple[str, ...]:
        """The code of all draft algorithms, since the draft's is known only once it exists."""
        return code_of(CONFIGS, "model")
