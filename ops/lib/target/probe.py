"""What holds of a target, measured on it: whether its states can be captured, its head computed, and drafts verified.

A model type is no promise: models add, scale and cap what others do not, and keep caches of their own. So six things
that dflow relies on are tried on a few tokens, on the weights themselves and on a small random copy of the config:

    layers       the input of layer k + 1 equals hidden_states[k + 1], for every layer, and that of a shorter text
    head         the head with its scale, soft cap and bias, on the final states, equals the logits
    embedding    the rows of the embedding, times the scale that a draft takes, equal hidden_states[0]
    padding      a batch that is padded on the right, or on the left, equals its texts by themselves
    blocks       blocks through the cache, accepted in part, equal one token after the other
    speculation  answers by proposals that are partly right equal the plain ones

The copy keeps every kind of layer, and has a window shorter than the texts. A seventh is tried on a copy whose RoPE has
a first range (original_max_position_embeddings), of the length between both texts:

    lengths      a text beyond it leaves a shorter one of its batch as it is

    B batch, S sequence length, K block size, V vocabulary, M hidden size
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve
from torch import Tensor

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.cache import Rows, own_cache, whole_cache
from ops.lib.target.cache_trial import ordinary_tokens, sample_of, verification_of
from ops.lib.target.head_settings import embedding_scale
from ops.lib.target.model import Target
from ops.lib.target.no_memory import lacks_memory, no_verdict
from ops.lib.target.prefill import prefill
from ops.lib.target.probed import (
    BLOCKS,
    COPY,
    EMBEDDING,
    HEAD,
    LAYERS,
    LENGTHS,
    PADDING,
    SPECULATION,
    TURNS,
    WEIGHTS,
    Check,
    Probe,
    Trying,
    in_silence,
)
from ops.lib.target.sizes import rope_limit
from ops.lib.target.small_copy import has_range, small_copy
from ops.lib.target.verify import Verification, verifier_of
from ops.lib.vision.batch import collate
from ops.lib.vision.family_config import text_part

TOLERANCE = 1e-3  # of the largest value: float32 rounds by 1e-6, and a wrong mask or scale changes more than a tenth
BLOCK, ANSWER = 4, 11
PROMPTS = (9, 14)  # tokens
RANGE = 11  # of a copy's RoPE, between both


@no_verdict(COPY)
def probe_config(config: Mapping[str, Any], trying: Trying = in_silence) -> Probe:
    """Probe a small random copy of a complete config.json. trying: called with the name of each check before it.

    Raises DataError where no copy can be made of it, and MemoryError where memory is lacking.
    """
    probe = _probe_copy(config, trying)
    if probe.failed_names <= {EMBEDDING}:  # which no rounding decides
        return probe
    # Two of a random model's experts or tokens may be nearly alike: another one in float64 says whether it was that.
    try:
        again = _probe_copy(config, trying, seed=1, dtype=torch.float64)
    except DataError:  # of a model that float64 does not run on
        return probe
    return again if again.failed_names < probe.failed_names else probe


def _probe_copy(config: Mapping[str, Any], trying: Trying, seed: int = 0, dtype: torch.dtype = torch.float32) -> Probe:
    probe = probe_target(small_copy(config, seed, dtype), COPY, trying=trying)
    if probe.refusal or not has_range(config):
        return probe
    target, limit = small_copy(config, seed, dtype, RANGE), rope_limit(text_part(config))
    check = _tried(trying, LENGTHS, lambda: _lengths(target, _texts(target, 0)))
    if not check.holds:
        check = evolve(check, limit=limit)
    return evolve(probe, checks=(*probe.checks, check))


def probe_weights(target: Target, copy: Probe | None, turns: int = TURNS) -> Probe:
    """Probe a loaded target on its weights. copy: the probe of its small copy, if one was made. turns: how often it may
    be probed, at most TURNS; with none, only its layers, head and embedding are, which takes a tenth of a turn.

    What fails on the weights only may be two experts that are nearly alike for one token, which rounding exchanges:
    other texts say whether it was that.
    """
    probe = probe_target(target, is_whole=turns > 0)
    for turn in range(1, turns):
        if copy is None or probe.failed_names <= copy.failed_names or probe.refusal:
            break
        again = probe_target(target, turn=turn)
        if again.failed_names <= copy.failed_names:
            return again
    return probe


@torch.inference_mode()
def probe_target(
    target: Target, on: str = WEIGHTS, turn: int = 0, is_whole: bool = True, trying: Trying = in_silence
) -> Probe:
    """Probe a loaded target. on: which weights it has, in words; turn: which texts, below TURNS; is_whole: whether the
    checks that take long are tried, of padding, blocks and speculation; trying: as of `probe_config`.
    """
    begun = time.perf_counter()
    texts = _texts(target, turn)
    checks = [_tried(trying, LAYERS, lambda: _layers(target, texts[1]))]
    if checks[0].holds:
        checks.append(_tried(trying, HEAD, lambda: _head(target, texts[1])))
        checks.append(_tried(trying, EMBEDDING, lambda: _embedding(target, texts[1])))
        if is_whole:
            checks.append(_tried(trying, PADDING, lambda: _padding(target, texts)))
            trying(SPECULATION)
            checks += _verified(target, texts)
    return Probe(on, tuple(checks), time.perf_counter() - begun)


def _tried(trying: Trying, name: str, check: Callable[[], float]) -> Check:
    """The check of a function that gives the difference. A lack of memory is raised, as every check does."""
    trying(name)
    try:
        difference = check()
    except Exception as error:  # models raise anything for arguments and lengths that they do not take
        if lacks_memory(error):
            raise
        return Check(name, False, reason=_reason(error))
    return Check(name, difference <= TOLERANCE, difference)


def _reason(error: Exception) -> str:
    """What a check raised, in a line; dflow's own errors say all themselves."""
    text = str(error).partition("\n")[0][:200]
    return text if isinstance(error, DataError) else f"{type(error).__name__}: {text}"


