"""Why SGLang's accepted lengths differ from `evaluate`'s: its draft's inputs, a tie, or another report.

Accepted lengths do not show the draft's inputs: below float32 rounding changes them, and a draft that has memorized
the answers hides wrong features. `compare_watched` compares the inputs of SGLang's draft for a prompt and its answer
with those of dflow's own target and draft on the same tokens: both sides see the sequence that SGLang decoded.

    S tokens of prompt and answer in the draft's context, L captured layers, F = L * hidden size, M hidden size,
    V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsl.finding import Finding
from ops.check_export.served_prompts import Departure, Prompt, largest, nan_last
from ops.lib.drafts.algorithms import part_of
from ops.lib.drafts.backbone.contract import OF_MAKER, REWRITE, embedding_warnings
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import (
    Decoded,
    DraftContext,
    Scores,
    decode_speculative,
    matching_prefix,
    propose,
)
from ops.lib.sglang.version import installed_version
from ops.lib.target.model import Target
from ops.lib.target.state_distance import other_layer, state_distances
from ops.lib.vision.families import AnyVision, VisionFamily

WATCHED = 2  # prompts with images, and as many without, that are compared whether or not they depart
DEPARTED = 4  # departures that are compared too
# Largest distance of a token's states, averaged over the tokens of one kind.
SAME = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
CLOSER = 0.5  # states this much closer to another layer's are that layer's, however similar the layers are
REPLAYED = 0.85  # least share of equal steps, below float32, where ties of the draft's two best logits are common
SPARED = 2  # further steps that may differ, so that a few short answers raise no alarm
OTHER_CODE = (
    "no draft of dflow can be served like this; reinstall SGLang (pip install --force-reinstall --no-deps "
    f"sglang=={installed_version()}), and if that does not help, report this message"
)
OTHER_FEATURES = (
    'a server gives the draft the same inputs: capture with backend = "sglang" and train again, so that the draft '
    "learns from them"
)
BEHIND = (
    "features and positions are correct, so the difference arises after them: in the block (its mask token, its "
    "positions), or in the cached states of accepted tokens"
)


@frozen(eq=False)
class Watched:
    """The inputs of SGLang's draft while it decoded one prompt.

    features_SF: the target's features, on the CPU. positions_S: their positions, on the CPU. answer: as decoded.
    """

    prompt: Prompt
    features_SF: Tensor
    positions_S: Tensor
    answer: Decoded


@frozen
class Comparison:
    """The comparison of SGLang's draft inputs with dflow's, over all prompts.

    cause: which input of the draft differs, None if none does. replayed: the share of SGLang's steps in which dflow's
    draft gets as many tokens right on the same answer. feature_distance: the largest of all layers and kinds of tokens.
    """

    cause: Finding | None
    replayed: float
    feature_distance: float

    def figures(self) -> dict[str, float]:
        return {"replayed_steps": self.replayed, "feature_distance": self.feature_distance}


def prompts_to_watch(prompts: Sequence[Prompt], departed: Sequence[Departure]) -> list[Prompt]:
    """The prompts whose draft inputs are recorded: the first with and without images, and the first departures'."""
    chosen = [departure.prompt for departure in departed[:DEPARTED]]
    for with_images in (False, True):
        kind = [prompt for prompt in prompts if prompt.sample.has_images == with_images]
        chosen += kind[:WATCHED]
    names = {prompt.sample.id for prompt in chosen}
    return [prompt for prompt in prompts if prompt.sample.id in names]


