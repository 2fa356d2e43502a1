"""Why SGLang's accepted lengths are not `evaluate`'s: the same prompt once more by dflow's code, and what SGLang saw.

S tokens, L captured layers, F = L * hidden size, M hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from ops.check_export.departures import Departure
from ops.check_export.live_result import Prompt
from ops.check_export.mistake import REWRITE
from ops.dflash.decode import decode_speculative
from ops.dflash.model import DraftModel
from ops.load_target.model import Target
from ops.sglang_engine.version import SGLANG_VERSION

SAME = {torch.float32: 2e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of the largest number of a layer's states
OTHER_CODE = (
    "no draft of dflow can be served like this; install SGLang afresh (pip install --force-reinstall --no-deps "
    f"sglang=={SGLANG_VERSION}), and where that changes nothing, report what stands here"
)
OTHER_FEATURES = (
    'a server gives the draft the same: capture with backend = "sglang" and train again, so that the draft learns from '
    "what it will be given"
)


@frozen
class Cause:
    """In words: what differs, and what to do about it."""

    text: str
    remedy: str


UNKNOWN = Cause(
    "features and positions of the prompt are the right ones, so what differs comes behind it: the block (its mask "
    "token, its positions), or what is kept of accepted tokens",
    OTHER_CODE,
)


@torch.inference_mode()
def is_tie(target: Target, draft: DraftModel, departure: Departure, margin: float) -> bool:
    """Whether the two best logits lie closer than `margin` where SGLang first leaves `evaluate`.

    For a token these are the target's. For an accepted length they are the draft's at the first slot that only one
    side accepts: the slots before it are the same tokens on both sides. An answer that `evaluate` itself could not
    decode alike in blocks and token by token counts as tied too.
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
    context = draft.context_kv(features_SF[:anchor], torch.arange(anchor, device=features_SF.device))
    embeds = target.embed_weight[[prompt.tokens[done], draft.config.mask_token_id]]
    slot = min(prompt.accepted[departure.step], departure.served.accepted[departure.step])
    return _margin(draft.propose(*embeds, context)[slot] @ target.head_weight.T) < margin


def find_cause(
    target: Target, draft: DraftModel, departure: Departure, features_SF: Tensor, positions_S: Tensor
) -> Cause:
    """What is to be said about a departure.

    features_SF, positions_S: what SGLang gave its draft of the departure's prompt, on the CPU.
    """
    expected_S = torch.arange(departure.prompt.sample.prompt_tokens)
    if not torch.equal(positions_S, expected_S):
        place = int((positions_S != expected_S).nonzero()[0])
        return Cause(
            f"the draft gets position {int(positions_S[place])} for token {place} of the prompt, and was trained on "
            "the tokens' own places, 0, 1, 2 and so on",
            OTHER_CODE,
        )
    others = _other_features(target, draft.config.target_layer_ids, departure.prompt, features_SF)
    if others:
        return Cause("; ".join(others), OTHER_FEATURES)
    again = decode_speculative(target, draft, departure.prompt.sample, departure.prompt.max_new_tokens)
    if again.accepted == departure.served.accepted:
        return Cause(
            "dflow's own decoding with this directory accepts what SGLang does, so the report is of other weights or "
            "of another config.json",
            REWRITE,
        )
    return UNKNOWN


def other_dtype(served_in: str, evaluated_in: str) -> Cause:
    """Where nothing else differs."""
    return Cause(
        f"features and positions of the prompt are the right ones, but SGLang serves in {served_in} and evaluate "
        f"decoded in {evaluated_in}, and rounding makes other answers, in which the draft may be worse",
        f'give evaluate dtype = "{served_in}" too, and train on features of that dtype',
    )


@torch.inference_mode()
def _other_features(target: Target, layer_ids: Sequence[int], prompt: Prompt, features_SF: Tensor) -> list[str]:
    """For each layer whose states are not the right ones, what they are instead, as far as that can be told."""
    with target.capture_inputs(range(target.num_layers - 1)) as captured:
        output = target.forward(
            target.prompts([prompt.sample]), use_cache=False, output_hidden_states=True, logits_to_keep=1
        )
    inputs_SM = {k: captured.by_layer[k][0].float().cpu() for k in captured.layer_ids}
    outputs_SM = {k: output.hidden_states[k + 1][0].float().cpu() for k in captured.layer_ids}
    same = SAME[target.embed_weight.dtype]
    found = []
    for layer_id, states_SM in zip(layer_ids, features_SF.chunk(len(layer_ids), dim=-1), strict=True):
        distance = _distance(states_SM, inputs_SM[layer_id])
        if distance < same:
            continue
        before = _distance(states_SM, outputs_SM[layer_id]) < same
        other = next((k for k in inputs_SM if _distance(states_SM, inputs_SM[k]) < same), None)
        seems = "are of no layer's"
        if before:
            seems = "are those before deepstack's visual features are added"
        elif other is not None:
            seems = f"are those of layer {other}"
        found.append(
            f"the draft gets states for layer {layer_id} that differ by {distance:.2g} of their size and {seems}"
        )
    return found


def _along(target: Target, layer_ids: Sequence[int], prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and features [S, F] of the prompt with its answer, in one forward pass."""
    ids = torch.cat([prompt.sample.input_ids[: prompt.sample.prompt_tokens], torch.tensor(prompt.tokens)])
    whole = evolve(prompt.sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with target.capture_inputs(layer_ids) as captured:
        logits = target.forward(target.inputs([whole]), use_cache=False).logits[0]
    return logits, captured.features()[0]


def _distance(states_SM: Tensor, expected_SM: Tensor) -> float:
    """The largest difference, where the largest number expected is 1."""
    return float((states_SM - expected_SM).abs().max() / expected_SM.abs().max())


def _margin(logits_V: Tensor) -> float:
    best = logits_V.float().topk(2).values
    return float(best[0] - best[1])
