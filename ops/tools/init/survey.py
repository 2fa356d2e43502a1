"""Survey of a user's data: format, samples, images, splits and lengths, as `ingest` would read it.

Neither torch nor transformers is loaded. Texts are counted exactly if the target's tokenizer.json is present; what the
chat template adds to a turn counts as TURN_TOKENS, and an image as its processor would resize it. Where the template
can be used, rendering.py then counts a part of the samples exactly.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import random
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from attrs import Factory, define, evolve, field, frozen

from dsl.errors import DataError
from ops.ingest.image_values import MISSING, OUTSIDE, encoded_image
from ops.ingest.op import LABEL, Columns, Ingest
from ops.ingest.read import Reading, WithoutRow, images_without_row, read_samples
from ops.ingest.remedies import REMEDIES as ingest_remedies
from ops.ingest.sample import END_OF_THOUGHT, IMAGE, THINK, DroppedSample, ImagePart, RawSample, Turn
from ops.ingest.source import UnknownFormat, find_format
from ops.ingest.splits import split_of
from ops.lib.data.sample_account import MOST_LOST, Unusable
from ops.lib.vision.family_config import sees_by_name
from ops.lib.vision.images import fault_of, size_of, strict_pillow
from ops.tools.init.columns import Proposal, proposed_columns
from ops.tools.init.target import Target, most_image_tokens

BY_CLASS = "image-folder"
MEASURED = 1000  # samples whose tokens are counted
RENDERED, LONGEST = 200, 8  # samples for rendering.py: a random part, and those with the most text
DECODED = 100  # samples whose images are decoded
QUESTION = "What is in the image?"  # asked about images by class
SEEN = 8  # file types listed for a folder without readable data
MOST_PIXELS, LEAST_SIDE = 64_000_000, 2  # the defaults of inject_images
# Shares of val and test, smallest first: the first with enough samples in both is used.
FRACTIONS = (
    *((0.01, 0.02), (0.02, 0.05), (0.05, 0.1), (0.05, 0.2), (0.1, 0.2)),
    *((0.05, 0.3), (0.1, 0.3), (0.1, 0.4), (0.2, 0.3), (0.3, 0.4)),
)
REMEDIES = {
    **ingest_remedies,
    OUTSIDE: "--image-root names the folder of the images; --allow-outside accepts them anywhere",
    MISSING: "relative paths start from the file's own folder; --image-root names another one",
}
TURN_TOKENS = 5  # <|im_start|>, the role, two line breaks and <|im_end|> of Qwen's templates
TOKENS_OF_IMAGE = 1024  # where the longest samples are looked for
BYTES_PER_TOKEN = 4  # of UTF-8: English prose has about 4, Chinese about as many
MOST_ASPECT = 200  # of an image that processors take

Size = tuple[int, int]  # width, height
Part = tuple[int, int]  # of a conversation: tokens of text, and the number of images, which are its first ones
T = TypeVar("T")


@define
class AnswerCounts:
    """Counts of learnt answers, and those with reasoning; thinking, plain: samples with a learnt answer that has some,
    and with one that has none.
    """

    learnt: int = 0
    reasoned: int = 0
    thinking: int = 0
    plain: int = 0

    def add(self, reasons: list[bool]) -> None:
        """Add a sample. reasons: whether each of its learnt answers has reasoning."""
        self.learnt += len(reasons)
        self.reasoned += sum(reasons)
        self.thinking += any(reasons)
        self.plain += not all(reasons)


@define(kw_only=True)
class Survey:
    """The result of a survey of the data.

    forms: of the sources. proposal: of columns, if the rows have other ones than `ingest` reads. dropped: reason ->
    samples; examples: reason -> one of them. with_tools, with_calls: samples that name tools, and those that call any.
    of_last, of_all: answers, where only the last of a request is learnt, and where all are. requests: samples from the
    traffic of a server, `continued` of them with earlier answers, and reasoning in `earlier_reasoned` of these and in
    `last_reasoned` of the last ones; asked: digests of what each asks, and preceding: of what was asked for the answer
    before the last.
    lacking: reason -> requests without a usable answer, which are prompts or dropped. decoded,
    broken: images that were examined, and those that inject_images rejects. examined, spoilt: samples of the former,
    and of the latter; spoilt ones are dropped, and count nowhere else. placed_images: samples with several images, or
    with one in a tool's result. unnamed: images without a caption. splits: for each of FRACTIONS, split -> samples.
    given: splits that the data names. lengths: of up to MEASURED samples, counted with `exact` and `rules`; token_ids:
    all that these gave. drawn, most: samples to render, RENDERED random ones and the LONGEST of all.
    Names of classes do not count as answers, since the target's answers replace them.

    rendered: whether `lengths` are of up to RENDERED samples as the target's chat template shows them; then longest are
    those of `most` that are not among them, unfit: reason -> samples that it does not fit, and unrendered the reason
    why it was not used, if so.
    """

    sources: tuple[Path, ...]
    forms: tuple[str, ...]
    image_root: str | tuple[str, ...] | None
    allow_outside: bool
    proposal: Proposal | None
    exact: bool
    rules: PixelRules | OwnRules
    samples: int = 0
    with_images: int = 0
    placed_images: int = 0
    with_tools: int = 0
    with_calls: int = 0
    unanswered: int = 0
    of_last: AnswerCounts = Factory(AnswerCounts)
    of_all: AnswerCounts = Factory(AnswerCounts)
    duplicates: int = 0
    requests: int = 0
    continued: int = 0
    earlier_reasoned: int = 0
    last_reasoned: int = 0
    asked: set[bytes] = Factory(set)
    preceding: Tally[bytes] = Factory(Tally)
    lacking: Tally[str] = Factory(Tally)
    dropped: Tally[str] = Factory(Tally)
    examples: dict[str, str] = Factory(dict)
    decoded: int = 0
    broken: int = 0
    examined: int = 0
    spoilt: int = 0
    unnamed: list[WithoutRow] = Factory(list)
    given: set[str] = Factory(set)
    splits: dict[tuple[float, float], Tally[str]] = field(factory=lambda: {each: Tally() for each in FRACTIONS})
    lengths: list[Length] = Factory(list)
    token_ids: set[int] = Factory(set)
    drawn: list[Drawn] = Factory(list)
    most: list[Drawn] = Factory(list)
    rendered: bool = False
    longest: list[Length] = Factory(list)
    unfit: Tally[str] = Factory(Tally)
    unrendered: str = ""

    @property
    def shown_sources(self) -> str:
        return ", ".join(map(str, self.sources))

    @property
    def unseen_spoilt(self) -> int:
        """An estimate of the samples with a broken image among those not examined, by the share among those
        examined.
        """
        unseen = self.with_images - (self.examined - self.spoilt)
        return round(unseen * self.spoilt / self.examined) if self.examined else 0

    @property
    def asked_again(self) -> int:
        """The number of requests without a usable answer that are kept as prompts."""
        return self.lacking.total() if self.unanswered else 0

    @property
    def preceded(self) -> int:
        """The number of requests whose answer before the last is in the log as that of a request of its own."""
        return sum(count for digest, count in self.preceding.items() if digest in self.asked)

    @property
    def lost_reasoning(self) -> bool:
        """Whether requests have reasoning in their last answers only, so that the earlier ones are not as written."""
        return self.last_reasoned > 0 and not self.earlier_reasoned

    @property
    def learns_last(self) -> bool:
        """Whether only the last answer of a request is to be learnt: a log of whole conversations, each with its last
        request, has every answer once, and learns all.
        """
        return 0 < self.requests and (2 * self.preceded >= self.continued or self.lost_reasoning)

    @property
    def answers(self) -> AnswerCounts:
        """The answers that are learnt."""
        return self.of_last if self.learns_last else self.of_all

    @property
    def read(self) -> int:
        """The number of samples that were read, those that are dropped included."""
        return self.samples + self.dropped.total()

    @property
    def usable(self) -> int:
        """The number of samples that are kept: all counted ones, less `unseen_spoilt`."""
        return self.samples - self.unseen_spoilt

    def usable_in(self, fractions: tuple[float, float], split: str) -> int:
        """The number of samples kept in a split, for one of FRACTIONS."""
        return round(self.splits[fractions][split] * self.usable / self.samples)

    @property
    def has_classes(self) -> bool:
        """Whether there are images whose class stands for an answer."""
        return BY_CLASS in self.forms


def survey(
    sources: tuple[Path, ...],
    counter: Counter,
    image_root: str | tuple[str, ...] | None = None,
    allow_outside: bool = False,
    named: Proposal | None = None,
) -> Survey:
    """Read all the data, and measure lengths in a random sample with a fixed seed.

    image_root, allow_outside: as for `ingest`. named: the columns, if the user names them. Raises DataError for data
    that `ingest` would reject, with every broken row, for an unknown format, with the files found, for columns whose
    meaning cannot be told, and if no sample is usable.

    Requests of a log without a usable answer are dropped, as `ingest` does by default. Where these are more than the
    share MOST_LOST of all requests, or other samples are prompts too, the data is read again, and they are prompts.
    """
    forms = _forms(sources, None if named is None else named.columns)
    proposal = named or proposed_columns(sources, forms, allow_outside)

    def surveyed(keeps_requests: bool) -> Survey:
        found = Survey(
            sources=sources,
            forms=forms,
            image_root=image_root,
            allow_outside=allow_outside,
            proposal=proposal,
            exact=counter.exact,
            rules=counter.rules,
        )
        _read(found, counter, keeps_requests=keeps_requests)
        return found

    found = surveyed(False)
    lacking = found.lacking.total()
    if lacking and (found.unanswered or lacking > MOST_LOST * (found.requests + lacking)):
        found = surveyed(True)
    if not found.samples:
        raise DataError(_nothing(found))
    return found


def _read(found: Survey, counter: Counter, *, keeps_requests: bool) -> None:
    """Read the data of a survey. keeps_requests: those without a usable answer are prompts, and else dropped."""
    sources, forms = found.sources, found.forms
    reading = Reading(
        sources=sources,
        image_root=found.image_root,
        allow_outside=found.allow_outside,
        duplicate_ids="number",
        question=QUESTION,
        answer=LABEL,
        require_answers=False,
        columns=None if found.proposal is None else found.proposal.columns,
    )
    found.unnamed = images_without_row(reading)
    # The ids of images by class begin with the name of their source; that of a single one is empty.
    classes = tuple(name for name, form in zip(reading.names(), forms, strict=True) if form == BY_CLASS)
    configs = {each: Ingest(source=str(sources[0]), val_fraction=each[0], test_fraction=each[1]) for each in FRACTIONS}
    measured: list[Length] = []
    drawn, tried, rendered = random.Random(0), random.Random(1), random.Random(2)
    most: list[tuple[int, int, Drawn]] = []  # a heap: characters, place
    with strict_pillow():
        for _, sample in read_samples(reading):
            if isinstance(sample, DroppedSample):
                _drop(found, sample.id, sample.reason, sample.detail)
                continue
            if sample.lacks:
                found.lacking[sample.lacks] += 1
                if not keeps_requests:
                    _drop(found, sample.id, sample.lacks, "")
                    continue
            seen = found.with_images + found.spoilt + 1
            if sample.images and (found.decoded < DECODED or tried.random() < DECODED / seen):
                reason, detail = _fault(found, sample)
                if reason:
                    _drop(found, sample.id, reason, detail)
                    continue
            _count(found, sample)
            splits = {fractions: split_of(config, sample) for fractions, config in configs.items()}
            for fractions, split in splits.items():
                found.splits[fractions][split] += 1
            one = partial(Drawn.of, sample, splits, sample.id.startswith(classes))
            _keep(measured, drawn, found.samples, MEASURED, partial(_counted, counter, one))
            _keep(found.drawn, rendered, found.samples, RENDERED, one)
            size = _characters(sample)
            if len(most) < LONGEST or size > most[0][0]:
                heapq.heappush(most, (size, -found.samples, one()))
                if len(most) > LONGEST:
                    heapq.heappop(most)
    found.lengths, found.token_ids = [of_request(found, length) for length in measured], counter.seen
    rendered.shuffle(found.drawn)  # a part of them stands for all too
    found.most = [one for _, _, one in most]


def percentile(values: list[int], share: float) -> int:
    """The smallest value that this share of the values does not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0


