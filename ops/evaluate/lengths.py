"""Whether prompts and their answers have positions left: the rule of a plan, an evaluation and a training that decodes.

Beyond the last position RoPE's angles are untrained: nothing fails, but answers are poor, tau is low, and a serving
engine rejects the request. Tokens are counted as in engines, including images. Loads no torch.

Everywhere: text is the language model's part of the target's config.json; draft the draft's config, how the target's
own MTP head is used, or None if it is not known; field the config field of max_new_tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from attrs import frozen

from dsl.errors import DataError
from ops.lib.data.batching import spread_over_each
from ops.lib.data.files import read_jsonl
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.decoding.decode_options import ChainUse
from ops.lib.forecasts import TokensForecast
from ops.lib.target.sizes import context_length, positions, positions_field, rope_limit
from ops.tokenize_chat.records import last_of_each

SHOWN = 100
Text = Mapping[str, Any]
Decoding = DraftConfig | ChainUse | None


class HasLength(Protocol):
    """A prompt with its length in tokens; fields as of Prompt in ops/evaluate/prompts.py."""

    @property
    def origin(self) -> str: ...
    @property
    def length(self) -> int: ...
    @property
    def later_lengths(self) -> tuple[int, ...]: ...


class HasTopic(Protocol):
    """A prompt with what prompts are spread over."""

    @property
    def category(self) -> str: ...
    @property
    def topic(self) -> str | None: ...


P = TypeVar("P", bound=HasTopic)


@frozen
class StoredPrompt:
    """A prompt of a split as its row in samples.jsonl describes it."""

    origin: str
    category: str
    length: int
    topic: str | None
    later_lengths: tuple[int, ...] = ()

    @classmethod
    def last(cls, row: Mapping[str, Any]) -> StoredPrompt:
        """The prompt for a sample's last answer."""
        return cls(f"sample {row['id']}", str(row["category"]), int(row["prompt_tokens"]), row.get("topic"))

    @classmethod
    def each(cls, row: Mapping[str, Any]) -> Iterator[StoredPrompt]:
        """The prompts for all answers of a sample. The category is the sample's."""
        last = cls.last(row)
        if len(row["answers"]) == 1:
            yield last
            return
        for start, turn in row["answers"]:
            yield cls(f"{last.origin}/{turn + 1}", last.category, start, last.topic)


def spread_prompts(prompts: Sequence[P], max_prompts: int | None, info: Callable[[str], None] | None = None) -> list[P]:
    """At most `max_prompts` prompts of each category, as `spread_over_each` chooses; None: all of them.

    info: gets how many are omitted.
    """
    chosen = spread_over_each([(prompt.category, prompt.topic or "") for prompt in prompts], max_prompts)
    seen = Counter(prompt.category for prompt in prompts)
    cut = {name: count for name, count in seen.items() if max_prompts is not None and count > max_prompts}
    if cut and info is not None:
        shares = ", ".join(f"{max_prompts} of {count} of {name}" for name, count in cut.items())
        info(f"max_prompts selects prompts spread over each category: {shares}")
    return [prompts[place] for place in chosen]


@frozen
class TooLong:
    """Prompts whose answers may end behind the last position. lines: one for each of the first of them."""

    head: str
    lines: Sequence[str]
    remedy: str

    @property
    def listed(self) -> str:
        """A text of several lines."""
        return "\n".join([f"{self.head}:", *(f"  {line}" for line in self.lines), self.remedy])

    @property
    def sentence(self) -> str:
        """A text of one line, with the first prompt."""
        more = f", and {len(self.lines) - 1} more" if len(self.lines) > 1 else ""
        return f"{self.head} ({self.lines[0]}{more}): {self.remedy}"


def check_lengths(
    prompts: Sequence[HasLength], text: Text, draft: Decoding, max_new_tokens: int, field: str = "max_new_tokens"
) -> None:
    """Check that no answer can go beyond the last position of target or draft. Raises DataError that names prompts."""
    if found := too_long(prompts, text, draft, max_new_tokens, field):
        raise DataError(found.listed)


