"""Choices for a pipeline for a user's data, each with its reason.

A reason that is experience and not a measurement says "a rule of thumb".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
from attrs import frozen

from dsl.errors import DataError
from dsl.shown import shown_bytes
from ops.capture_targets.plan import feature_bytes
from ops.ingest.image_folder import BESIDE
from ops.lib.data.sample_account import MOST_LOST, SPLITS, dropped_samples
from ops.lib.target.sizes import ITEM_SIZES, positions_field
from ops.lib.vision.family_config import text_part
from ops.lib.vision.template_kinds import WITH_TOOLS
from ops.shard_sequence.plan import steps_of_epoch
from ops.tokenize_chat.plan import TOKEN_BYTES
from ops.tools.diagnose.judgement import LEAST_PROMPTS
from ops.tools.init.survey import (
    BY_CLASS,
    FRACTIONS,
    REMEDIES,
    Length,
    OwnRules,
    PixelRules,
    Survey,
    percentile,
)
from ops.tools.init.target import PAPER_LAYERS, Target
from ops.train_dflash.verdicts import LEAST_BETWEEN, is_short

FLOAT32 = "float32"
HIDDEN = 4096  # of a target of 8 billion parameters, where none is given
UNKNOWN_ANSWER = 512  # tokens, if the data has only prompts
LONGEST_PROMPT, LONGEST_ANSWER, SHORTEST_LIMIT = 8192, 2048, 256  # of limits beyond what the data has
MARGIN = 0.25  # of max_prompt_tokens above the longest prompt
TOKENS_PER_IMAGE = 1024  # of one image: more are seldom worth their cost in every pass
WANTED_STEPS = 1000
STEP_TOKENS = (32_768, 16_384, 8_192, 4_096, 2_048)
LARGE_SET = 5_000_000  # tokens, from which on the paper's number of epochs is used
HELD_OUT = 64  # prompts that evaluate uses of a category
MOST_BETWEEN = 500  # steps between two measurements on val
FREE_SHARE = 0.8  # of the disk that features may fill


@frozen
class Choice:
    """A value for a pipeline's field, and the reason."""

    value: int
    why: str


@frozen(kw_only=True)
class Advice:
    """The advised choices for a pipeline. tokens: of the whole data, with the target's answers.

    fractions: of val and test. max_pixels: None if images need no limit, or there are none; rules: with that limit.
    steps: of the training, approximately. checkpoint_every: in steps. measure_every: in steps, None for only the end.
    features: bytes, if stored. warnings: what costs many samples.
    """

    tokens: int
    fractions: tuple[float, float]
    held_out: str
    max_prompt_tokens: Choice
    max_new_tokens: Choice
    max_length: int
    min_loss_tokens: Choice
    max_pixels: Choice | None
    rules: PixelRules | OwnRules
    block_size: Choice
    tokens_per_step: Choice
    epochs: Choice
    steps: int
    checkpoint_every: Choice
    measure_every: Choice | None
    online: bool
    capture_why: str
    features: int
    precision: Precision
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


OF_LOGS = Choice(2, "a log has each answer in a row of its own, and short ones are served too")
SLOW_ON_CPU = "bfloat16 takes 3 to 20 times as long on most CPUs"


@frozen
class Precision:
    """The dtype of the forward passes, and why; empty where it is the target's own."""

    dtype: str
    why: str = ""

    @classmethod
    def choose(cls, target: Target | None, wanted: str | None, *, has_gpu: bool) -> Precision:
        """Choose the dtype of the forward passes: `wanted` by the user, else float32 without a GPU, else the target's
        own.
        """
        own = "bfloat16" if target is None else target.dtype
        if wanted is not None:
            return cls(wanted, "as --dtype says")
        if has_gpu or own == FLOAT32:
            return cls(own)
        return cls(FLOAT32, f"no GPU here, and {SLOW_ON_CPU}; with a GPU {own}, in every node")