@torch.inference_mode()
def compare_watched(target: Target, draft: DraftModel, watched: Sequence[Watched]) -> Comparison:
    """Compare the inputs of SGLang's draft with those of dflow's target and draft, with the same dtype and device.

    The cause is that of the first prompt that has one: positions first, then features, then the draft's proposals.
    """
    cause: Finding | None = None
    equal = steps = 0
    farthest = 0.0
    for one in watched:
        along = Along.of(target, one)
        layers = along.layers(one, draft.config.target_layer_ids)
        farthest = largest((farthest, *(layer.distance for layer in layers)))
        cause = cause or other_positions(one) or other_features(layers, target)
        right, made = replay(target, draft, one, along.features_SF(draft.config.target_layer_ids))
        equal, steps = equal + right, steps + made
    few = steps - equal > (1 - REPLAYED) * steps + SPARED
    if cause is None and target.embed_weight.dtype != torch.float32 and few:
        cause = Finding(
            f"on SGLang's own answers dflow's draft has as many tokens right in {equal} of {steps} steps, but "
            f"{REPLAYED:.0%} are expected: {BEHIND}",
            advice=OTHER_CODE,
        )
    return Comparison(cause, equal / steps if steps else 1.0, farthest)


def seen_mistake(cause: Finding) -> Finding:
    """The mistake for wrong inputs of the draft that did not change accepted lengths."""
    effect = (
        "verifies every token, so the answers are still right, but it accepts less of what the draft proposes the more "
        "it learned from the target's states"
    )
    return evolve(cause, what=f"{cause.what}\nSGLang: {effect}")


def other_positions(watched: Watched) -> Finding | None:
    """The cause if the context's keys do not have their tokens' positions; None if they do."""
    positions_S = watched.positions_S
    expected_S = torch.arange(len(positions_S))
    if torch.equal(positions_S, expected_S):
        return None
    place = int((positions_S != expected_S).nonzero()[0])
    prompt = watched.prompt.sample.prompt_tokens
    whose = f"token {place} of the prompt" if place < prompt else f"token {place - prompt} of the answer"
    return Finding(
        f"the draft gets position {int(positions_S[place])} for {whose}, but was trained on the positions 0, 1, 2, ...",
        advice=OTHER_CODE,
    )


@frozen
class Layer:
    """The states of one captured layer. distance: from the correct ones, for the kind of tokens where it is largest.

    before: distance from the states before deepstack's features are added. others: distances from all other layers'
    states.
    """

    layer_id: int
    kind: str
    distance: float
    before: float
    others: Mapping[int, float]


def other_features(layers: Sequence[Layer], target: Target) -> Finding | None:
    """The cause for layers with wrong states, with a hint at what they hold instead; None if all are right."""
    same = SAME[target.embed_weight.dtype]
    found = []
    for layer in layers:
        nearest = min(layer.before, *layer.others.values())
        if layer.distance <= same and not nearest < CLOSER * layer.distance - same / 100:
            continue
        seems = f"match no layer's {layer.kind}"
        near = min(same, CLOSER * layer.distance)
        if layer.before < near:
            seems = "are those before deepstack's visual features are added"
        elif (closest := other_layer(layer.others, near)) is not None:
            seems = f"are those of layer {closest}"
        found.append(
            f"the draft gets states for layer {layer.layer_id} that differ by {layer.distance:.2g} of their size and "
            f"{seems}"
        )
    return Finding("; ".join(found), advice=OTHER_FEATURES, code=OF_MAKER) if found else None


