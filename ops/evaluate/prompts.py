"""Prompts from the held-out split or a benchmark file, and whether answers have positions left.

A benchmark is a file of JSON lines (or one array) of

    {"id": "gsm8k-1", "category": "math", "messages": [{"role": "user", "content": "..."}], "images": ["cats/7.png"]}

A row is read as `ingest` reads it: contents are texts or lists of parts, images stand where a part or <image> says, or
else at the start of the first user turn; paths start at the file's folder and stay in it. Unlike there, nothing is
skipped: results of a benchmark with missing prompts cannot be compared, so every unusable line is an error, and all
are reported at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from dsl.op import op_of
from dsl.stage import Stage
from ops.evaluate.benchmark_rows import BenchmarkRow, Misfit, benchmark_rows, refuse
from ops.evaluate.op import Evaluate
from ops.ingest.image_values import encoded_image
from ops.inject_images.messages import messages as joined_messages
from ops.inject_images.op import InjectImages
from ops.lib.data.batching import spread_over_each
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import Target, check_images_fit, check_patches_fit
from ops.lib.target.sizes import context_length, positions
from ops.lib.vision.images import fault_of, strict_pillow
from ops.lib.vision.processor import Processor, load_processor
from ops.tokenize_chat.encode import ChatEncoder, load_each, prompt_ids, prompt_sample
from ops.tokenize_chat.template import Messages, Tools

MAX_PIXELS = op_of(InjectImages).fields["max_image_pixels"].default
MIN_SIDE = op_of(InjectImages).fields["min_image_side"].default
SHOWN = 100


@frozen(eq=False)
class Prompt:
    """A prompt whose images are read only when needed.

    origin: where a user finds it. length: in tokens, those of the images included. sample: reads the target's input,
    its first `prompt_tokens` tokens. topic: the "category" in the user's data, of a sample of a split.
    """

    origin: str
    id: str
    category: str
    length: int
    has_images: bool
    sample: Callable[[], TokenSample]
    topic: str | None = None

    @classmethod
    def held_out(cls, reader: TokenReader) -> list[Prompt]:
        """The samples of a split as prompts; their answers are not used."""
        return [
            cls(
                origin=f"sample {row['id']}",
                id=str(row["id"]),
                category=str(row["category"]),
                length=int(row["prompt_tokens"]),
                has_images=row["category"] == "image",
                sample=partial(reader.sample, place),
                topic=row.get("topic"),
            )
            for place, row in enumerate(reader.records)
        ]


def processor_of(stage: Stage, target: Target) -> Processor:
    """The processor stored with the tokens, whose template, tokenizer and image sizes the training used."""
    tokens = stage.inputs["tokens"]
    return load_processor(
        str(tokens.path / "processor"),
        trust_remote_code=trusts_own_code(tokens.path / "processor", target.info),
        image_backend=TokenReader(tokens).info["image_backend"] or "pillow",
    )


def choose_prompts(config: Evaluate, stage: Stage, target: Target, processor: Processor) -> list[Prompt]:
    """The prompts to decode: `max_prompts` of each category, spread over the split or the file, in its order.

    Raises DataError if the target cannot read them.
    """
    if config.benchmark is None:
        reader = TokenReader(stage.inputs["tokens"], config.split)
        check_images_fit(reader, target.family)
        return spread_prompts(Prompt.held_out(reader), config.max_prompts, stage.info)
    info = TokenReader(stage.inputs["tokens"]).info
    encoder = ChatEncoder(processor, info.get("enable_thinking"))
    prompts = read_benchmark(Path(config.benchmark), encoder)
    if any(prompt.has_images for prompt in prompts):
        check_patches_fit(info, target.family)
    return spread_prompts(prompts, config.max_prompts, stage.info)


def read_benchmark(file: Path, encoder: ChatEncoder) -> list[Prompt]:
    """All prompts of the file. Raises DataError with every line that cannot be used, as `file:line: what to fix`."""
    prompts: list[Prompt] = []
    misfits: list[Misfit] = []
    with strict_pillow():
        for row in benchmark_rows(file):
            if isinstance(row, Misfit):
                misfits.append(row)
                continue
            try:
                prompts.append(_prompt(row, encoder))
            except Unusable as fault:
                misfits.append(Misfit(row.place, f"{fault.reason}: {fault.detail}" if fault.detail else fault.reason))
    refuse(file, misfits, len(misfits) + len(prompts))
    return prompts


def _prompt(row: BenchmarkRow, encoder: ChatEncoder) -> Prompt:
    """A benchmark's row as a prompt. Raises Unusable."""
    raw = row.sample
    turns = joined_messages({"conversations": [turn.row() for turn in raw.turns], "images": raw.images}, "in-place")
    if raw.images and not encoder.processor.sees:
        raise Unusable("it has an image, and the target is a text model", "remove it")
    for image in raw.images:
        reason, detail = fault_of(encoded_image(image), MAX_PIXELS, MIN_SIDE)
        if reason:
            raise Unusable(reason, f"{image}: {detail}" if isinstance(image, Path) else detail)
    sample = partial(_sample, raw.id, row.category, turns, raw.images, encoder, raw.tools)
    _, tokens = prompt_ids(raw.id, turns, [encoded_image(image) for image in raw.images], encoder, raw.tools)
    return Prompt(row.place, raw.id, row.category, tokens, bool(raw.images), sample)


def _sample(
    sample_id: str,
    category: str,
    turns: Messages,
    images: tuple[Path | bytes, ...],
    encoder: ChatEncoder,
    tools: Tools,
) -> TokenSample:
    """The target's input for a benchmark's row. Raises Unusable."""
    chunks = load_each(images, encoded_image, encoder.processor)
    return prompt_sample(sample_id, category, turns, chunks, encoder, tools)


def spread_prompts(
    prompts: Sequence[Prompt], max_prompts: int | None, info: Callable[[str], None] | None = None
) -> list[Prompt]:
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


def by_length(prompts: Sequence[Prompt]) -> list[int]:
    """Indices of the prompts sorted by length, so that a batch has little padding."""
    return sorted(range(len(prompts)), key=lambda place: prompts[place].length)


def check_lengths(
    prompts: Sequence[Prompt],
    text: Mapping[str, Any],
    draft: DraftConfig,
    max_new_tokens: int,
    field: str = "max_new_tokens",
) -> None:
    """Check that no answer can go beyond the last position of target or draft. Raises DataError that names all prompts.

    Beyond it RoPE's angles are untrained: nothing fails, but answers are poor, tau is low, and a serving engine rejects
    the request. Tokens are counted as in engines, including images. text: the language model's part of the target's
    config.json. field: the config field of max_new_tokens.
    """
    limits = {
        "target": context_length(text),
        "draft": positions(draft.max_position_embeddings, draft.rope_scaling),
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