def advise(found: Survey, target: Target | None, free_disk: int, precision: Precision) -> Advice:
    """Choose the settings of a pipeline for a user's data and target.

    Raises DataError, with all reasons, if no draft can be trained for this target on this data.
    """
    _check(found, target)
    answers = [tokens for length in found.lengths for tokens in length.answers]
    max_pixels = _max_pixels(found)
    rules = found.rules
    if max_pixels is not None and isinstance(rules, PixelRules):
        rules = attrs.evolve(rules, max_pixels=max_pixels.value)
    every = [*found.lengths, *found.longest]
    max_new = _max_new_tokens(answers, [tokens for length in every for tokens in length.answers])
    max_prompt = _max_prompt_tokens(found, rules, every, max_new.value)
    context = None if target is None else target.context
    is_limited = context is not None and max_prompt.value + max_new.value >= context
    if context is not None and is_limited:
        longest = max(length.prompt(rules) for length in every)
        max_prompt, max_new = _within(context, max_new, longest, percentile(answers, 0.95))
    max_length = max_prompt.value + max_new.value
    block_size = _block_size(answers)
    learnt = [each.learnt for each in found.lengths if not each.is_prompt]
    calls = [tokens for each in found.lengths for tokens in each.calls]
    min_loss = _keeping_calls(_min_loss_tokens(learnt, block_size.value), calls)
    if found.requests:
        min_loss = OF_LOGS
    fractions = _fractions(found)
    tokens, _ = _amount(found.lengths, found.usable, rules, min_loss.value)
    trained = [each for each in found.lengths if each.splits[fractions] == "train"] or found.lengths
    training, samples = _amount(trained, found.usable_in(fractions, "train"), rules, min_loss.value)
    epochs = _epochs(training)
    per_step = _tokens_per_step(training, samples, epochs.value, max_length)
    steps = epochs.value * steps_of_epoch(training, samples, per_step.value)
    features, online, why = _capture(tokens, target, free_disk, precision.dtype)
    limits = []
    if target is not None and context is not None and is_limited:
        limits = [_context_note(context, positions_field(text_part(target.config)), max_length, found, rules)]
    elif (longest := max(length.prompt(rules) for length in every)) > LONGEST_PROMPT:
        limits = [_long_note(longest, found, rules)]
    return Advice(
        precision=precision,
        tokens=tokens,
        fractions=fractions,
        held_out=", ".join(f"{found.usable_in(fractions, name):,} {name}" for name in SPLITS),
        max_prompt_tokens=max_prompt,
        max_new_tokens=max_new,
        max_length=max_length,
        min_loss_tokens=min_loss,
        max_pixels=max_pixels,
        rules=rules,
        block_size=block_size,
        tokens_per_step=per_step,
        epochs=epochs,
        steps=steps,
        checkpoint_every=_checkpoint_every(steps),
        measure_every=_measure_every(steps),
        online=online,
        capture_why=why,
        features=features,
        warnings=tuple(_warnings(found, target, min_loss, learnt)),
        notes=(*limits, *_notes(found, fractions)),
    )


def _check(found: Survey, target: Target | None) -> None:
    wrong = []
    if found.with_images and target is not None and not target.sees:
        kind = target.config.get("model_type", "text")
        wrong.append(
            f"{found.with_images:,} of {found.samples:,} samples have images, and the target ({kind}) takes no images: "
            "use a vision-language target, or data without images"
        )
    if not found.usable:
        reasons = ", ".join(
            f"{count} ({reason}, such as {found.examples[reason]})" for reason, count in found.dropped.items()
        )
        wrong.append(f"every sample has an image, and none of the {found.decoded} examined can be decoded: {reasons}")
    if target is not None and int(target.sizes.text["num_hidden_layers"]) < 2:
        wrong.append("the target has 1 layer, and a draft reads a layer before the last: use a target of 2 or more")
    if not any(tally["train"] for tally in found.splits.values()):
        wrong.append("no sample is left for the split train")
    if wrong:
        raise DataError("\n".join(f"{found.shown_sources}: {each}" for each in wrong))


