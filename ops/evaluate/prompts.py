"""Prompts from the held-out split or a benchmark file, and whether answers have positions left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from dsl.errors import DataError
from dsl.stage import Stage
from ops.evaluate.benchmark import read_benchmark
from ops.evaluate.op import Evaluate
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.dflash.config import DraftConfig
from ops.lib.target.model import Target, check_images_fit, check_patches_fit
from ops.lib.vision.processor import Processor, load_processor
from ops.tokenize_chat.encode import ChatEncoder


class Prompt(Protocol):
    """A prompt whose images are read when they are needed.

    origin: where a user finds it. length: in tokens, those of the images included.
    """

    @property
    def origin(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def category(self) -> str: ...
    @property
    def length(self) -> int: ...

    def sample(self) -> TokenSample:
        """The target's input: the first `prompt_tokens` tokens."""


@frozen
class HeldOut:
    """A sample of the split, whose answer is not used."""

    reader: TokenReader
    place: int

    @property
    def origin(self) -> str:
        return f"sample {self.id}"

    @property
    def id(self) -> str:
        return str(self.reader.records[self.place]["id"])

    @property
    def category(self) -> str:
        return str(self.reader.records[self.place]["category"])

    @property
    def length(self) -> int:
        return int(self.reader.records[self.place]["prompt_tokens"])

    def sample(self) -> TokenSample:
        return self.reader.sample(self.place)


def processor_of(stage: Stage, target: Target) -> Processor:
    """The one that came with the tokens: its template, tokenizer and image sizes made the prompts trained on."""
    tokens = stage.inputs["tokens"]
    return load_processor(
        str(tokens.path / "processor"),
        trust_remote_code=bool(target.info.get("trust_remote_code", False)),
        image_backend=TokenReader(tokens).info["image_backend"] or "pillow",
    )


def choose_prompts(config: Evaluate, stage: Stage, target: Target, processor: Processor) -> list[Prompt]:
    """The first `max_prompts` of each category, in the order of the split or the file.

    Raises DataError if the target cannot read them, or if there is none.
    """
    if config.benchmark is None:
        reader = TokenReader(stage.inputs["tokens"], config.split)
        check_images_fit(reader, target.family)
        prompts: list[Prompt] = [HeldOut(reader, place) for place in range(len(reader))]
        if not prompts:
            raise DataError(
                f'the split "{config.split}" has no samples to evaluate; set "split" of samples in the JSONL file, '
                "or raise test_fraction or val_fraction of ingest"
            )
        return first_of_each(prompts, config.max_prompts, stage.info)
    info = TokenReader(stage.inputs["tokens"]).info
    encoder = ChatEncoder(processor, info.get("enable_thinking"))
    asked = read_benchmark(Path(config.benchmark), encoder)
    if any(prompt.images for prompt in asked):
        check_patches_fit(info, target.family)
    return first_of_each(asked, config.max_prompts, stage.info)


def first_of_each(
    prompts: Iterable[Prompt], max_prompts: int | None, info: Callable[[str], None] = print
) -> list[Prompt]:
    """The first `max_prompts` of each category, all of them where that is None; reports how many are left out."""
    seen: Counter[str] = Counter()
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if max_prompts is None or seen[prompt.category] <= max_prompts:
            chosen.append(prompt)
    cut = {name: count for name, count in seen.items() if max_prompts is not None and count > max_prompts}
    if cut:
        shares = ", ".join(f"{max_prompts} of {count} of {name}" for name, count in cut.items())
        info(f"max_prompts selects the first prompts of each category: {shares}")
    return chosen


def by_length(prompts: Sequence[Prompt]) -> list[int]:
    """The places of the prompts, those of similar length side by side, so that a batch has little padding."""
    return sorted(range(len(prompts)), key=lambda place: prompts[place].length)


SHOWN = 100


def check_lengths(
    prompts: Sequence[Prompt],
    text: Mapping[str, Any],
    draft: DraftConfig,
    max_new_tokens: int,
    field: str = "max_new_tokens",
) -> None:
    """Raises DataError that names every prompt whose answer could end behind the positions of target or draft.

    There RoPE's angles are untrained: nothing fails, answers get poor and tau low, and a serving
    engine rejects such a request.

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
                f"the first token) may need more tokens than the {limit} positions of the {whose} "
                "(max_position_embeddings of its config.json), beyond which answers and tau are poor:",
                *lines,
                _remedy(too_long, limit, field),
            ]
        )
    )


def _remedy(too_long: Sequence[Prompt], limit: int, field: str) -> str:
    longest = max(prompt.length for prompt in too_long)
    leave_out = (
        "remove these prompts: by max_length of tokenize_chat, or from the benchmark's file if they come from one"
    )
    if longest + 2 > limit:
        return f"{leave_out}; no {field} is small enough for all of them"
    return f"set {field} = {limit - longest - 1} or less, or {leave_out}"


def _positions(trained: int | None, rope: Mapping[str, Any] | None) -> int | None:
    """How many positions a model is made for: those of its config, or as many as its RoPE is stretched over."""
    if trained is None:
        return None
    scaling = rope or {}
    stretched = (scaling.get("factor") or 1.0) * (scaling.get("original_max_position_embeddings") or trained)
    return max(trained, int(stretched))