def _difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest expected value; raises ValueError for another shape."""
    if found.shape != expected.shape:
        raise ValueError(f"shapes {list(found.shape)} and {list(expected.shape)}")
    share = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
    return share if share == share else float("inf")  # not a number: nothing equals it


def _texts(target: Target, turn: int) -> list[list[int]]:
    """Two texts of ordinary tokens from all over the vocabulary, others in each turn."""
    ordinary = ordinary_tokens(target)
    count = sum(PROMPTS)
    places = [TURNS * (place * 7919 % count) + turn for place in range(count)]
    tokens = [ordinary[place * len(ordinary) // (TURNS * count)] for place in places]
    return [tokens[: PROMPTS[0]], tokens[PROMPTS[0] :]]


def _layers(target: Target, text: list[int]) -> float:
    layers = target.decoder_layers
    if len(layers) != target.num_layers:
        raise ValueError(f"{len(layers)} layers, and {target.num_layers} by its config")
    with target.capture_inputs(range(len(layers) - 1)) as captured:
        output = target.forward(target.inputs([sample_of(text)]), output_hidden_states=True, use_cache=False)
        whole = dict(captured.by_layer)
        target.forward(target.inputs([sample_of(text[: len(text) // 2])]), use_cache=False)
    states = output.hidden_states
    if len(states) != len(layers) + 1:
        raise ValueError(f"{len(states)} hidden states of {len(layers)} layers")
    expected = [1, len(text), target.hidden_size]
    if other := next((list(each.shape) for each in whole.values() if list(each.shape) != expected), None):
        raise ValueError(f"its layers pass on states of shape {other}, and a draft is fed by {expected}")
    return max(
        max(_difference(whole[k], states[k + 1]), _difference(whole[k][:, : len(text) // 2], captured.by_layer[k]))
        for k in range(len(layers) - 1)
    )


def _head(target: Target, text: list[int]) -> float:
    for end, weight in (("embedding", target.embed_weight), ("head", target.head_weight)):
        if weight.shape[1] != target.hidden_size:
            raise ValueError(f"rows of its {end} have {weight.shape[1]} numbers, and its states {target.hidden_size}")
    inputs = target.inputs([sample_of(text)])
    logits = target.forward(inputs, use_cache=False).logits
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    if (logits.amax(-1) == logits.amin(-1)).any():
        raise ValueError("its logits are all equal")
    return _difference(target.head.logits(target.hidden(inputs)), logits)


def _embedding(target: Target, text: list[int]) -> float:
    inputs = target.inputs([sample_of(text)])
    states = target.forward(inputs, output_hidden_states=True, use_cache=False).hidden_states
    return _difference(target.embed_weight[inputs.input_ids] * embedding_scale(target.family.config), states[0])


def _padding(target: Target, texts: list[list[int]]) -> float:
    samples = list(map(sample_of, texts))
    single = [target.forward(target.inputs([sample]), use_cache=False).logits[0] for sample in samples]
    right = target.forward(target.inputs(samples), use_cache=False).logits
    left = prefill(target, target.prompts(samples), own_cache(target)).logits_BV
    return max(
        max(_difference(right[row, : len(logits)], logits), _difference(left[row], logits[-1]))
        for row, logits in enumerate(single)
    )


@torch.inference_mode()
def _lengths(target: Target, texts: list[list[int]]) -> float:
    """The difference of the shorter text's states beside the longer one, which no capture would batch."""
    samples = list(map(sample_of, texts))
    alone, beside = (target.hidden(collate(batch, target.device))[0] for batch in (samples[:1], samples))
    return _difference(beside[: len(texts[0])], alone)


