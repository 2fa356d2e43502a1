"""Where the prompts come from: the held-out split of the tokens, or a benchmark file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

from attrs import frozen

from dsl.errors import DataError
from dsl.stage import Stage
from ops.evaluate.benchmark import read_benchmark
from ops.evaluate.op import Evaluate
from ops.lib.data.token_shards import TokenReader, TokenSample
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
        """What the target is given, in its first `prompt_tokens` tokens."""


@frozen
class HeldOut:
    """A sample of the split, whose answer is not looked at."""

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

    Raises DataError where the target cannot read them, and where there is none.
    """
    if config.benchmark is None:
        reader = TokenReader(stage.inputs["tokens"], config.split)
        check_images_fit(reader, target.family)
        prompts: list[Prompt] = [HeldOut(reader, place) for place in range(len(reader))]
        if not prompts:
            raise DataError(
                f'the split "{config.split}" holds no samples to evaluate; give samples a "split" in the JSONL file, '
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
        info(f"max_prompts takes the first prompts of each category: {shares}")
    return chosen


def by_length(prompts: Sequence[Prompt]) -> list[int]:
    """The places of the prompts, those of similar length side by side, so that a batch has little padding."""
    return sorted(range(len(prompts)), key=lambda place: prompts[place].length)