@frozen(eq=False)
class Along:
    """One forward pass of dflow's target over a prompt and its answer.

    outputs_SM: the output of each layer. inputs_SM: the input of the next layer, under the same number. kinds: masks
    [S] of the tokens of images, of the rest of the prompt, and of the answer; without empty kinds.
    """

    inputs_SM: Mapping[int, Tensor]
    outputs_SM: Mapping[int, Tensor]
    kinds: Mapping[str, Tensor]

    @classmethod
    def of(cls, target: Target, watched: Watched) -> Along:
        """Run dflow's target over a prompt and its answer, up to the answer's end. Raises as the target does."""
        sample, answer = watched.prompt.sample, watched.answer
        ids_S = torch.cat([sample.input_ids[: sample.prompt_tokens], torch.tensor(answer.tokens)])
        ids_S = ids_S[: max(sample.prompt_tokens, min(len(ids_S), len(watched.features_SF)))]
        whole = evolve(sample, input_ids=ids_S, loss_mask=torch.zeros(len(ids_S), dtype=torch.bool))
        with target.capture_inputs(range(target.num_layers - 1)) as captured:
            states = target.forward(
                target.inputs([whole]), use_cache=False, output_hidden_states=True, logits_to_keep=1
            ).hidden_states
        in_prompt_S = torch.arange(len(ids_S)) < sample.prompt_tokens
        image_S = torch.zeros_like(in_prompt_S)
        if sample.has_images:
            assert isinstance(target.family, VisionFamily | AnyVision)  # only these support images
            image_S = in_prompt_S & (ids_S == target.family.image_token_id)
        kinds = {"image tokens": image_S, "prompt": in_prompt_S & ~image_S, "answer": ~in_prompt_S}
        return cls(
            {k: captured.by_layer[k][0] for k in captured.layer_ids},
            {k: states[k + 1][0] for k in captured.layer_ids},
            {name: kind_S.to(target.device) for name, kind_S in kinds.items() if kind_S.any()},
        )

    def features_SF(self, layer_ids: Sequence[int]) -> Tensor:
        return torch.cat([self.inputs_SM[k] for k in layer_ids], dim=-1)

    def layers(self, watched: Watched, layer_ids: Sequence[int]) -> list[Layer]:
        """Compares every captured layer's states with the correct ones and all others."""
        return list(self._layers(watched, layer_ids))

    def _layers(self, watched: Watched, layer_ids: Sequence[int]) -> Iterator[Layer]:
        for layer_id, states_SM in zip(layer_ids, watched.features_SF.chunk(len(layer_ids), dim=-1), strict=True):
            right_SM = self.inputs_SM[layer_id]
            states_SM = states_SM[: len(right_SM)].to(right_SM.device)
            by_kind = self._distances(states_SM, right_SM)
            kind, distance = max(by_kind.items(), key=lambda item: nan_last(item[1]))
            yield Layer(
                layer_id,
                kind,
                distance,
                self._distances(states_SM, self.outputs_SM[layer_id])[kind],
                {k: self._distances(states_SM, other)[kind] for k, other in self.inputs_SM.items() if k != layer_id},
            )

    def _distances(self, states_SM: Tensor, expected_SM: Tensor) -> dict[str, float]:
        """Mean distance of a token's states from the expected ones, relative to their norm, by kind of token."""
        distance_S = state_distances(states_SM, expected_SM)
        return {name: float(distance_S[kind_S[: len(distance_S)]].mean()) for name, kind_S in self.kinds.items()}


def replay(target: Target, draft: DraftModel, watched: Watched, features_SF: Tensor) -> tuple[int, int]:
    """The number of steps in which dflow's draft gets as many tokens right as SGLang's did, and the number of steps.

    features_SF: dflow's target's. Nothing after the answer's end is compared.
    """
    tokens, start = watched.answer.tokens, watched.prompt.sample.prompt_tokens
    context = DraftContext(draft)
    equal = done = 0
    for accepted in watched.answer.accepted:
        context.append(features_SF[context.length : start + done])
        rest = list(tokens[done + 1 :])
        ours = matching_prefix(propose(target, draft, context, tokens[done]), rest)
        equal += min(ours, len(rest)) == min(accepted, len(rest))
        done += accepted + 1
    return equal, len(watched.answer.accepted)


UNKNOWN = Finding(BEHIND, advice=OTHER_CODE)
OTHER_REPORT = Finding(
    "dflow's own decoding with this directory accepts the same as SGLang, so the report is of other weights or of "
    "another config.json",
    advice=REWRITE,
    code=OF_MAKER,
)


