"""What holds of a target, measured on it: whether its states can be captured, its head computed, and drafts verified.

A model type is no promise: models add, scale and cap what others do not, and keep caches of their own. So five things
that dflow relies on are tried on a few tokens, on the weights themselves and on a small random copy of the config:

    layers       the input of layer k + 1 equals hidden_states[k + 1], for every layer
    head         the head with its scale, soft cap and bias, on the final states, equals the logits
    padding      a batch that is padded on the right, or on the left, equals its texts by themselves
    blocks       blocks through the cache, accepted in part, equal one token after the other
    speculation  answers by proposals that are partly right equal the plain ones

The copy keeps every kind of layer, and has a window shorter than the texts.

    B batch, S sequence length, K block size, V vocabulary, M hidden size
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from torch import Tensor
from torch.nn.functional import linear

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.decoding.cache import Rows
from ops.lib.drafts.decoding.decode import matching_prefix
from ops.lib.drafts.decoding.prefill import prefill
from ops.lib.drafts.decoding.verify import BatchVerifier, SingleVerifier, keeps_all_columns
from ops.lib.target.embedding_and_head import HeadSettings, head_settings
from ops.lib.target.model import Target
from ops.lib.target.small_copy import small_copy

TOLERANCE = 1e-3  # of the largest value: float32 rounds by 1e-6, and a wrong mask or scale changes more than a tenth
BLOCK, ANSWER = 4, 11
PROMPTS = (9, 14)  # tokens
SEEDS = ((0, torch.float32), (1, torch.float64))  # of small copies; the second where a check fails on the first
# What models raise for arguments, caches and lengths that they do not take.
MODEL_ERRORS = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError, DataError)

LAYERS, HEAD, PADDING, BLOCKS, SPECULATION = "layers", "head", "padding", "blocks", "speculation"
MEANINGS = {
    LAYERS: "the inputs of its layers are its hidden states",
    HEAD: "its head on the final states gives its logits",
    PADDING: "padded batches give what single texts give",
    BLOCKS: "blocks through its cache, accepted in part, give what single tokens give",
    SPECULATION: "speculative answers are the plain ones",
}
LEFT = {  # what is still possible where a check fails
    LAYERS: "no draft can be fed by it",
    HEAD: "no draft can be trained or decoded with its head",
    PADDING: "captures of batches and answers of several prompts at once are not its own",
    BLOCKS: "capture and training are possible, but evaluate finds answers that are not its own",
    SPECULATION: "capture and training are possible, but evaluate finds answers that are not its own",
}
NEEDED = (LAYERS, HEAD)  # without which a target is refused


@frozen
class Check:
    """One thing that was tried. difference: the largest, as a share of the largest value; None where it did not come to
    numbers. reason: what was raised, or differs besides numbers; empty where nothing did.
    """

    name: str
    holds: bool
    difference: float | None = None
    reason: str = ""

    @property
    def sentence(self) -> str:
        """What was found, in words."""
        if self.holds:
            return MEANINGS[self.name]
        numbers = "" if self.difference is None else f"they differ by {self.difference:.1%} of the largest value"
        found = "; ".join(part for part in (self.reason, numbers) if part)
        return f"it does not hold that {MEANINGS[self.name]} ({found}): {LEFT[self.name]}"


@frozen
class Probe:
    """The checks of one model. on: which weights."""

    on: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def failed(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.holds)

    @property
    def refusal(self) -> str:
        """Why it cannot be a target; empty where it can."""
        return "; ".join(check.sentence for check in self.failed if check.name in NEEDED)

    @property
    def warning(self) -> str:
        """What is not possible with it although it can be a target; empty for nothing."""
        return "; ".join(dict.fromkeys(check.sentence for check in self.failed if check.name not in NEEDED))

    def to_json(self) -> dict[str, Any]:
        values: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return values


def probe_config(config: Mapping[str, Any]) -> Probe:
    """Probe a small random copy of a complete config.json. Raises DataError where no copy can be made of it."""
    for seed, dtype in SEEDS:
        probe = probe_target(small_copy(config, seed, dtype), "a small random copy of it")
        if not probe.failed:
            break
    return probe


@torch.inference_mode()
def probe_target(target: Target, on: str = "its weights") -> Probe:
    """Probe a loaded target. on: which weights it has, in words."""
    begun = time.perf_counter()
    texts = _texts(target)
    checks = [_tried(LAYERS, lambda: _layers(target, texts[1]))]
    if checks[0].holds:
        checks.append(_tried(HEAD, lambda: _head(target, texts[1])))
        checks.append(_tried(PADDING, lambda: _padding(target, texts)))
        checks += _verified(target, texts)
    return Probe(on, tuple(checks), time.perf_counter() - begun)


def _tried(name: str, check: Callable[[], float]) -> Check:
    """The check of a function that gives the difference."""
    try:
        difference = check()
    except MODEL_ERRORS as error:
        return Check(name, False, reason=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")
    return Check(name, difference <= TOLERANCE, difference)


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected value; raises ValueError for another shape."""
    if found.shape != expected.shape:
        raise ValueError(f"shapes {list(found.shape)} and {list(expected.shape)}")
    share = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return share if share == share else float("inf")  # not a number: nothing equals it


