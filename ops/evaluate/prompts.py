"""Prompts from the held-out split or a benchmark file.

A benchmark is a file of a published set (ops/evaluate/benchmark_sets.py), or one of JSON lines (or one array) of

    {"id": "gsm8k-1", "category": "math", "messages": [{"role": "user", "content": "..."}], "images": ["cats/7.png"]}

A row is read as `ingest` reads it: contents are texts or lists of parts, images stand where a part or <image> says, or
else at the start of the first user turn; paths start at the file's folder and stay in it. Unlike there, nothing is
skipped: results of a benchmark with missing prompts cannot be compared, so every unusable line is an error, and all
are reported at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from attrs import evolve, frozen

from dsl.errors import DataError
from dsl.op import op_of
from dsl.stage import Stage
from ops.artifacts import TokenShards
from ops.evaluate.benchmark_rows import Benchmark, BenchmarkRow, Misfit, benchmark_rows, refuse
from ops.evaluate.lengths import StoredPrompt, spread_prompts
from ops.evaluate.op import Evaluate
from ops.ingest.image_values import encoded_image
from ops.inject_images.messages import messages as joined_messages
from ops.inject_images.op import InjectImages
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.data.tool_forms import GIVEN
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import Target, check_images_fit, check_patches_fit
from ops.lib.vision.images import fault_of, strict_pillow
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.channels import without_channels
from ops.tokenize_chat.contexts import as_shown
from ops.tokenize_chat.encode import ChatEncoder, load_each, prompt_ids, prompt_sample
from ops.tokenize_chat.records import last_of_each
from ops.tokenize_chat.template import Messages

MAX_PIXELS = op_of(InjectImages).fields["max_image_pixels"].default
MIN_SIDE = op_of(InjectImages).fields["min_image_side"].default
SHORTEST = "."  # an answer, of which the length of a later prompt has one token


@frozen(eq=False)
class Prompt:
    """A prompt whose images are read only when needed.

    origin: where a user finds it. length: in tokens, those of the images included. sample: reads the target's input,
    its first `prompt_tokens` tokens. topic: the "category" in the user's data, of a sample of a split. turn: the number
    of answers before this one, None where it is not known.

    later_lengths: of the prompts that follow from it, in tokens without the answers to those before them. follow: gives
    the next of them by the tokens of this one's answer, and raises Unusable; None without one.
    """

    origin: str
    id: str
    category: str
    length: int
    has_images: bool
    sample: Callable[[], TokenSample]
    topic: str | None = None
    turn: int | None = None
    later_lengths: tuple[int, ...] = ()
    follow: Callable[[Sequence[int]], Prompt] | None = None

    def ids(self) -> list[int]:
        """The tokens of the prompt; its sample is read for them."""
        return self.sample().prompt().input_ids.tolist()

    @classmethod
    def held_out(cls, reader: TokenReader) -> list[Prompt]:
        """A prompt for the last answer of every conversation of a split; its answers are not used.

        Of a conversation in several samples, that is the last one's.
        """
        samples = cls._of_samples(reader)
        return [samples[place] for place in last_of_each(reader.records)]

    @classmethod
    def _of_samples(cls, reader: TokenReader) -> list[Prompt]:
        """A prompt for the last answer of every sample of a split."""
        return [
            cls(
                origin=stored.origin,
                id=str(row["id"]),
                category=stored.category,
                length=stored.length,
                has_images=row["category"] == "image",
                sample=partial(reader.sample, place),
                topic=stored.topic,
                turn=row["answers"][-1][1] if "answers" in row else None,
            )
            for place, (row, stored) in enumerate((row, StoredPrompt.last(row)) for row in reader.records)
        ]

    @classmethod
    def of_each_answer(cls, reader: TokenReader) -> list[Prompt]:
        """A prompt for every answer of a split, in its served context; of several of a sample, each with its number.

        Raises DataError for tokens without such contexts, and as `_ends_of_images`.
        """
        prompts = []
        for place, (row, last) in enumerate(zip(reader.records, cls._of_samples(reader), strict=True)):
            if "answers" not in row:
                raise DataError(
                    'prompts = "each": the tokens do not say where answers begin; tokenise them with contexts = '
                    '"served", or set prompts = "last"'
                )
            if len(row["answers"]) == 1:
                prompts.append(last)
                continue
            image_ends = _ends_of_images(reader, place)
            for start, turn in row["answers"]:
                name, images = f"{row['id']}/{turn + 1}", sum(end <= start for end in image_ends)
                prompts.append(
                    evolve(
                        last,
                        origin=f"sample {name}",
                        id=name,
                        category="image" if images else "text",
                        length=start,
                        has_images=images > 0,
                        sample=partial(_asked_for, reader, place, start, images),
                        turn=turn,
                    )
                )
        return prompts


def _asked_for(reader: TokenReader, place: int, start: int, images: int) -> TokenSample:
    """A sample that is asked for the answer that begins at a token, with as many of its images."""
    sample = reader.sample(place)
    grids = sample.image_grid_thw[:images]
    rows = int(grids.prod(dim=1).sum())
    return evolve(
        sample,
        category="image" if images else "text",
        prompt_tokens=start,
        pixel_values=sample.pixel_values[:rows],
        image_grid_thw=grids,
        seen=sample.seen if images else {},
    )


def _ends_of_images(reader: TokenReader, place: int) -> list[int]:
    """The places in a sample behind the last token of each of its images.

    Raises DataError for an image behind the first answer, if one tensor of its processor holds all images.
    """
    row, tokens = reader.records[place], reader.image_tokens(place)
    ids = reader.labels(place)[0]
    is_image = (ids == reader.info["image_token_id"]).nonzero().flatten().tolist()
    ends = [is_image[behind - 1] + 1 for behind in accumulate(tokens)]
    if "images_of" in reader.info and ends and ends[-1] > row["answers"][0][0]:
        raise DataError(
            f'prompts = "each": sample {row["id"]} has an image behind its first answer, which cannot be left out of '
            f'what a {reader.info["images_of"]} processor made of all its images; set prompts = "last", or leave the '
            "sample out of the split"
        )
    return ends


def with_turns(prompts: Sequence[Prompt], reader: TokenReader) -> list[Prompt]:
    """The prompts of a split with the number of learnt answers before each, where the tokens do not give it.

    Without it if no prompt has one: only the last answers may be learnt, so the turns are not known.
    """
    if all(prompt.turn is not None for prompt in prompts):
        return list(prompts)
    places = {str(row["id"]): place for place, row in enumerate(reader.records)}
    before = [_learnt_before(reader, places[prompt.id]) for prompt in prompts]
    return [evolve(prompt, turn=turn if any(before) else None) for prompt, turn in zip(prompts, before, strict=True)]


def _learnt_before(reader: TokenReader, place: int) -> int:
    """The number of runs of learnt tokens in a sample's prompt."""
    mask = reader.labels(place)[1][: reader.records[place]["prompt_tokens"]].numpy()
    return int(np.count_nonzero(mask & ~np.concatenate(([False], mask[:-1]))))