def _count(found: Survey, sample: RawSample) -> None:
    found.samples += 1
    found.with_images += bool(sample.images)
    found.placed_images += len(sample.images) > 1 or any(
        turn.role == "tool" and IMAGE in turn.content for turn in sample.turns
    )
    found.with_tools += bool(sample.tools)
    found.with_calls += any(turn.tool_calls for turn in sample.turns)
    found.unanswered += sample.turns[-1].role != "assistant"
    answers = [_reasons(turn) for turn in sample.turns if turn.role == "assistant"]
    is_request = sample.opening is not None
    found.of_last.add(answers[-1:] if is_request or sample.learns_last else answers)
    found.of_all.add(answers[-1:] if sample.learns_last else answers)
    found.duplicates += sample.draw_id is not None
    if is_request:
        _count_request(found, sample)
    if sample.split is not None:
        found.given.add(sample.split)


def _count_request(found: Survey, sample: RawSample) -> None:
    found.requests += 1
    before_last = sample.turns[:-1] if sample.turns[-1].role == "assistant" else sample.turns
    found.asked.add(_asked(before_last))
    earlier = [place for place, turn in enumerate(before_last) if turn.role == "assistant"]
    if earlier:
        found.continued += 1
        found.earlier_reasoned += sum(_reasons(before_last[place]) for place in earlier)
        found.last_reasoned += sample.turns[-1].role == "assistant" and _reasons(sample.turns[-1])
        found.preceding[_asked(before_last[: earlier[-1]])] += 1