def _texts(target: Target) -> list[list[int]]:
    """Two texts of ordinary tokens from all over the vocabulary."""
    config = target.model.config.to_dict()
    named = [*config.items(), *(config.get("text_config") or {}).items()]
    values = (value for name, value in named if name.endswith("_token_id"))
    special = {number for value in values for number in (value if isinstance(value, list) else [value])}
    ordinary = [token for token in range(len(target.embed_weight)) if token not in special]
    count = sum(PROMPTS)
    tokens = [ordinary[(place * 7919) % count * len(ordinary) // count] for place in range(count)]
    return [tokens[: PROMPTS[0]], tokens[PROMPTS[0] :]]


def _sample(ids: Sequence[int]) -> TokenSample:
    no_images = torch.empty(0, 3, dtype=torch.int64)
    loss_mask = torch.zeros(len(ids), dtype=torch.bool)
    return TokenSample("probe", "text", torch.tensor(ids), loss_mask, torch.empty(0, 0), no_images, len(ids))


def _layers(target: Target, text: list[int]) -> float:
    layers = target.decoder_layers
    if len(layers) != target.num_layers:
        raise ValueError(f"{len(layers)} layers, and {target.num_layers} by its config")
    with target.capture_inputs(range(len(layers) - 1)) as captured:
        output = target.forward(target.inputs([_sample(text)]), output_hidden_states=True, use_cache=False)
    states = output.hidden_states
    if len(states) != len(layers) + 1:
        raise ValueError(f"{len(states)} hidden states of {len(layers)} layers")
    return max(_difference(captured.by_layer[k], states[k + 1]) for k in range(len(layers) - 1))


def _head(target: Target, text: list[int]) -> float:
    inputs = target.inputs([_sample(text)])
    settings = head_settings(target.model.config.to_dict())
    return _difference(_logits(target, target.hidden(inputs), settings), target.forward(inputs, use_cache=False).logits)


def _logits(target: Target, states: Tensor, settings: HeadSettings) -> Tensor:
    bias = target.model.get_output_embeddings().bias if settings.bias else None
    x = linear(states, target.head_weight, bias) * settings.scale
    return x if settings.soft_cap is None else settings.soft_cap * torch.tanh(x / settings.soft_cap)


def _padding(target: Target, texts: list[list[int]]) -> float:
    samples = list(map(_sample, texts))
    single = [target.forward(target.inputs([sample]), use_cache=False).logits[0] for sample in samples]
    right = target.forward(target.inputs(samples), use_cache=False).logits
    left = prefill(target, target.prompts(samples)).logits_BV
    return max(
        max(_difference(right[row, : len(logits)], logits), _difference(left[row], logits[-1]))
        for row, logits in enumerate(single)
    )


def _verified(target: Target, texts: list[list[int]]) -> list[Check]:
    """The checks of blocks and of speculation, which one decoding gives."""
    try:
        plain = [_plain(target, text) for text in texts]
        if keeps_all_columns(prefill(target, target.prompts([_sample(texts[0])])).cache):
            found = _speculated(target, texts, plain)
        else:
            found = [_speculated(target, [text], [answer])[0] for text, answer in zip(texts, plain, strict=True)]
    except MODEL_ERRORS as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        return [Check(name, False, reason=reason) for name in (BLOCKS, SPECULATION)]
    difference = max(each for _, each in found)
    wrong = sum(tokens != answer for (tokens, _), (answer, _) in zip(found, plain, strict=True))
    reason = f"{wrong} of {len(found)} answers are others" if wrong else ""
    return [Check(BLOCKS, difference <= TOLERANCE, difference), Check(SPECULATION, not wrong, reason=reason)]


Answer = tuple[list[int], Tensor]  # tokens, and the logits [S, V] by which they were chosen


def _plain(target: Target, text: list[int]) -> Answer:
    """The greedy answer without a cache, which every other way has to give."""
    ids = list(text)
    for _ in range(ANSWER):
        logits_SV = target.model(input_ids=torch.tensor([ids], device=target.device), use_cache=False).logits[0]
        ids.append(int(logits_SV[-1].argmax()))
    return ids[len(text) :], logits_SV[len(text) - 1 :]


def _speculated(target: Target, texts: list[list[int]], plain: Sequence[Answer]) -> list[tuple[list[int], float]]:
    """Of each text the answer by proposals of which every third is wrong, and the difference of the logits that chose
    its tokens, until they are others.
    """
    begun = prefill(target, target.prompts(list(map(_sample, texts))))
    longest = begun.mask_BS.shape[1]
    rows = Rows(longest - begun.mask_BS.sum(1), torch.full_like(begun.offset_B, longest), longest)
    verifier: BatchVerifier | SingleVerifier
    if keeps_all_columns(begun.cache):
        verifier = BatchVerifier.of(target, begun.cache, rows, begun.offset_B, 2 * ANSWER + BLOCK)
    else:
        verifier = SingleVerifier(target, begun.cache, rows, begun.offset_B)
    tokens = [[int(token)] for token in begun.logits_BV.argmax(-1)]
    differences = [
        _difference(logits_V, of_plain[0]) for logits_V, (_, of_plain) in zip(begun.logits_BV, plain, strict=True)
    ]
    while min(map(len, tokens)) < ANSWER:
        proposals = [
            _proposal(answer, len(found), len(target.embed_weight))
            for found, (answer, _) in zip(tokens, plain, strict=True)
        ]
        blocks = [[found[-1], *proposal] for found, proposal in zip(tokens, proposals, strict=True)]
        block_BK = torch.tensor(blocks, device=target.device)
        logits_BKV = verifier.verify(block_BK)
        kept = []
        for row, (answer, of_plain) in enumerate(plain):
            choices, place = logits_BKV[row].argmax(-1).tolist(), len(tokens[row])
            count = matching_prefix(proposals[row], choices)
            known = min(count + 1, ANSWER - place)
            if known > 0 and tokens[row][:place] == answer[:place]:
                differences[row] = max(
                    differences[row], _difference(logits_BKV[row, :known], of_plain[place : place + known])
                )
            tokens[row] += [*proposals[row][:count], choices[count]]
            kept.append(count + 1)
        kept_B = torch.tensor(kept, device=target.device)
        verifier.settle(block_BK, kept_B)
        rows.advance(kept_B)
    return [(found[:ANSWER], difference) for found, difference in zip(tokens, differences, strict=True)]


def _proposal(answer: list[int], place: int, vocabulary: int) -> list[int]:
    """The next tokens of the answer, every third one replaced; behind its end, anything."""
    true = (answer + [0] * BLOCK)[place : place + BLOCK - 1]
    true += [0] * (BLOCK - 1 - len(true))
    return [(token + 1) % vocabulary if (place + index) % 3 == 2 else token for index, token in enumerate(true)]