def _verified(target: Target, texts: list[list[int]]) -> list[Check]:
    """The checks of blocks and of speculation, which one decoding gives."""
    try:
        samples = list(map(sample_of, texts))
        plain = [plain_answer(target, sample) for sample in samples]
        found = speculated_answers(target, samples, plain)
    except Exception as error:  # as above, for caches
        if lacks_memory(error):
            raise
        return [Check(name, False, reason=_reason(error)) for name in (BLOCKS, SPECULATION)]
    difference = max(each for _, each in found)
    wrong = sum(tokens != answer for (tokens, _), (answer, _) in zip(found, plain, strict=True))
    reason = f"{wrong} of {len(found)} answers are others" if wrong else ""
    return [Check(BLOCKS, difference <= TOLERANCE, difference), Check(SPECULATION, not wrong, reason=reason)]


Answer = tuple[list[int], Tensor]  # tokens, and the logits [S, V] by which they were chosen


def plain_answer(target: Target, sample: TokenSample) -> Answer:
    """The greedy answer to a sample's prompt without a cache, which every other way has to give."""
    sample = sample.prompt()
    start = len(sample.input_ids)
    for _ in range(ANSWER):
        logits_SV = target.forward(target.inputs([sample]), use_cache=False).logits[0]
        sample = evolve(sample, input_ids=torch.cat([sample.input_ids, logits_SV[-1:].argmax(-1).cpu()]))
        sample = evolve(sample, loss_mask=torch.zeros(len(sample.input_ids), dtype=torch.bool))
    return sample.input_ids[start:].tolist(), logits_SV[start - 1 :]


Speculated = tuple[list[int], float]  # tokens, and the difference of the logits that chose them, until they are others


def speculated_answers(target: Target, samples: Sequence[TokenSample], plain: Sequence[Answer]) -> list[Speculated]:
    """The answer to each sample's prompt by proposals of which every third is wrong, as the target verifies them."""
    way = verification_of(target)
    if way is Verification.BATCH:
        return _speculated(target, way, samples, plain)
    return [_speculated(target, way, [one], [answer])[0] for one, answer in zip(samples, plain, strict=True)]


def _speculated(
    target: Target, way: Verification, samples: Sequence[TokenSample], plain: Sequence[Answer]
) -> list[Speculated]:
    begun = prefill(target, target.prompts(samples), whole_cache(target))
    rows = Rows.of(begun.mask_BS)
    tokens = [[int(token)] for token in begun.logits_BV.argmax(-1)]
    differences = [
        _difference(logits_V, of_plain[0]) for logits_V, (_, of_plain) in zip(begun.logits_BV, plain, strict=True)
    ]
    with target.capture_inputs((0,)) as captured:
        verifier = verifier_of(way, target, captured, begun, rows, room=2 * ANSWER + BLOCK)
        while min(map(len, tokens)) < ANSWER:
            proposals = [
                _proposal(target, answer, len(found)) for found, (answer, _) in zip(tokens, plain, strict=True)
            ]
            blocks = [[found[-1], *proposal] for found, proposal in zip(tokens, proposals, strict=True)]
            block_BK = torch.tensor(blocks, device=target.device)
            logits_BKV, _ = verifier.verify(block_BK)
            kept = []
            for row, (answer, of_plain) in enumerate(plain):
                choices, place = logits_BKV[row].argmax(-1).tolist(), len(tokens[row])
                count = _matching(proposals[row], choices)
                known = min(count + 1, ANSWER - place)
                if known > 0 and tokens[row] == answer[:place]:
                    difference = _difference(logits_BKV[row, :known], of_plain[place : place + known])
                    differences[row] = max(differences[row], difference)
                tokens[row] += [*proposals[row][:count], choices[count]]
                kept.append(count + 1)
            kept_B = torch.tensor(kept, device=target.device)
            verifier.settle(block_BK, kept_B)
            rows.advance(kept_B)
    return [(found[:ANSWER], difference) for found, difference in zip(tokens, differences, strict=True)]


def _matching(proposal: list[int], choices: list[int]) -> int:
    """How many leading proposals are the target's choices."""
    return next((count for count, token in enumerate(proposal) if token != choices[count]), len(proposal))


def _proposal(target: Target, answer: list[int], place: int) -> list[int]:
    """The next tokens of the answer, every third one replaced; behind its end, anything."""
    true = (answer[place:] + [0] * BLOCK)[: BLOCK - 1]
    vocabulary = len(target.embed_weight)
    return [(token + 1) % vocabulary if (place + index) % 3 == 2 else token for index, token in enumerate(true)]