def _asked(turns: Sequence[Turn]) -> bytes:
    """A digest of the turns without answers, which clients change before they send them back."""
    asked = [turn.row() for turn in turns if turn.role != "assistant"]
    return hashlib.blake2b(json.dumps(asked).encode(), digest_size=16).digest()


def _characters(sample: RawSample) -> int:
    """About how long a sample is, in characters, with TOKENS_OF_IMAGE for each image."""
    of_turns = sum(len(text) for turn in sample.turns for text in texts(turn))
    return of_turns + len(str(sample.tools)) + len(sample.images) * TOKENS_OF_IMAGE * BYTES_PER_TOKEN


def _reasons(turn: Turn) -> bool:
    """Whether an answer has reasoning, in its own field or in the text."""
    texts = [part for part in turn.content if isinstance(part, str)]
    return bool(turn.reasoning_content) or any(mark in text for text in texts for mark in (THINK, END_OF_THOUGHT))


def _forms(sources: tuple[Path, ...], columns: Columns | None) -> tuple[str, ...]:
    """The format of each source. Raises DataError for those that are missing, or of an unknown format."""
    forms, mistakes = [], []
    for source in sources:
        try:
            forms.append(find_format(source, "auto", columns))
        except UnknownFormat as error:
            mistakes.append(f"{error.with_remedy('')}{_contents_hint(source)}")  # `format` is of a file to be written
        except DataError as error:
            mistakes.append(f"{error}{_contents_hint(source)}")
    if mistakes:
        raise DataError("\n".join(mistakes))
    return tuple(forms)


