"""A row of the injected samples into a token sample: text, images, and both combined.

A conversation becomes token ids and a loss mask by one tokenisation of its whole text. Tokenising a prefix again could
split words differently, so answers are found by the characters that each token covers. Every image is one placeholder
in the text, which the tokens of the image then replace. What a processor of another family than Qwen's puts there is
text too, so the whole text is tokenised again with it, as that processor does.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from attrs import evolve, frozen
from tokenizers import Encoding
from torch import Tensor

from ops.ingest.sample import ASKING, CONVERSATION, LAST
from ops.lib.data.files import shown_json
from ops.lib.data.image_packs import read_packed
from ops.lib.data.limited_process import SECONDS
from ops.lib.data.sample_account import Unusable
from ops.lib.data.token_shards import TokenSample
from ops.lib.data.tool_forms import GIVEN, ToolsAs
from ops.lib.vision.any_images import AnyImages, Seen
from ops.lib.vision.chunks import ImageChunk, concatenate, place_images
from ops.lib.vision.images import TOO_LARGE, decode, size_of
from ops.lib.vision.processor import Processor
from ops.lib.vision.template_kinds import THOUGHT_TAGS
from ops.tokenize_chat.answer_spans import Rendered, render_answers
from ops.tokenize_chat.channels import THINKING
from ops.tokenize_chat.contexts import (
    Context,
    Generated,
    Served,
    check_calls,
    check_documents,
    check_shown,
    serve,
    serve_prompt,
    whole_prompt,
)
from ops.tokenize_chat.habits import IN_TEXT, Habits, Results, around_turns, probe, probe_results
from ops.tokenize_chat.kinds import TokenKinds
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.pieces import Figures, Outcome, Tokenized
from ops.tokenize_chat.template import (
    ANSWER_CHANGED,
    ANSWER_NOT_FOUND,
    IMAGES_NOT_SHOWN,
    NO_ANSWER,
    NO_TOKEN_BOUNDARY,
    NOT_CLOSED,
    OTHER_IDS,
    OTHER_ORDER,
    OTHER_PLACEHOLDERS,
    Documents,
    Messages,
    Renderings,
    Template,
    Tools,
    answer_words,
    value_or_unusable,
)

MOST_CHARACTERS = 4_000_000  # of a text; the library's regular expressions fail on about three times as many blanks
TOO_MANY_CHARACTERS = f"more than {MOST_CHARACTERS:,} characters"

TrainOn = Literal["assistant", "last"]


@frozen(eq=False)
class Encoded:
    """A tokenised conversation.

    rendered: its text. input_ids int64 [S]: with one placeholder per image, until they are replaced. loss_mask bool
    [S]: true for every learnt answer and the EOS that closes it, unless the answer was cut. loss_tokens: their number.
    prompt_tokens: tokens up to the end of the last answer's generation prompt. answers: as in TokenSample. kinds uint8
    [loss_tokens]: of the learnt tokens of a context, None of others.
    """

    rendered: Rendered
    input_ids: Tensor
    loss_mask: Tensor
    loss_tokens: int
    prompt_tokens: int
    answers: tuple[tuple[int, int], ...] = ()
    kinds: Tensor | None = None


Images = Sequence[ImageChunk] | Seen  # of a sample: of Qwen's processor, or of another


class ChatEncoder:
    """The chat template and tokenizer of a processor; threads may share one.

    train_on: "assistant" puts every answer into the loss mask, "last" only the last one. enable_thinking,
    render_seconds, tools_as: for the `Template`. Raises ConfigError for an enable_thinking that the template does not
    read.
    """

    def __init__(
        self,
        processor: Processor,
        enable_thinking: bool | None = None,
        train_on: TrainOn = "assistant",
        render_seconds: float = SECONDS,
        tools_as: ToolsAs = GIVEN,
    ) -> None:
        self.processor = processor
        self.template = Template(processor, enable_thinking, render_seconds, tools_as)
        self.last_only = train_on == "last"
        # The Rust tokenizer itself: the Python wrapper costs more than tokenising a short text.
        self._tokenizer = processor.tokenizer.backend_tokenizer
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def of_last(self) -> ChatEncoder:
        """The same, with only the last answer in the loss mask."""
        only = copy(self)
        only.last_only = True
        return only

    @cached_property
    def habits(self) -> Habits:
        """What the template does with reasoning and calls."""
        tags = [pair for pair in THOUGHT_TAGS if all(tag in self.template.special_tokens for tag in pair)]
        return self.template.finish(probe(self.template.thinks, tags))

    @property
    def reasoning_key(self) -> str | None:
        """The key of an answer from which the template itself takes reasoning; None if it takes none, or in a text."""
        if self.template.has_channels:
            return THINKING
        return None if self.habits.reasoning == IN_TEXT else self.habits.reasoning

    @cached_property
    def results(self) -> Results:
        """What the template does with results of tools."""
        return self.template.finish(probe_results(self.processor.image_token))

    @cached_property
    def kinds(self) -> TokenKinds:
        """Gives the tokens of an answer their kinds."""

        def decode(ids: Sequence[int]) -> str:
            return self._tokenizer.decode(ids, skip_special_tokens=False)

        return TokenKinds(self.habits.markup, decode, self.processor.eos_token_ids)

    @cached_property
    def eos_texts(self) -> tuple[str, ...]:
        """The texts of the EOS tokens."""
        return tuple(self.processor.tokenizer.convert_ids_to_tokens(list(self.processor.eos_token_ids)))

    @cached_property
    def headers(self) -> frozenset[str]:
        """The special tokens that the template writes around the turns of a conversation without an answer."""
        texts = self.template.finish(around_turns())
        return frozenset(token for token in self.template.special_tokens for text in texts if token in text)

    @cached_property
    def vocabulary(self) -> str:
        """The digest of all tokens with their ids: where it is the same, the same ids are the same tokens."""
        tokens = sorted(self.processor.tokenizer.get_vocab().items())
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def generated(self, messages: Messages) -> dict[int, Generated]:
        """The answers whose target generated them in ids of this tokenizer, by turn. Raises Unusable for other ids."""
        found = {}
        for turn, message in enumerate(messages):
            if "generated_ids" in message and message.get("tokenizer") == self.vocabulary:
                ids = message["generated_ids"]
                self.check_ids(ids)
                found[turn] = Generated(tuple(ids), self.text_of(ids))
        return found

    def check_ids(self, ids: Any) -> None:
        """Check that there are ids, and that the model has them. Raises Unusable."""
        known = range(self.processor.vocab_size)
        if not (isinstance(ids, list) and ids and all(type(each) is int and each in known for each in ids)):
            raise Unusable(OTHER_IDS, f"{shown_json(ids)}, of {len(known)} tokens")

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of generated ids, special tokens included."""
        return str(
            self.processor.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def encode(
        self, messages: Messages, cut: Sequence[bool] = (), tools: Tools = (), documents: Documents = ()
    ) -> Encoded:
        """Tokenise chat messages whose last one is an answer.

        cut: for each answer, whether it was cut off; then its EOS comes from the template only, and is not learnt.
        Raises Unusable; with a reason in MISFITS, sample or chat template is at fault. Raises DataError if the template
        takes too long.
        """
        rendered = self.template.finish(self._rendered(messages, tools, documents), documents=documents)
        return self._encoded(messages, cut, rendered, *self._tokenized([_tokenizable(rendered)]))

    def encode_batch(
        self,
        conversations: Sequence[Messages],
        cuts: Sequence[Sequence[bool]],
        ids: Sequence[str] | None = None,
        tools: Sequence[Tools] | None = None,
        documents: Sequence[Documents] | None = None,
    ) -> list[Encoded | Unusable]:
        """Tokenise several conversations; each result is as from `encode`, or the reason why it is unusable.

        An answer whose ids are known is learnt in them if it is the only one. ids: the samples' ids, for the DataError.
        tools, documents: of each conversation. All are rendered by one call in another
        process, and tokenised by one call without Python's lock, so threads run in parallel. The tokenizer's own
        threads stay off (TOKENIZERS_PARALLELISM is false in a stage): they would not survive a fork.
        """
        none: list[Tools] = [()] * len(conversations)
        tools, documents = tools or none, documents or none
        names: Sequence[str | None] = ids or [None] * len(tools)
        wanted = list(map(self._rendered, conversations, tools, documents))
        found = self.template.finish_all(wanted, names, documents)
        rendered = [one if isinstance(one, Unusable) else value_or_unusable(_tokenizable, one) for one in found]
        encodings = iter(self._tokenized([one for one in rendered if isinstance(one, Rendered)]))
        encoded = [
            one if isinstance(one, Unusable) else value_or_unusable(self._encoded, messages, cut, one, next(encodings))
            for messages, cut, one in zip(conversations, cuts, rendered, strict=True)
        ]
        return [
            value_or_unusable(self._as_generated, *each)
            for each in zip(encoded, conversations, tools, documents, names, strict=True)
        ]

    def _as_generated(
        self,
        encoded: Encoded | Unusable,
        messages: Messages,
        tools: Tools,
        documents: Documents,
        sample_id: str | None,
    ) -> Encoded:
        """A tokenised conversation, with its only answer in the ids that the target generated. Raises Unusable."""
        generated = self.generated(messages)
        last = len(messages) - 1
        is_alone = last in generated and len(self.learnt_turns(messages)) == 1
        if is_alone and (isinstance(encoded, Unusable) or learnt_ids(encoded) != [generated[last].ids]):
            prompt = self.encoded_prompt(messages[:-1], sample_id, tools, documents).rendered.text
            text = prompt + generated[last].text
            answer = ((len(prompt), len(text)),)
            context = Context(text, len(prompt), answer, turns=(last,), generated=(generated[last].ids,))
            return self.encode_context(messages, context)
        if isinstance(encoded, Unusable):
            raise encoded
        return encoded

    def learnt_turns(self, messages: Messages) -> list[int]:
        """The turns of the answers that are learnt."""
        turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
        return turns[-1:] if self.last_only else turns

    def serve_batch(
        self,
        conversations: Sequence[Messages],
        cuts: Sequence[Sequence[bool]],
        ids: Sequence[str],
        tools: Sequence[Tools],
        keeps_reasoning: bool = True,
        documents: Sequence[Documents] | None = None,
    ) -> list[Served | Unusable]:
        """The contexts in which a server asks for the answers of each conversation, or why it is unusable."""
        documents = documents or [()] * len(conversations)
        each = zip(conversations, cuts, tools, documents, strict=True)
        wanted = [self._served(*given, keeps_reasoning) for given in each]
        found = self.template.finish_all(wanted, list(ids), documents)
        return [
            one if isinstance(one, Unusable) else value_or_unusable(self._in_parts, one, messages, own)
            for one, messages, own in zip(found, conversations, documents, strict=True)
        ]

    def _in_parts(self, served: Served, messages: Messages, documents: Documents) -> Served:
        """Contexts that show the documents, cut as `_parts` does. Raises Unusable."""
        for context in served.contexts:
            check_documents(documents, context.text[: context.answers[0][0]], messages[: context.turns[0]])
        return evolve(served, contexts=tuple(chain(*map(self._parts, served.contexts))))

    def _parts(self, context: Context) -> Iterator[Context]:
        """A context, cut behind each answer whose ids the text of a later answer's prompt does not give again."""
        known = len(context.answers) - 1 - context.generated[:-1].count(None)
        if known and len(context.text) <= MOST_CHARACTERS:
            [tokens] = self._tokenized([context])
            number = 0
            for (start, _), ids in zip(context.answers[:-1], context.generated, strict=False):
                number += 1
                first = value_or_unusable(_token_at, tokens, start, context.text)
                if ids is None or (type(first) is int and tuple(tokens.ids[first : first + len(ids)]) == ids):
                    continue
                yield context.up_to(number)
                context, number = context.behind(number), 0
        yield context

    def _served(
        self, messages: Messages, cut: Sequence[bool], tools: Tools, documents: Documents, keeps_reasoning: bool
    ) -> Renderings[Served]:
        generated = self.generated(messages)
        self._check(messages, tools, documents, len(messages) - 1 in generated)
        return (
            yield from serve(
                self.habits, self.eos_texts, messages, tools, cut, self.last_only, keeps_reasoning, generated
            )
        )

    def _check(self, messages: Messages, tools: Tools, documents: Documents, has_ids: bool = False) -> None:
        """Check that an answer ends the messages, and all texts but one whose ids are known. Raises Unusable."""
        if not messages or messages[-1]["role"] != "assistant":
            raise Unusable(NO_ANSWER)
        self.template.check(messages[:-1] if has_ids else messages, tools, documents)
        self._check_results(messages)

    def _check_results(self, messages: Messages) -> None:
        """Check that the template shows the images of results, in the order of the messages. Raises Unusable."""
        seen = [turn for turn, message in enumerate(messages) if message["role"] == "tool" and num_images(message)]
        if not seen:
            return
        if not self.results.shows_images:
            raise Unusable(IMAGES_NOT_SHOWN, f"turn {seen[0] + 1}")
        if self.results.by_call:
            called = [call["id"] for message in messages for call in message.get("tool_calls", ())]
            answered = [messages[turn]["tool_call_id"] for turn in seen]
            if answered != (shown := sorted(answered, key=called.index)):
                raise Unusable(OTHER_ORDER, f"the template shows those of {', '.join(shown)}")

    def _rendered(self, messages: Messages, tools: Tools, documents: Documents) -> Renderings[Rendered]:
        self._check(messages, tools, documents)
        rendered = yield from render_answers(self.template.has_marks, messages, self.last_only, tools)
        yield from check_shown(messages[:-1], tools)
        check_documents(documents, rendered.text[: rendered.prompt_end], messages[:-1])
        return rendered

    def encode_context(self, messages: Messages, context: Context) -> Encoded:
        """Tokenise a context of a conversation. Raises Unusable."""
        _check_characters(context.text)
        return self._encoded(messages, (), context, *self._tokenized([context]))

    def _tokenized(self, rendered: Sequence[Rendered]) -> list[Encoding]:
        return self._tokenizer.encode_batch([one.tokenized for one in rendered], add_special_tokens=False)

    def _encoded(
        self,
        messages: Messages,
        cut: Sequence[bool],
        rendered: Rendered,
        tokens: Encoding,
        images: Seen | None = None,
    ) -> Encoded:
        """images: those that stand in the text already, in the place of their placeholders."""
        ids = np.array(tokens.ids, dtype=np.int64)
        if isinstance(rendered, Context):
            return self._encoded_context(ids, messages[: rendered.turns[-1] + 1], rendered, tokens, images)
        self._check_placeholders(ids, messages, images)
        closing = np.flatnonzero(self._closes(ids))
        mask = np.zeros(len(ids), dtype=bool)
        last, shown = -1, []
        for (start, end), is_cut in zip(rendered.answers, self._cut(cut, len(rendered.answers)), strict=True):
            first = _token_at(tokens, start, rendered.text)
            if first <= last:
                raise Unusable(NOT_CLOSED, f"no EOS before the next answer, {rendered.text[start : start + 30]!r}")
            closed_by = _last_token(tokens, closing, first, end)
            if closed_by is None:
                raise Unusable(NOT_CLOSED, f"EOS tokens: {list(self.processor.eos_token_ids)}")
            last = closed_by
            mask[first : last if is_cut else last + 1] = True
            shown.append(rendered.text[start : tokens.token_to_chars(last)[0]])
        # The last answer begins there, unless a mark omits its beginning.
        prompt_tokens = first if start == rendered.prompt_end else _token_at(tokens, rendered.prompt_end, rendered.text)
        answer = rendered.text[rendered.prompt_end : tokens.token_to_chars(last)[0]]
        self._check_calls(messages, shown)
        if not all(words in answer for words in answer_words(messages[-1])):
            raise Unusable(ANSWER_CHANGED, f"it became {answer[:60]!r}")
        loss_tokens = int(np.count_nonzero(mask))
        return Encoded(rendered, torch.from_numpy(ids), torch.from_numpy(mask), loss_tokens, prompt_tokens)

    def _check_calls(self, messages: Messages, shown: Sequence[str]) -> None:
        """Check that the texts of answers show their calls. Raises Unusable.

        Where the template marks other stretches than answers, which is which is unknown, so only the last one is.
        """
        answers = [message for message in messages if message["role"] == "assistant"]
        is_known = len(shown) == (1 if self.last_only else len(answers))
        known = len(shown) if is_known else 1
        for message, text in zip(answers[-known:], shown[-known:], strict=True):
            check_calls(message, text)

    def _encoded_context(
        self, ids: np.ndarray, messages: Messages, context: Context, tokens: Encoding, images: Seen | None
    ) -> Encoded:
        """The tokens of a context, of which exactly those of its answers are learnt."""
        asked = len(ids)
        ids = np.append(ids, np.array(context.generated[-1] or (), dtype=np.int64))
        self._check_placeholders(ids, messages, images)
        kinds = np.zeros(len(ids), dtype=np.uint8)
        answers = []
        spans = zip(context.answers, context.generated, strict=True)
        for turn, ((start, end), own) in enumerate(spans, context.number - 1):
            first = asked if start == len(context.tokenized) else _token_at(tokens, start, context.text)
            behind = len(ids)
            if own is not None:
                behind = first + len(own)
            elif end is not None and end < len(context.text):
                behind = _token_at(tokens, end, context.text)
            kinds[first:behind] = self.kinds.of(ids[first:behind].tolist(), ids[:first].tolist())
            answers.append((first, turn))
        mask, learnt = kinds > 0, torch.from_numpy(kinds[kinds > 0])
        pair = torch.from_numpy(ids), torch.from_numpy(mask)
        return Encoded(context, *pair, len(learnt), first, tuple(answers), learnt)

    def prompt(
        self, messages: Messages, sample_id: str | None = None, tools: Tools = (), documents: Documents = ()
    ) -> Tensor:
        """The target's input for answering `messages`, int64 [S], with one placeholder per image. Raises as
        `encode`.
        """
        return self.encoded_prompt(messages, sample_id, tools, documents).input_ids

    def encoded_prompt(
        self, messages: Messages, sample_id: str | None = None, tools: Tools = (), documents: Documents = ()
    ) -> Encoded:
        """The same, with its text and without an answer. Raises as `encode`."""
        self.template.check(messages, tools, documents)
        self._check_results(messages)
        text = self.template.finish(whole_prompt(messages, tools), sample_id, documents)
        check_documents(documents, text, messages)
        _check_characters(text)
        return self._prompt(messages, Rendered(text, len(text), ()))

    def served_prompt(
        self,
        messages: Messages,
        tools: Tools,
        keeps_reasoning: bool,
        sample_id: str | None = None,
        documents: Documents = (),
    ) -> Encoded:
        """The same, with reasoning as `serve_batch` has it. Raises as `encode`."""
        self.template.check(messages, tools, documents)
        self._check_results(messages)
        wanted = serve_prompt(self.habits, messages, tools, keeps_reasoning)
        rendered = self.template.finish(wanted, sample_id, documents)
        check_documents(documents, rendered.text, messages)
        _check_characters(rendered.text)
        prompt = self._prompt(messages, rendered)
        before = sum(message["role"] == "assistant" for message in messages)
        return evolve(prompt, answers=((prompt.prompt_tokens, before),))

    def _prompt(self, messages: Messages, rendered: Rendered, images: Seen | None = None) -> Encoded:
        ids = np.array(self._tokenizer.encode(rendered.text, add_special_tokens=False).ids, dtype=np.int64)
        self._check_placeholders(ids, messages, images)
        return Encoded(rendered, torch.from_numpy(ids), torch.zeros(len(ids), dtype=torch.bool), 0, len(ids))

    def with_seen(self, messages: Messages, cut: Sequence[bool], encoded: Encoded, images: Seen) -> Encoded:
        """A conversation tokenised again with what stands for its images in its text. Raises Unusable as `encode`."""
        rendered = _expanded(encoded.rendered, self.processor.image_token, images.texts)
        _check_characters(rendered.text)
        if not rendered.answers:
            prompt = self._prompt(messages, rendered, images)
            return evolve(prompt, answers=tuple((prompt.prompt_tokens, turn) for _, turn in encoded.answers))
        [tokens] = self._tokenized([rendered])
        return self._encoded(messages, cut, rendered, tokens, images)

    def _cut(self, cut: Sequence[bool], learnt: int) -> Sequence[bool]:
        """For each of the `learnt` stretches of the text, whether it is an answer that was cut off."""
        cut = cut[-1:] if self.last_only else cut
        if not any(cut):
            return [False] * learnt
        if len(cut) != learnt:
            raise Unusable(
                ANSWER_NOT_FOUND, f"{len(cut)} answers in {learnt} stretches of text: the cut one is unknown"
            )
        return cut

    def _closes(self, ids: np.ndarray) -> np.ndarray:
        """A mask of the tokens that are an EOS, bool [S]."""
        first, *others = self.processor.eos_token_ids
        found = ids == first
        for token in others:
            found |= ids == token
        return found

    def _check_placeholders(self, ids: np.ndarray, messages: Messages, seen: Seen | None = None) -> None:
        """Check that the ids have a placeholder for each image, or the tokens of images that stand there already."""
        images = sum(map(num_images, messages))
        token = self.processor.placeholder_id if seen is None else self.processor.image_token_id
        expected = images if seen is None else sum(seen.image_tokens)
        found = 0 if token is None else int(np.count_nonzero(ids == token))
        if found != expected or (seen is not None and len(seen.texts) != images):
            what = "placeholders" if seen is None else f"image tokens of {expected}"
            raise Unusable(OTHER_PLACEHOLDERS, f"{found} {what} ({self.processor.image_token}) for {images} images")


def learnt_ids(encoded: Encoded) -> list[tuple[int, ...]]:
    """The ids of each run of tokens that is learnt."""
    learnt = encoded.loss_mask.numpy().astype(np.int8)
    edges = np.flatnonzero(np.diff(learnt, prepend=0, append=0)).tolist()
    return [tuple(encoded.input_ids[start:end].tolist()) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def num_images(message: dict[str, Any]) -> int:
    return sum(part["type"] == "image" for part in message["content"])


def _expanded(rendered: Rendered, placeholder: str, texts: Sequence[str]) -> Rendered:
    """A conversation with a text in the place of each placeholder, in order."""
    parts = rendered.text.split(placeholder)
    if len(parts) != len(texts) + 1:
        raise Unusable(OTHER_PLACEHOLDERS, f"{len(parts) - 1} placeholders ({placeholder}) for {len(texts)} images")
    starts, end = [], -len(placeholder)
    for part in parts[:-1]:
        starts.append(end + len(placeholder) + len(part))
        end = starts[-1]

    def moved(place: int) -> int:
        before = bisect_left(starts, place)
        return place + sum(map(len, texts[:before])) - before * len(placeholder)

    text = "".join(chain(*zip(parts, texts, strict=False), parts[-1:]))
    answers = tuple((moved(start), None if end is None else moved(end)) for start, end in rendered.answers)
    return evolve(rendered, text=text, prompt_end=moved(rendered.prompt_end), answers=answers)


def _tokenizable(rendered: Rendered) -> Rendered:
    """The conversation, checked to be a text that can be tokenised. Raises Unusable."""
    _check_characters(rendered.text)
    return rendered


def _check_characters(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise Unusable(TOO_MANY_CHARACTERS, f"{len(text):,}")


def _token_at(tokens: Encoding, start: int, text: str) -> int:
    """The first token that begins at or after the character `start`.

    Raises Unusable if the first token that covers a character from `start` on begins before it.
    """
    covering = (tokens.char_to_token(place) for place in range(start, len(text)))
    token = next((token for token in covering if token is not None), None)
    if token is None or tokens.token_to_chars(token)[0] < start:
        raise Unusable(NO_TOKEN_BOUNDARY, f"{text[max(0, start - 20) : start]!r} | {text[start : start + 20]!r}")
    return token


def _last_token(tokens: Encoding, closing: np.ndarray, first: int, end: int | None) -> int | None:
    """The index of the EOS token that closes an answer which starts at token `first`; None without one.

    closing: the places of all EOS tokens, int [E]. end: the answer's end, in characters, if the template marks it.
    Without a mark the first EOS counts. With one it is the last EOS inside the mark or directly after it: some
    templates mark text after EOS too, others end the mark before it.
    """
    if end is None:
        place = int(np.searchsorted(closing, first))
        return int(closing[place]) if place < len(closing) else None
    after = tokens.char_to_token(end)
    bound = tokens.char_to_token(end - 1) if after is None else after
    place = int(np.searchsorted(closing, bound, side="right")) - 1 if bound is not None else -1
    return int(closing[place]) if place >= 0 and closing[place] >= first else None


IMAGE_REFUSED = "image refused by the processor"
Name = TypeVar("Name", bound=Hashable)
TOO_LONG = "longer than max_length"
MOST_PIXELS = 1 << 29  # of the images of a sample: eight of the largest that inject_images takes by default
MOST_IMAGE_TOKENS = 1 << 15  # of a sample, where no max_length is set: about a gigabyte of pixel values
TOO_FEW_LOSS_TOKENS = "fewer than min_loss_tokens"


def tokenize_rows(
    rows: Sequence[dict[str, Any]], folder: Path, encoder: ChatEncoder, config: TokenizeChat
) -> list[Outcome]:
    """The tokenised samples of each row, or the reason to drop it.

    Turns after the last answer are left out with their images: nothing there is learnt, and a thinking template would
    treat the last answer as history.
    """
    if config.prompts_only:
        return [value_or_unusable(_prompt, row, folder, encoder, config) for row in rows]
    if any(row.get("learnt") == LAST for row in rows) and not encoder.last_only:
        of_last = [row for row in rows if row.get("learnt") == LAST]
        others = [row for row in rows if row.get("learnt") != LAST]
        found_last = iter(tokenize_rows(of_last, folder, encoder.of_last, config))
        found = iter(tokenize_rows(others, folder, encoder, config))
        return [next(found_last if row.get("learnt") == LAST else found) for row in rows]
    conversations = [up_to_last_answer(row["messages"]) for row in rows]
    cuts = [_cut_answers(row) for row in rows]
    ids, tools, documents = (
        [row["id"] for row in rows],
        [row.get("tools", ()) for row in rows],
        [row.get("documents", ()) for row in rows],
    )

    def whole(row: dict[str, Any], messages: Messages, cut: Sequence[bool], encoded: Encoded) -> Tokenized:
        # Checked before the images are decoded, which takes longer and does not lower either count.
        check_length(len(encoded.input_ids), config.max_length)
        check_loss_tokens(encoded.loss_tokens, least_loss_tokens(row, config))
        sample = _with_images(row, row["id"], messages, cut, encoded, folder, encoder, config.max_length)
        sample = evolve(sample, answers=(), kinds=None)  # those of an answer in its own ids: the others have none
        return Tokenized((sample,), (len(messages) - 1,), _generated_figures(messages, encoded, encoder))

    def served(row: dict[str, Any], messages: Messages, _cut: Sequence[bool], found: Served) -> Tokenized:
        return _tokenized_contexts(row, messages, found, folder, encoder, config)

    tokenized: Callable[..., Tokenized]
    found_rows: Sequence[Encoded | Served | Unusable]
    if config.contexts == "served":
        tokenized = served
        keeps_reasoning = config.history_reasoning == "kept"
        found_rows = encoder.serve_batch(conversations, cuts, ids, tools, keeps_reasoning, documents)
    else:
        tokenized = whole
        found_rows = encoder.encode_batch(conversations, cuts, ids, tools, documents)
    return [
        found if isinstance(found, Unusable) else value_or_unusable(tokenized, row, messages, cut, found)
        for row, messages, cut, found in zip(rows, conversations, cuts, found_rows, strict=True)
    ]


def _cut_answers(row: Mapping[str, Any]) -> list[bool]:
    """For each answer of a regenerated row, whether it was cut; empty for others."""
    cut = [reason == "length" for reason in row.get("finish_reasons", ())]
    answers = sum(message["role"] == "assistant" for message in row["messages"])
    return [False] * (answers - len(cut)) + cut if row.get("learnt") == LAST else cut


def _with_images(
    row: dict[str, Any],
    sample_id: str,
    messages: Messages,
    cut: Sequence[bool],
    encoded: Encoded,
    folder: Path,
    encoder: ChatEncoder,
    max_length: int,
) -> TokenSample:
    """The sample of tokenised messages of a row, with their images. Raises Unusable."""
    check_length(len(encoded.input_ids), max_length)
    references = row["images"][: sum(map(num_images, messages))]
    images = load_images(references, folder, encoder.processor, max_length, len(encoded.input_ids))
    if not isinstance(images, Seen):
        return with_images(sample_id, encoded, images, encoder.processor)
    whole = encoder.with_seen(messages, cut, encoded, images)
    check_length(len(whole.input_ids), max_length)
    return with_seen(sample_id, whole, images)


def _tokenized_contexts(
    row: dict[str, Any],
    messages: Messages,
    served: Served,
    folder: Path,
    encoder: ChatEncoder,
    config: TokenizeChat,
) -> Tokenized:
    """The samples of a conversation's contexts, each up to the end of the last answer that fits into max_length.

    Raises Unusable if none fits, and for too few answer tokens in all samples together.
    """

    def sample(context: Context) -> TokenSample:
        sample_id = row["id"] if len(served.contexts) == 1 else f"{row['id']}@{context.number}"
        said = messages[: context.turns[-1] + 1]
        encoded = encoder.encode_context(said, context)
        return _with_images(row, sample_id, said, (), encoded, folder, encoder, config.max_length)

    samples, turns, left_out, shortened = [], [], 0, 0
    for context in served.contexts:
        one, answers = _fitting(context, sample)
        if one is None:
            left_out += 1
            continue
        samples.append(one)
        turns.append(context.turns[answers - 1])
        shortened += answers < len(context.answers)
    if not samples:
        raise Unusable(TOO_LONG, "already with its first answer")
    check_loss_tokens(sum(int(each.loss_mask.sum()) for each in samples), least_loss_tokens(row, config))
    generated = sum("generated_ids" in messages[turn] for turn in encoder.learnt_turns(messages))
    known = sum(ids is not None for context in served.contexts for ids in context.generated)
    figures = Figures(
        served.empty_thoughts, served.without_reasoning, left_out, shortened, generated, generated - known
    )
    return Tokenized(tuple(samples), tuple(turns), figures)


def _generated_figures(messages: Messages, encoded: Encoded, encoder: ChatEncoder) -> Figures:
    """How many learnt answers their target generated in ids that are known, and how many of these are learnt in others.

    Where the template marks other stretches than answers, all are.
    """
    turns, learnt, own = encoder.learnt_turns(messages), learnt_ids(encoded), encoder.generated(messages)
    generated = [turn for turn in turns if "generated_ids" in messages[turn]]
    same = 0
    if len(learnt) == len(turns):
        same = sum(turn in own and own[turn].ids == ids for turn, ids in zip(turns, learnt, strict=True))
    return Figures(generated=len(generated), retokenised=len(generated) - same)


def _fitting(context: Context, sample: Callable[[Context], TokenSample]) -> tuple[TokenSample | None, int]:
    """The sample of a context up to the last answer with which it is short enough, and its answers: 0 if none is.

    The number of answers is found by halving.
    """
    found, fits, most, shorter = None, 0, len(context.answers), context
    while True:
        one = value_or_unusable(sample, shorter)
        if isinstance(one, Unusable) and one.reason != TOO_LONG:
            raise one
        if shorter is context and isinstance(one, TokenSample):
            return one, most
        if isinstance(one, TokenSample):
            found, fits = one, len(shorter.answers)
        elif shorter is not context:
            most = len(shorter.answers) - 1
        if fits == most:
            return found, fits
        shorter = context.up_to((fits + most + 1) // 2)


def _prompt(row: dict[str, Any], folder: Path, encoder: ChatEncoder, config: TokenizeChat) -> Tokenized:
    """The target's input for a row up to its last turn of the user or a tool. Raises Unusable."""
    turns = [turn for turn, message in enumerate(row["messages"]) if message["role"] in ASKING]
    messages = row["messages"][: turns[-1] + 1]
    tools, documents = row.get("tools", ()), row.get("documents", ())
    if config.contexts == "served":
        prompt = encoder.served_prompt(messages, tools, config.history_reasoning == "kept", row["id"], documents)
    else:
        prompt = encoder.encoded_prompt(messages, row["id"], tools, documents)
    images = load_images(row["images"][: sum(map(num_images, messages))], folder, encoder.processor, config.max_length)
    sample = _prompted(row["id"], "image" if images else "text", messages, images, encoder, prompt)
    check_length(len(sample.input_ids), config.max_length)
    return Tokenized((sample,), (None,))


def up_to_last_answer(messages: Messages) -> Messages:
    """The messages up to the last answer; empty without one."""
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-1] + 1] if answers else ()


def asked(sample: TokenSample, row: Mapping[str, Any]) -> Messages:
    """The messages before a sample's last answer."""
    messages = up_to_last_answer(row["messages"])
    turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: turns[sample.answers[-1][1]]] if sample.answers else messages[:-1]


def check_length(tokens: int, max_length: int) -> None:
    """Check that a sample is not too long; samples are never cut. Raises Unusable."""
    if tokens > max_length:
        raise Unusable(TOO_LONG, f"{tokens} tokens")


def least_loss_tokens(row: Mapping[str, Any], config: TokenizeChat) -> int:
    """How many answer tokens a row needs by itself: those of a conversation in several rows are counted together."""
    return 1 if CONVERSATION in row else config.min_loss_tokens


def check_loss_tokens(tokens: int, least: int) -> None:
    """Check that a conversation has enough answer tokens. Raises Unusable."""
    if tokens < least:
        raise Unusable(TOO_FEW_LOSS_TOKENS, f"{tokens} of {least}")


def load_images(
    references: Sequence[Mapping[str, Any]],
    folder: Path,
    processor: Processor,
    max_length: int = MOST_IMAGE_TOKENS,
    text_tokens: int | None = None,
) -> Images:
    """The images behind references into a folder's packs. Raises Unusable as `load_each`.

    text_tokens: of the sample without images, but with a placeholder for each.
    """
    packed = {str(reference["sha256"]): reference for reference in references}
    names = [str(reference["sha256"]) for reference in references]
    return load_each(names, lambda name: read_packed(folder, packed[name]), processor, max_length, text_tokens)


def load_each(
    names: Sequence[Name],
    read: Callable[[Name], bytes],
    processor: Processor,
    max_length: int = MOST_IMAGE_TOKENS,
    text_tokens: int | None = None,
) -> Images:
    """Load the images of a sample by name; each is decoded once, since a row may name a large picture many times.

    read: returns an image's bytes. Tokens of Qwen's images are counted from headers before any image is decoded; of
    others by what their processor makes. Raises Unusable for an image that is refused, for a sample longer than
    max_length, and for more pixels than MOST_PIXELS.
    """
    encoded = {name: read(name) for name in dict.fromkeys(names)}
    if processor.own is not None and names:
        seen = _see([encoded[name] for name in names], processor.own)
        check_length(sum(seen.image_tokens), max_length)
        return seen
    tokens = _image_tokens(encoded, processor)
    text_only = len(names) if text_tokens is None else text_tokens
    check_length(text_only - len(names) + sum(tokens[name] for name in names), max_length)
    chunks = {name: _load_image(image, processor, tokens[name]) for name, image in encoded.items()}
    return [chunks[name] for name in names]


def _see(encoded: Sequence[bytes], own: AnyImages) -> Seen:
    """The images of a sample by a processor of another family than Qwen's. Raises Unusable as `load_each`."""
    check_pixels(prod(size_of(image)) for image in encoded)
    decoded = {image: decode(image) for image in dict.fromkeys(encoded)}
    try:
        return own.see([decoded[image] for image in encoded])
    except ValueError as error:
        raise Unusable(IMAGE_REFUSED, str(error)) from error


def check_pixels(images: Iterable[int]) -> None:
    """Check that images have not too many pixels together. Raises Unusable."""
    if sum(images) > MOST_PIXELS:
        raise Unusable(TOO_LARGE, f"the images of the sample have more than {MOST_PIXELS} pixels together")


def _image_tokens(encoded: Mapping[Name, bytes], processor: Processor) -> dict[Name, int]:
    """The number of tokens of each different image of a sample, by its header. Raises Unusable as `load_each`."""
    tokens: dict[Name, int] = {}
    sizes = {name: size_of(image) for name, image in encoded.items()}
    check_pixels(map(prod, sizes.values()))
    for name, (width, height) in sizes.items():
        try:
            tokens[name] = processor.image_tokens(width, height)
        except ValueError as error:
            raise Unusable(IMAGE_REFUSED, str(error)) from error
    return tokens


def _load_image(encoded: bytes, processor: Processor, tokens: int) -> ImageChunk:
    """An encoded image as the target's input. tokens: by its header. Raises Unusable for an image that is refused."""
    image = decode(encoded)
    try:
        return ImageChunk.from_image(processor, image, tokens)
    except ValueError as error:
        raise Unusable(IMAGE_REFUSED, str(error)) from error


def prompt_ids(
    sample_id: str,
    messages: Messages,
    images: Sequence[bytes],
    encoder: ChatEncoder,
    tools: Tools = (),
    documents: Documents = (),
) -> tuple[list[int], int]:
    """The ids of a `prompt_sample` with one placeholder per image, and their number with images expanded.

    No image of Qwen's is decoded. Raises Unusable as `prompt_sample` and `load_each`.
    """
    encoded = encoder.encoded_prompt(messages, sample_id, tools, documents)
    ids = encoded.input_ids.tolist()
    if encoder.processor.own is not None and images:
        seen = _see(images, encoder.processor.own)
        check_length(sum(seen.image_tokens), MOST_IMAGE_TOKENS)
        return ids, len(encoder.with_seen(messages, (), encoded, seen).input_ids)
    tokens = _image_tokens({image: image for image in images}, encoder.processor)
    of_images = sum(tokens[image] for image in images)
    check_length(of_images, MOST_IMAGE_TOKENS)
    return ids, len(ids) - len(images) + of_images


def prompt_sample(
    sample_id: str,
    category: str,
    messages: Messages,
    images: Images,
    encoder: ChatEncoder,
    tools: Tools = (),
    documents: Documents = (),
) -> TokenSample:
    """The target's input for answering `messages`: turns, generation prompt and images. Raises Unusable."""
    prompt = encoder.encoded_prompt(messages, sample_id, tools, documents)
    return _prompted(sample_id, category, messages, images, encoder, prompt)


def _prompted(
    sample_id: str, category: str, messages: Messages, images: Images, encoder: ChatEncoder, prompt: Encoded
) -> TokenSample:
    if isinstance(images, Seen):
        sample = with_seen(sample_id, encoder.with_seen(messages, (), prompt, images), images)
    else:
        sample = with_images(sample_id, prompt, images, encoder.processor)
    return evolve(sample, category=category)


def with_seen(sample_id: str, encoded: Encoded, images: Seen) -> TokenSample:
    """The sample of a conversation whose text has what stands for its images."""
    tokens = encoded.prompt_tokens
    pixel_values, grids = _no_images(0)
    mask, kinds = encoded.loss_mask, _placed_kinds(encoded, encoded.loss_mask)
    return TokenSample(
        sample_id, "image", encoded.input_ids, mask, pixel_values, grids, tokens, images.stored, encoded.answers, kinds
    )


def with_images(sample_id: str, encoded: Encoded, images: Sequence[ImageChunk], processor: Processor) -> TokenSample:
    """The sample with each image's placeholder replaced by the image's tokens, which are not learnt."""
    ids, mask, prompt_tokens, answers = encoded.input_ids, encoded.loss_mask, encoded.prompt_tokens, encoded.answers
    pixel_values, grids = _no_images(processor.patch_dim)
    if images:
        assert processor.image_token_id is not None  # no ImageChunk is made without
        is_image = encoded.input_ids == processor.image_token_id

        def moved(place: int) -> int:
            return place + sum(image.num_tokens - 1 for image in images[: int(is_image[:place].sum())])

        prompt_tokens, answers = moved(prompt_tokens), tuple((moved(start), turn) for start, turn in answers)
        chunks = place_images(ids, mask, processor.image_token_id, images)
        placed = concatenate(chunks, processor.patch_dim)
        ids, mask = placed.input_ids, placed.loss_mask
        pixel_values, grids = placed.pixel_values, placed.image_grid_thw
    return TokenSample(
        id=sample_id,
        category="image" if images else "text",
        input_ids=ids,
        loss_mask=mask,
        pixel_values=pixel_values,
        image_grid_thw=grids,
        prompt_tokens=prompt_tokens,
        answers=answers,
        kinds=_placed_kinds(encoded, mask),
    )


def _placed_kinds(encoded: Encoded, loss_mask: Tensor) -> Tensor | None:
    """The kinds of all tokens of a conversation with its images in place, uint8 [S]."""
    if encoded.kinds is None:
        return None
    kinds = torch.zeros(len(loss_mask), dtype=torch.uint8)
    kinds[loss_mask] = encoded.kinds
    return kinds


@lru_cache
def _no_images(patch_dim: int) -> tuple[Tensor, Tensor]:
    """The empty image tensors of text samples: float32 [0, patch_dim] and int64 [0, 3]."""
    return torch.empty(0, patch_dim), torch.empty(0, 3, dtype=torch.int64)
