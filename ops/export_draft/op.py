"""Declaration of `export_draft`: the serving directory."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from dsl.op import field, op
from ops.artifacts import Draft, DraftCheckpoint, TargetModel
from ops.lib.drafts.algorithms import algorithm_names, code_of


def _formats(_instance: object, _attribute: object, formats: tuple[str, ...]) -> None:
    """A validator: the format that the gate, the evaluation and SGLang read must be among the formats."""
    if "sglang" not in formats:
        raise ValueError("'formats' must contain \"sglang\", which evaluate and check_export read")
    if len(set(formats)) < len(formats):
        raise ValueError(f"'formats' names one twice: {', '.join(formats)}")


@op(
    version=1,
    run="ops.export_draft.run:export_draft",
    key_libraries=("safetensors",),
    single_process=True,
)
@frozen(kw_only=True)
class ExportDraft:
    """Write the draft as a serving directory, and check it against the serving contract."""

    draft: DraftCheckpoint
    target: TargetModel
    dtype: Literal["float32", "bfloat16", "float16"] = field(default="float32", help="of the exported weights")
    formats: tuple[Literal["sglang", "speculators"], ...] = field(
        default=("sglang",),
        validator=_formats,
        help='"speculators": also write the draft as speculators and vLLM read it, in a folder of that name beside the '
        "serving directory's own files",
    )
    engine: Literal["sglang-0.5.21", "sglang-0.5.23"] | None = field(
        default=None,
        help="the version that will serve the draft: the gate and dflow serve refuse others; default: any supported "
        "one, since all read the same files. Of LiLiCorr 0.5.21 reads other names of tensors than 0.5.23 and vLLM, "
        "whose names are the default",
    )
    output = Draft

    def chosen_code(self) -> tuple[str, ...]:
        """The code of all draft algorithms, since the draft's is known only once it exists."""
        return code_of(algorithm_names())