def _keep(kept: list[T], drawn: random.Random, count: int, most: int, make: Callable[[], T]) -> None:
    """Keep a random selection by reservoir sampling: each of `count` samples is equally likely."""
    place = len(kept) if len(kept) < most else drawn.randrange(count)
    if place < most:
        kept[place : place + 1] = [make()]


def _counted(counter: Counter, make: Callable[[], Drawn]) -> Length:
    return counter.length(make())


def _drop(found: Survey, sample_id: str, reason: str, detail: str) -> None:
    found.dropped[reason] += 1
    found.examples.setdefault(reason, f"{sample_id}: {detail}" if detail else sample_id)


def _fault(found: Survey, sample: RawSample) -> tuple[str, str]:
    """The reason and detail for which inject_images would drop a sample, for its first broken image; else two empty
    strings.
    """
    first = ("", "")
    for image in sample.images:
        found.decoded += 1
        try:
            fault = fault_of(encoded_image(image), MOST_PIXELS, LEAST_SIDE)
        except Unusable as error:
            fault = error.reason, error.detail
        if fault[0]:
            found.broken += 1
            first = first if first[0] else fault
    found.examined += 1
    found.spoilt += bool(first[0])
    return first


def _contents_hint(source: Path) -> str:
    """A hint that lists the contents of a folder without readable data."""
    if not source.is_dir():
        return ""
    kinds = Tally(path.suffix.lower() or "no suffix" for path in source.rglob("*") if path.is_file())
    if not kinds:
        return "\nthe folder is empty"
    listed = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(SEEN))
    return f"\nfiles found: {listed}"