def encoder_of(tokens: TokenShards, target: Target) -> ChatEncoder:
    """The chat template, tokenizer and image sizes stored with the tokens, which the training used."""
    info = TokenReader(tokens).info
    processor = load_processor(
        str(tokens.path / "processor"),
        trust_remote_code=trusts_own_code(tokens.path / "processor", target.info),
        image_backend=info["image_backend"] or "pillow",
    )
    return ChatEncoder(processor, info.get("enable_thinking"), tools_as=info.get("tools_as", GIVEN))


def choose_prompts(config: Evaluate, stage: Stage, target: Target, encoder: ChatEncoder) -> list[Prompt]:
    """The prompts to decode: `max_prompts` of each category, spread over the split or the file, in its order.

    Raises DataError if the target cannot read them.
    """
    if config.benchmark is None:
        reader = TokenReader(stage.inputs["tokens"], config.split)
        check_images_fit(reader, target.family)
        every = Prompt.of_each_answer(reader) if config.prompts == "each" else Prompt.held_out(reader)
        if config.prompts == "each" and len(every) == len(Prompt.held_out(reader)):
            stage.info(
                f'prompts = "each" asks what "last" asks: each of the {len(every)} conversations can be asked for one '
                'answer, since it has no other, only its last is learnt (train_on = "last"), or it is a prompt only'
            )
        return with_turns(spread_prompts(every, config.max_prompts, stage.info), reader)
    prompts = read_benchmark(Benchmark.of(config), encoder)
    if any(prompt.has_images for prompt in prompts):
        check_patches_fit(TokenReader(stage.inputs["tokens"]).info, target.family)
    return spread_prompts(prompts, config.max_prompts, stage.info)


