"""Token counts of texts and images: by a target's tokenizer and image sizes, or estimated without one.

Neither torch nor transformers is loaded. Texts are counted exactly if the target's tokenizer.json is present; what the
chat template adds to a turn counts as TURN_TOKENS, and an image as its processor would resize it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import frozen

from ops.ingest.sample import ImagePart, RawSample, Turn
from ops.lib.data.sample_account import Unusable
from ops.lib.vision.images import size_of
from ops.tools.init.target import Target

TURN_TOKENS = 5  # <|im_start|>, the role, two line breaks and <|im_end|> of Qwen's templates
BYTES_PER_TOKEN = 4  # of UTF-8: English prose has about 4, Chinese about as many
MOST_ASPECT = 200  # of an image that processors take

Size = tuple[int, int]  # width, height


@frozen
class PixelRules:
    """How an image becomes tokens of `factor` x `factor` pixels, after resizing to between both limits."""

    factor: int = 32  # Qwen3-VL's: patches of 16 pixels, merged 2 x 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216

    def tokens(self, size: Size) -> int:
        """Image tokens. Source: smart_resize of transformers' Qwen2-VL image processor."""
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
class Length:
    """Tokens of a sample's texts: those before its last answer, the last answer (0 where the last turn is the user's),
    and every answer; and the sizes of its images.
    """

    before: int
    last: int
    answers: tuple[int, ...]
    images: tuple[Size, ...]

    def prompt(self, rules: PixelRules) -> int:
        """Tokens of the last prompt, images included."""
        return self.before + sum(map(rules.tokens, self.images))

    def regenerated_prompt(self, rules: PixelRules, max_answer: int) -> int:
        """Tokens that the last prompt has if the target answers each turn before it with max_answer tokens."""
        earlier = self.answers[:-1] if self.last else self.answers
        return self.prompt(rules) + sum(max(max_answer + TURN_TOKENS - tokens, 0) for tokens in earlier)

    def whole(self, rules: PixelRules) -> int:
        return self.prompt(rules) + self.last

    @property
    def learnt(self) -> int:
        """Tokens that the loss mask covers: every answer with the token that ends it."""
        return sum(tokens - TURN_TOKENS + 1 for tokens in self.answers)


@frozen
class Counter:
    """Counts tokens. of_text: tokens of a text; exact: by the target's own tokenizer."""

    of_text: Callable[[str], int]
    exact: bool
    rules: PixelRules

    @classmethod
    def of(cls, target: Target | None) -> Counter:
        """By the target's files; without them by BYTES_PER_TOKEN and the sizes of Qwen3-VL."""
        rules = PixelRules()
        if target is not None:
            rules = PixelRules(target.pixel_factor, **target.pixel_limits)
        if target is None or target.tokenizer is None:
            return cls(estimated, exact=False, rules=rules)
        return cls(tokenizer_count(target.tokenizer), exact=True, rules=rules)

    def length(self, sample: RawSample, sizes: Sequence[Size]) -> Length:
        """sizes: of the sample's readable images."""
        of_turns = [TURN_TOKENS + sum(map(self.of_text, texts(turn))) for turn in sample.turns]
        answers = [tokens for tokens, turn in zip(of_turns, sample.turns, strict=True) if turn.role == "assistant"]
        last = of_turns[-1] if sample.turns[-1].role == "assistant" else 0
        return Length(sum(of_turns) - last, last, tuple(answers), tuple(sizes))


def estimated(text: str) -> int:
    return math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)


def tokenizer_count(file: Path) -> Callable[[str], int]:
    """A function that counts by a tokenizer.json; loads the tokenizers library."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def texts(turn: Turn) -> list[str]:
    parts = [part for part in turn.content if not isinstance(part, ImagePart)]
    return [*parts, turn.reasoning_content] if turn.reasoning_content else parts


def image_size(encoded: bytes) -> Size | None:
    """Width and height from an image's header; None if unreadable."""
    try:
        return size_of(encoded)
    except Unusable:
        return None