def _nothing(found: Survey) -> str:
    if not found.dropped:
        return f"{found.shown_sources}: holds no samples"
    reasons = "\n".join(
        f"  {count} ({reason}), such as {found.examples[reason]}"
        + (f"\n    {REMEDIES[reason]}" if reason in REMEDIES else "")
        for reason, count in found.dropped.most_common()
    )
    return f"{found.shown_sources}: none of its {found.dropped.total()} samples can be used:\n{reasons}"


@frozen
class PixelRules:
    """The rule by which an image becomes tokens of `factor` x `factor` pixels, after resizing to within both limits."""

    factor: int = 32  # Qwen3-VL's: patches of 16 pixels, merged 2 x 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216

    def tokens(self, size: Size) -> int:
        """The number of tokens of an image. Source: smart_resize of transformers' Qwen2-VL image processor."""
        width, height = size
        if max(size) > MOST_ASPECT * min(size):
            return 0  # rejected by the processor, so its sample is dropped
        factor = self.factor
        rows, columns = round(height / factor), round(width / factor)
        if rows * columns * factor**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / scale / factor)) for side in (height, width))
        elif rows * columns * factor**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * scale / factor) for side in (height, width))
        return rows * columns


@frozen
class OwnRules:
    """The rule of targets that are not Qwen's: as many tokens as their own processor makes of a large image.

    most: gives that number, or raises DataError.
    """

    most: Callable[[], int]

    def tokens(self, _size: Size) -> int:
        return self.most()


@frozen(kw_only=True)
class Drawn:
    """A sample without its images, of which there are the sizes that can be read, and the split for each of FRACTIONS.

    is_prompt: whether it is asked without an answer, as images by class are.
    """

    sample: RawSample
    num_images: int
    sizes: tuple[Size, ...]
    splits: Mapping[tuple[float, float], str]
    is_prompt: bool

    @classmethod
    def of(cls, sample: RawSample, splits: Mapping[tuple[float, float], str], by_class: bool) -> Drawn:
        turns = sample.turns
        if by_class:
            turns = tuple(turn for turn in turns if turn.role != "assistant")
        return cls(
            sample=evolve(sample, turns=turns, images=()),
            num_images=len(sample.images),
            sizes=tuple(size for image in sample.images if (size := image_size(image)) is not None),
            splits=splits,
            is_prompt=turns[-1].role != "assistant",
        )


@frozen(kw_only=True)
class Length:
    """The size of a conversation in tokens.

    prompts: the last prompt of each of its samples, samples: each whole; both without an answer that is not there yet.
    answers: those of every answer that is learnt, with its end token. calls: those of the answers that call tools.
    images: the sizes of all. splits: for each of FRACTIONS.
    """

    prompts: tuple[Part, ...]
    samples: tuple[Part, ...]
    answers: tuple[int, ...]
    calls: tuple[int, ...]
    images: tuple[Size, ...]
    splits: Mapping[tuple[float, float], str]
    is_prompt: bool = False
    is_request: bool = False
    learns_last: bool = False

    def of_parts(self, parts: Sequence[Part], rules: PixelRules | OwnRules) -> list[int]:
        """The number of tokens of each part, with its images."""
        images = [rules.tokens(size) for size in self.images]
        return [tokens + sum(images[:count]) for tokens, count in parts]

    def prompt(self, rules: PixelRules | OwnRules) -> int:
        """The number of tokens of the longest prompt, including images."""
        return max(self.of_parts(self.prompts, rules))

    def regenerated_prompt(self, rules: PixelRules | OwnRules, max_answer: int) -> int:
        """The tokens of the longest prompt if the target answers each earlier turn with max_answer tokens; where only
        the last answer is learnt, the earlier ones stay.
        """
        if self.learns_last:
            return self.prompt(rules)
        earlier = self.answers if self.is_prompt else self.answers[:-1]
        return self.prompt(rules) + sum(max(max_answer + 1 - tokens, 0) for tokens in earlier)

    def whole(self, rules: PixelRules | OwnRules) -> int:
        """The number of tokens of all samples, including images."""
        return sum(self.of_parts(self.samples, rules))

    @property
    def learnt(self) -> int:
        """The number of tokens in the loss mask."""
        return sum(self.answers[-1:] if self.learns_last else self.answers)