def stored_lengths_mistake(
    tokens: TokensForecast | None,
    split: str,
    prompts: str,
    max_prompts: int | None,
    text: Text,
    draft: Decoding,
    max_new_tokens: int,
    field: str = "max_new_tokens",
) -> str:
    """A text on what `check_lengths` will refuse of prompts of a split; empty if it will not, or if that is not known.

    Of stored tokens that are all the prompts that will be chosen, where a plan gives their `longest`; before, only
    answers beside which no prompt fits. prompts: "last" or "each" answer of a conversation.
    """
    bounds = _bounds(text, draft)
    if bounds is None:
        return ""
    if tokens is None or tokens.folder is None:
        return no_prompt_mistake(text, draft, max_new_tokens, field)
    if tokens.longest + max_new_tokens + 1 <= bounds[0] or not tokens.longest:
        return ""
    rows = [row for row in read_jsonl(tokens.folder / "samples.jsonl") if row["split"] == split]
    if prompts == "last":
        every = [StoredPrompt.last(rows[place]) for place in last_of_each(rows)]
    elif all("answers" in row for row in rows):
        every = [prompt for row in rows for prompt in StoredPrompt.each(row)]
        if max_prompts is not None and any(row["category"] == "image" and len(row["answers"]) > 1 for row in rows):
            return ""  # which of them are prompts without an image, and so are chosen, only the shards tell
    else:
        return ""
    found = too_long(spread_prompts(every, max_prompts), text, draft, max_new_tokens, field)
    return "" if found is None else found.sentence


def no_prompt_mistake(text: Text, draft: Decoding, max_new_tokens: int, field: str = "max_new_tokens") -> str:
    """A text if answers are so long that not even a prompt of one token fits beside them; empty otherwise."""
    bounds = _bounds(text, draft)
    if bounds is None or max_new_tokens + 2 <= bounds[0]:
        return ""
    limit, whose, of = bounds
    return (
        f"no prompt fits beside {max_new_tokens} tokens in the {limit} positions of the {whose} ({of}): set "
        f"{field} = {limit // 2} or less"
    )


def too_long(
    prompts: Sequence[HasLength], text: Text, draft: Decoding, max_new_tokens: int, field: str
) -> TooLong | None:
    """The prompts whose answers may go beyond the last position of target or draft; None without any."""
    bounds = _bounds(text, draft)
    if bounds is None:
        return None
    limit, whose, of = bounds
    answer = max_new_tokens + 1  # the first token comes from the prefill
    every = [(prompt.origin, turn, length) for prompt in prompts for turn, length in enumerate(_lengths(prompt))]
    found = [(origin, turn, length) for origin, turn, length in every if length + (turn + 1) * answer > limit]
    if not found:
        return None
    lines = [
        f"{origin}{f' (turn {turn + 1})' if turn else ''}: {length} + {f'{turn + 1} x ' if turn else ''}{answer} = "
        f"{length + (turn + 1) * answer}"
        for origin, turn, length in found[:SHOWN]
    ]
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} more")
    return TooLong(
        head=f"{len(found)} of {len(every)} prompts and their answers ({field} = {max_new_tokens}, and the first "
        f"token) may need more tokens than the {limit} positions of the {whose} ({of} of its config.json), beyond "
        "which answers and tau are poor",
        lines=lines,
        remedy=_remedy([(turn, length) for _, turn, length in found], limit, field),
    )


def _bounds(text: Text, draft: Decoding) -> tuple[int, str, str] | None:
    """The fewest positions of target and draft, whose they are, and the field that says so; None if none is known."""
    within, limit = rope_limit(text), context_length(text)
    known = []
    if limit is not None and (within is None or draft is None):
        known.append((limit, "target", positions_field(text)))
    elif within is not None and draft is not None:  # the last block is whole
        known.append((within - draft.block_size, "target", f"{positions_field(text)}, less a block,"))
    if isinstance(draft, DraftConfig):
        of_draft = positions(draft.max_position_embeddings, draft.rope_scaling)
        known.append((of_draft, "draft", "max_position_embeddings"))
    return min(known, key=lambda bound: bound[0], default=None)


def _lengths(prompt: HasLength) -> tuple[int, ...]:
    """The lengths of a prompt and of those that follow from it, without the answers to them."""
    return (prompt.length, *prompt.later_lengths)


def _remedy(too_long: Sequence[tuple[int, int]], limit: int, field: str) -> str:
    """too_long: turn and length of each prompt."""
    most = min((limit - length) // (turn + 1) for turn, length in too_long) - 1
    leave_out = (
        "remove these prompts: by max_length of tokenize_chat, or from the benchmark's file if they come from one"
    )
    if any(turn for turn, _ in too_long):
        leave_out += ", or set first_turn = true"
    if most < 1:
        return f"{leave_out}; no {field} is small enough for all of them"
    return f"set {field} = {most} or less, or {leave_out}"