def read_benchmark(benchmark: Benchmark, encoder: ChatEncoder) -> list[Prompt]:
    """The first prompt of each row. Raises DataError with every line that cannot be used, as `file:line: what to
    fix`.
    """
    prompts: list[Prompt] = []
    misfits: list[Misfit] = []
    with strict_pillow():
        for row in benchmark_rows(benchmark):
            if isinstance(row, Misfit):
                misfits.append(row)
                continue
            try:
                prompts.append(Dialogue.begun(row, encoder).prompt())
            except Unusable as fault:
                misfits.append(Misfit(row.place, f"{fault.reason}: {fault.detail}" if fault.detail else fault.reason))
    refuse(benchmark.file, misfits, len(misfits) + len(prompts))
    return prompts


@frozen(eq=False)
class Dialogue:
    """A row of a benchmark up to one of its questions.

    messages: with the target's answers to the questions before it. later: the questions behind it. asked: how many of
    the row's questions stand before this one.
    """

    row: BenchmarkRow
    encoder: ChatEncoder
    messages: Messages
    later: tuple[str, ...]
    asked: int = 0

    @classmethod
    def begun(cls, row: BenchmarkRow, encoder: ChatEncoder) -> Dialogue:
        """A row up to its first question. Raises Unusable for an image that cannot be used."""
        raw = row.sample
        turns = {"conversations": [turn.row() for turn in raw.turns], "images": raw.images}
        if raw.images and not encoder.processor.sees:
            raise Unusable("it has an image, and the target is a text model", "remove it")
        for image in raw.images:
            reason, detail = fault_of(encoded_image(image), MAX_PIXELS, MIN_SIDE)
            if reason:
                raise Unusable(reason, f"{image}: {detail}" if isinstance(image, Path) else detail)
        return cls(row, encoder, joined_messages(turns, "in-place"), row.later)

    def prompt(self) -> Prompt:
        """The question as a prompt. Raises Unusable if the target cannot be asked it, or one behind it."""
        raw, shown = self.row.sample, f" (turn {self.asked + 1})" if self.asked else ""
        return Prompt(
            origin=f"{self.row.place}{shown}",
            id=f"{raw.id}@{self.asked}" if self.asked else raw.id,
            category=self.row.category,
            length=self._length(),
            has_images=bool(raw.images),
            sample=self._sample,
            turn=sum(message["role"] == "assistant" for message in self.messages),
            later_lengths=tuple(self._later_lengths()),
            follow=self._follow if self.later else None,
        )

    def answered(self, text: str) -> Dialogue:
        """The row up to its next question, after this answer."""
        said = (
            {"role": role, "content": _words(words)} for role, words in (("assistant", text), ("user", self.later[0]))
        )
        return Dialogue(self.row, self.encoder, [*self.messages, *said], self.later[1:], self.asked + 1)

    def _follow(self, answer: Sequence[int]) -> Prompt:
        tokens = list(answer[:-1] if answer and answer[-1] in self.encoder.processor.eos_token_ids else answer)
        text = self.encoder.processor.tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return self.answered(without_channels(text) if self.encoder.template.has_channels else text).prompt()

    def _later_lengths(self) -> Iterator[int]:
        dialogue = self
        while dialogue.later:
            dialogue = dialogue.answered(SHORTEST)
            yield dialogue._length()

    def _length(self) -> int:
        raw = self.row.sample
        images = [encoded_image(image) for image in raw.images]
        return prompt_ids(raw.id, self._shown, images, self.encoder, raw.tools, raw.documents)[1]

    def _sample(self) -> TokenSample:
        raw = self.row.sample
        chunks = load_each(raw.images, encoded_image, self.encoder.processor)
        return prompt_sample(raw.id, self.row.category, self._shown, chunks, self.encoder, raw.tools, raw.documents)

    @property
    def _shown(self) -> Messages:
        """The messages as a server gives them to the chat template: reasoning is under the key that it shows."""
        if not any(message["role"] == "assistant" for message in self.messages):
            return self.messages
        return as_shown(self.encoder.habits, self.messages, keeps_reasoning=True)[1]


def _words(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def by_length(prompts: Sequence[Prompt]) -> list[int]:
    """Indices of the prompts sorted by length, so that a batch has little padding."""
    return sorted(range(len(prompts)), key=lambda place: prompts[place].length)