def of_request(found: Survey, length: Length) -> Length:
    """The length of a sample, with what a survey of all decides of requests."""
    return evolve(length, learns_last=length.learns_last or (length.is_request and found.learns_last))


@frozen
class Counter:
    """Counts the tokens of texts.

    of_text: gives the tokens of a text. exact: it uses the target's own tokenizer; seen: then the ids that it gave.
    """

    of_text: Callable[[str], int]
    exact: bool
    rules: PixelRules | OwnRules
    seen: set[int] = Factory(set)

    @classmethod
    def of(cls, target: Target | None) -> Counter:
        """A counter by the target's files; without a target by BYTES_PER_TOKEN and the image rules of Qwen3-VL."""
        rules: PixelRules | OwnRules = PixelRules()
        if target is not None and sees_by_name(target.config):
            rules = OwnRules(lambda: most_image_tokens(target.checkpoint, target.image_backend))
        elif target is not None:
            rules = PixelRules(target.pixel_factor, **target.pixel_limits)
        if target is None or target.tokenizer is None:
            return cls(estimated, exact=False, rules=rules)
        seen: set[int] = set()
        return cls(tokenizer_count(target.tokenizer, seen), exact=True, rules=rules, seen=seen)

    def length(self, drawn: Drawn) -> Length:
        """Count the tokens of a sample's prompt and answers, as one text."""
        turns = drawn.sample.turns
        of_turns = [TURN_TOKENS + sum(map(self.of_text, texts(turn))) for turn in turns]
        of_turns[0] += sum(self.of_text(json.dumps(tool)) for tool in drawn.sample.tools)
        learnt = [tokens - TURN_TOKENS + 1 for tokens in of_turns]  # with the end token
        last = 0 if drawn.is_prompt else of_turns[-1]
        images = len(drawn.sizes)
        return Length(
            prompts=((sum(of_turns) - last, images),),
            samples=((sum(of_turns), images),),
            answers=tuple(tokens for tokens, turn in zip(learnt, turns, strict=True) if turn.role == "assistant"),
            calls=tuple(tokens for tokens, turn in zip(learnt, turns, strict=True) if turn.tool_calls),
            images=drawn.sizes,
            splits=drawn.splits,
            is_prompt=drawn.is_prompt,
            is_request=drawn.sample.opening is not None,
            learns_last=drawn.sample.learns_last,
        )


def estimated(text: str) -> int:
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def tokenizer_count(file: Path, seen: set[int]) -> Callable[[str], int]:
    """A function that counts tokens by a tokenizer.json, and adds their ids to `seen`; it loads the library
    tokenizers.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def count(text: str) -> int:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        seen.update(ids)
        return len(ids)

    return count


def texts(turn: Turn) -> list[str]:
    parts = [part for part in turn.content if not isinstance(part, ImagePart)]
    calls = [json.dumps(call.row()["function"]) for call in turn.tool_calls]
    return [*parts, *filter(None, [turn.reasoning_content]), *calls]


def image_size(image: Path | bytes) -> Size | None:
    """The width and height in an image's header; None if `ingest` or `inject_images` would drop the image."""
    try:
        return size_of(encoded_image(image))
    except Unusable:
        return None