@torch.inference_mode()
def is_tie(target: Target, draft: DraftModel, departure: Departure, margin: float) -> bool:
    """Whether the two best scores are closer than `margin` where SGLang first differs from `evaluate`.

    For a token, the scores are the target's logits. For an accepted length, they are the draft's at the first slot that
    only one side accepts; the tokens before it are equal. A prompt counts as tied too if `evaluate` itself decodes it
    differently in blocks and token by token.
    """
    prompt = departure.prompt
    if decode_speculative(target, draft, prompt.sample, prompt.max_new_tokens).tokens != prompt.tokens:
        return True
    logits_SV, features_SF = _along(target, draft.config.target_layer_ids, prompt)
    if departure.position is not None:
        behind = prompt.sample.prompt_tokens + departure.position - 1
        return behind < len(logits_SV) and _margin(logits_SV[behind]) < margin
    assert departure.step is not None
    if departure.step >= min(len(prompt.accepted), len(departure.served.accepted)):
        return False
    done = sum(accepted + 1 for accepted in prompt.accepted[: departure.step])
    anchor = prompt.sample.prompt_tokens + done
    context = DraftContext(draft)
    context.append(features_SF[:anchor])
    rows_2M = target.embed_weight[[prompt.tokens[done], draft.config.mask_token_id]]
    anchor_M, mask_M = draft.embedded(rows_2M)
    slot = min(prompt.accepted[departure.step], departure.served.accepted[departure.step])
    hidden_DM = draft.propose(anchor_M, mask_M, context.kv)
    around = context.around(target)
    scores: Scores = part_of(draft.config.algorithm, "reference:scores")
    tokens = list(prompt.tokens[done : done + slot + 1])
    while True:
        scores_V = scores(draft.config, draft.state_dict(), hidden_DM, target.head_weight, tokens, *around)
        if len(tokens) > slot:
            return _margin(scores_V) < margin
        tokens.append(int(scores_V.argmax()))  # accepted behind the end of the answer


def find_cause(target: Target, draft: DraftModel, departure: Departure, comparison: Comparison) -> Finding:
    """The cause of a departure; wrong inputs of the draft, for any prompt, come first."""
    if comparison.cause is not None:
        return comparison.cause
    again = decode_speculative(target, draft, departure.prompt.sample, departure.prompt.max_new_tokens)
    return OTHER_REPORT if again.accepted == departure.served.accepted else UNKNOWN


def other_embedding(config: Mapping[str, Any], target: Mapping[str, Any]) -> Finding | None:
    """The cause if SGLang scales the embedding's rows otherwise than the training did; None if it does not.

    config: the draft's config.json; target: the target's.
    """
    differs = embedding_warnings(config, target).get("SGLang")
    if differs is None:
        return None
    return Finding(
        f"features and positions are correct, but {differs}",
        advice="train the draft with the scale that SGLang computes for this target, or serve it with another engine",
        code=OF_MAKER,
    )


def other_dtype(served_in: str, evaluated_in: str) -> Finding:
    """The cause to name if nothing but the dtype differs."""
    return Finding(
        f"features and positions of the prompt are correct, but SGLang serves in {served_in} and evaluate "
        f"decoded in {evaluated_in}, and rounding changes the answers, in which the draft may be worse",
        advice=f'give evaluate dtype = "{served_in}" too, and train on features of that dtype',
    )


def _along(target: Target, layer_ids: Sequence[int], prompt: Prompt) -> tuple[Tensor, Tensor]:
    """The logits [S, V] and features [S, F] of the prompt with its answer, from one forward pass."""
    ids = torch.cat([prompt.sample.input_ids[: prompt.sample.prompt_tokens], torch.tensor(prompt.tokens)])
    whole = evolve(prompt.sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with target.capture_inputs(layer_ids) as captured:
        logits = target.forward(target.inputs([whole]), use_cache=False).logits[0]
    return logits, captured.features()[0]


def _margin(logits_V: Tensor) -> float:
    best = logits_V.float().topk(2).values
    return float(best[0] - best[1])
