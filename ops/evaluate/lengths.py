"""Whether prompts and their answers end before the positions do that target and draft were made for.

Behind them RoPE turns by angles that no weight has seen: nothing fails, answers get poor and tau low, and a serving
engine refuses such a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsl.errors import DataError
from ops.evaluate.prompts import Prompt
from ops.lib.drafts.dflash.config import DraftConfig

SHOWN = 100


def check_lengths(
    prompts: Sequence[Prompt],
    text: Mapping[str, Any],
    draft: DraftConfig,
    max_new_tokens: int,
    field: str = "max_new_tokens",
) -> None:
    """Raises DataError that names every prompt whose answer could end behind the last position.

    text: the part of the target's config.json that describes the language model. field: what a user sets for
    max_new_tokens.

    Tokens are counted, those of images too, as engines do it, and the draft's positions.
    """
    limits = {
        "target": _positions(
            text.get("max_position_embeddings"), text.get("rope_parameters") or text.get("rope_scaling")
        ),
        "draft": _positions(draft.max_position_embeddings, draft.rope_scaling),
    }
    whose, limit = min(
        ((name, limit) for name, limit in limits.items() if limit is not None), key=lambda named: named[1]
    )
    answer = max_new_tokens + 1  # the first token comes from the prefill
    too_long = [prompt for prompt in prompts if prompt.length + answer > limit]
    if not too_long:
        return
    lines = [f"  {prompt.origin}: {prompt.length} + {answer} = {prompt.length + answer}" for prompt in too_long[:SHOWN]]
    if len(too_long) > SHOWN:
        lines.append(f"  ... and {len(too_long) - SHOWN} more")
    raise DataError(
        "\n".join(
            [
                f"{len(too_long)} of {len(prompts)} prompts and their answers ({field} = {max_new_tokens}, and "
                f"the first token) may take more tokens than the {limit} positions of the {whose} "
                "(max_position_embeddings of its config.json), behind which answers and tau are poor:",
                *lines,
                _remedy(too_long, limit, field),
            ]
        )
    )


def _remedy(too_long: Sequence[Prompt], limit: int, field: str) -> str:
    longest = max(prompt.length for prompt in too_long)
    leave_out = (
        "take these prompts out: by max_length of tokenize_chat, or of the benchmark's file where they come from one"
    )
    if longest + 2 > limit:
        return f"{leave_out}; no {field} is small enough for all of them"
    return f"give {field} = {limit - longest - 1} or less, or {leave_out}"


def _positions(trained: int | None, rope: Mapping[str, Any] | None) -> int | None:
    """How many positions a model is made for: those of its config, or as many as its RoPE is stretched over."""
    if trained is None:
        return None
    scaling = rope or {}
    stretched = (scaling.get("factor") or 1.0) * (scaling.get("original_max_position_embeddings") or trained)
    return max(trained, int(stretched))