def _max_pixels(found: Survey) -> Choice | None:
    """A limit of pixels if images use more than TOKENS_PER_IMAGE each; None otherwise, and where none can be set."""
    if isinstance(found.rules, OwnRules):
        return None
    largest = max((found.rules.tokens(size) for length in found.lengths for size in length.images), default=0)
    if largest <= TOKENS_PER_IMAGE:
        return None
    why = f"at most {TOKENS_PER_IMAGE:,} tokens an image; the largest one examined would use {largest:,}"
    return Choice(TOKENS_PER_IMAGE * found.rules.factor**2, why)


def _amount(lengths: Sequence[Length], count: int, rules: PixelRules | OwnRules, least: int) -> tuple[int, int]:
    """The tokens and the samples of `count` conversations, by the lengths of some of them.

    least: answer tokens of a conversation that is not dropped.
    """
    kept = [each for each in lengths if each.is_prompt or each.learnt >= least]
    tokens = sum(each.whole(rules) + each.is_prompt * (UNKNOWN_ANSWER // 2) for each in kept)
    scale = count / len(lengths)
    return round(scale * tokens), round(scale * sum(len(each.samples) for each in kept))


def _max_new_tokens(answers: list[int], every: list[int]) -> Choice:
    """A limit for max_new_tokens: twice what is usual, and no less than any answer. every: with those of the longest
    samples.
    """
    if not answers:
        return Choice(UNKNOWN_ANSWER, "the data has no answers to estimate it; longer ones are dropped and counted")
    usual = percentile(answers, 0.95)
    value = max(min(_rounded_up(2 * usual, 128), LONGEST_ANSWER), _rounded_up(max(every), 128), SHORTEST_LIMIT)
    why = f"95 % of the data's answers have at most {usual:,} tokens, the longest {max(every):,}"
    return Choice(value, f"{why}; the target's own may be longer")


def _max_prompt_tokens(found: Survey, rules: PixelRules | OwnRules, every: Sequence[Length], max_new: int) -> Choice:
    """A limit for max_prompt_tokens: a quarter above the longest prompt. Later prompts of a chat hold the target's own
    answers, maybe longer than the data's: they have room up to LONGEST_PROMPT.
    """
    longest = max(length.prompt(rules) for length in every)
    regenerated = max(length.regenerated_prompt(rules, max_new) for length in every)
    is_exact = found.exact and not (found.with_images and isinstance(found.rules, OwnRules))
    about = "" if is_exact else "about "
    why = f"the longest of {len(every):,} prompts examined has {about}{longest:,} tokens; a quarter more"
    if regenerated > longest:
        why += f", and up to {regenerated:,} if its earlier answers have max_new_tokens"
    room = max(round(longest * (1 + MARGIN)), min(regenerated, LONGEST_PROMPT), SHORTEST_LIMIT)
    return Choice(_rounded_up(room, 256), why)


def _within(context: int, max_new: Choice, longest: int, usual: int) -> tuple[Choice, Choice]:
    """The choices of max_prompt_tokens and max_new_tokens, which together stay below the target's context.

    One position is left free, since decoding is a token ahead. longest: prompt of the data, which has room if `usual`
    answers have.
    """
    if max_new.value > context // 2:
        max_new = Choice(max(context // 2, 1), f"half of the target's {context:,} positions")
    left = max(context - 1 - max_new.value, 1)
    if left < longest < context - 1 - usual:
        left = longest
        max_new = Choice(context - 1 - left, f"what the longest prompt leaves of the target's {context:,} positions")
        return Choice(left, "the longest prompt of those examined"), max_new
    return Choice(left, f"what max_new_tokens leaves of the target's {context:,} positions"), max_new


def _context_note(context: int, field: str, max_length: int, found: Survey, rules: PixelRules | OwnRules) -> str:
    samples = [tokens for length in found.lengths for tokens in length.of_parts(length.samples, rules)]
    longer = sum(tokens > max_length for tokens in samples)
    return (
        f"the target's context, {context:,} positions ({field} of its config.json), limits "
        f"max_prompt_tokens and max_new_tokens; {longer:,} of {len(samples):,} samples examined are longer, and dropped"
    )


def _long_note(longest: int, found: Survey, rules: PixelRules | OwnRules) -> str:
    shorter = sum(length.prompt(rules) <= LONGEST_PROMPT for length in found.lengths)
    return (
        f"the longest prompt has {longest:,} tokens, and the limits admit it, so that a step holds such a sample; "
        f"{shorter:,} of {len(found.lengths):,} prompts examined have at most {LONGEST_PROMPT:,}: with lower limits "
        "(max_prompt_tokens, max_length, tokens_per_step) longer ones are dropped, and a step needs less memory"
    )


def _block_size(answers: list[int]) -> Choice:
    usual = percentile(answers, 0.5)
    if answers and usual < 32:
        return Choice(8, f"half of the data's answers have at most {usual} tokens: 16 would seldom be filled")
    return Choice(16, "the paper's")


def _min_loss_tokens(learnt: list[int], block_size: int) -> Choice:
    """The choice of min_loss_tokens, by the data's answers.

    learnt: for each sample that ends with an answer, the tokens of its answers.
    """
    least = 2 * block_size
    short = sum(tokens < least for tokens in learnt)
    if 2 * short <= len(learnt):
        shorter = f"; {short:,} of {len(learnt):,} examined are" if short else ""
        return Choice(least, f"twice the block size; shorter answers are dropped, and counted{shorter}")
    value = max(1, percentile(learnt, 0.05))
    return Choice(value, f"95 % of the data's answers have at least this many; few have {least}, twice the block size")


def _keeping_calls(choice: Choice, calls: list[int]) -> Choice:
    """The choice of min_loss_tokens, low enough for conversations that end behind a call. calls: tokens of each."""
    shortest = min(calls, default=choice.value)
    if shortest >= choice.value:
        return choice
    return Choice(
        shortest, f"the shortest call of a tool; {choice.value} would drop conversations that end behind such a call"
    )


def _epochs(training: int) -> Choice:
    if training >= LARGE_SET:
        return Choice(6, "the paper's")
    return Choice(12, f"a rule of thumb: below {LARGE_SET:,} training tokens more passes than the paper's 6")


def _tokens_per_step(training: int, samples: int, epochs: int, max_length: int) -> Choice:
    """The largest number of tokens in a step that gives enough steps and fits the longest sample."""
    least = _rounded_up(max_length, 8)
    fitting = [*(size for size in STEP_TOKENS if size > least), least]
    steps = {size: epochs * steps_of_epoch(training, samples, size) for size in fitting}
    chosen = next((size for size in fitting if steps[size] >= WANTED_STEPS), fitting[-1])
    rule = f"a rule of thumb: {WANTED_STEPS:,} or more, and no less than max_length"
    return Choice(chosen, f"{steps[chosen]:,} steps in total, about; {rule}")


def _checkpoint_every(steps: int) -> Choice:
    value = min(max(steps // 10, 1), MOST_BETWEEN)
    share = "about a tenth of the training" if value < MOST_BETWEEN else f"{MOST_BETWEEN} steps"
    return Choice(value, f"steps; an attempt that is killed loses at most {share}")


def _measure_every(steps: int) -> Choice | None:
    """The number of steps between two measurements; None if these would be closer than LEAST_BETWEEN steps."""
    if is_short(steps):
        return None
    value = min(max(steps // 10, LEAST_BETWEEN), MOST_BETWEEN)
    kind = (
        "a tenth of the steps"
        if value == steps // 10
        else f"a tenth of the steps, but {LEAST_BETWEEN} to {MOST_BETWEEN}"
    )
    return Choice(value, f"{kind}: a rule of thumb; each measurement decodes prompts of val")


def _capture(tokens: int, target: Target | None, free: int, dtype: str) -> tuple[int, bool, str]:
    """The bytes of stored features, whether to capture online instead, and why."""
    if target is None:
        per_token = PAPER_LAYERS * HIDDEN * ITEM_SIZES[dtype] + TOKEN_BYTES
        of = f"{PAPER_LAYERS} layers of {HIDDEN} in {dtype}, for example a target of 8 billion parameters"
    else:
        per_token = feature_bytes(target.sizes, target.num_layers, dtype)
        hidden = int(target.sizes.text["hidden_size"])
        of = f"{target.num_layers} layer{'s' * (target.num_layers > 1)} of {hidden}, {ITEM_SIZES[dtype]} bytes each"
    size = tokens * per_token
    online = size > FREE_SHARE * free
    amount = f"{tokens:,} tokens x {per_token:,} bytes ({of}) = {shown_bytes(size)}, and {shown_bytes(free)} are free"
    return size, online, amount


def _fractions(found: Survey) -> tuple[float, float]:
    """The smallest fractions for val and test that hold out enough samples.

    If the data is too small for all, those that leave the fewest splits empty, and the most to train on. With few
    samples, the hash may give val more than test or train.
    """
    wanted = min(HELD_OUT, max(1, found.usable // 10))

    def counts(fractions: tuple[float, float]) -> tuple[int, ...]:
        return tuple(found.usable_in(fractions, name) for name in SPLITS)

    enough = []
    for fractions in FRACTIONS:
        train, val, test = counts(fractions)
        if test >= wanted and val >= max(1, wanted // 2) and train:
            enough.append(fractions)
    if enough:
        balanced = (each for each in enough if counts(each)[0] >= counts(each)[2] >= counts(each)[1])
        return next(balanced, enough[0])
    return max(FRACTIONS, key=lambda each: (sum(count > 0 for count in counts(each)), counts(each)[0]))


def _warnings(found: Survey, target: Target | None, min_loss: Choice, learnt: list[int]) -> Iterator[str]:
    """What costs many samples, or all of a kind. learnt: tokens of each sample that was examined and has an answer."""
    for loss in dropped_samples(found.dropped, found.read, REMEDIES, "each reason is above, with an example"):
        yield f"{loss.text}; {loss.remedy_on_a_line}"
    if found.asked_again:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in found.lacking.most_common())
        yield (
            f"{found.asked_again:,} of {found.requests:,} requests have no usable answer ({reasons}): they are kept as "
            'prompts (require_answers = false is written), which the target answers; with answers = "data" they are '
            "dropped, as they are without that field"
        )
    short = sum(tokens < min_loss.value for tokens in learnt)
    if short > MOST_LOST * len(learnt):
        yield (
            f"{short:,} of {len(learnt):,} samples examined have fewer than min_loss_tokens = {min_loss.value} answer "
            f"tokens, and are dropped if the target's answers are as short; lower it in tokenize if such are served"
        )
    if found.with_tools and target is not None and not target.shows_tools:
        yield (
            f"the target's chat template shows no tools, so {found.with_tools:,} samples with tools are dropped: "
            f"{WITH_TOOLS}"
        )


def _notes(found: Survey, fractions: tuple[float, float]) -> list[str]:
    notes = []
    loose = found.dropped[BESIDE]
    if loose > found.samples:
        notes.append(
            f"most of the images are NOT used: {loose:,} are beside folders, {found.samples:,} in them. Most likely "
            "the former are intended: move the folders elsewhere, or all images into one folder; for images by class, "
            "move each image into the folder of its class"
        )
    for split, reads in (("test", "evaluate"), ("val", "what is measured during training")):
        if not found.usable_in(fractions, split):
            notes.append(f"no sample falls into {split}, which {reads} reads: {_how_to_give(split, found)}")
    tested = found.usable_in(fractions, "test")
    if 0 < tested < LEAST_PROMPTS:
        notes.append(
            f"{tested} sample{'s fall' if tested > 1 else ' falls'} into test: `dflow diagnose` judges a draft by "
            f"{LEAST_PROMPTS} or more, and of fewer says little; {_how_to_give('test', found)}"
        )
    if found.usable < 1000:
        shown = f"{found.usable:,} samples show" if found.usable > 1 else "1 sample shows"
        notes.append(f"{shown} whether the chain runs; a draft worth serving takes many thousands (the paper: 800,000)")
    return notes


def _how_to_give(split: str, found: Survey) -> str:
    """Advice on how to put samples into a split: by a key in the rows, or by folders for a folder of classes."""
    if any(form != BY_CLASS for form in found.forms):
        return f'give one the key split = "{split}"'
    return (
        f"move some images to {split}/<class>/ and all others to train/<class>/ (without classes: {split}/ and train/)"
    )


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step
