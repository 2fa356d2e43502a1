"""Why SGLang's accepted lengths are not `evaluate`'s: a tie, or what the same prompt gives by dflow's code.

S tokens, L captured layers, F = L * hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor

from ops.check_export.departures import Departure
from ops.check_export.live_result import Prompt
from ops.check_export.live_seen import BEHIND, OTHER_CODE, Cause, Comparison
from ops.lib.drafts.decoding.decode import decode_speculative
from ops.lib.drafts.dflash.contract_mistake import REWRITE
from ops.lib.drafts.dflash.model import DraftModel
from ops.lib.target.model import Target

UNKNOWN = Cause(BEHIND, OTHER_CODE)
OTHER_REPORT = Cause(
    "dflow's own decoding with this directory accepts what SGLang does, so the report is of other weights or of "
    "another config.json",
    REWRITE,
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
    anchor_M, mask_M = target.embed_weight[[prompt.tokens[done], draft.config.mask_token_id]]
    slot = min(prompt.accepted[departure.step], departure.served.accepted[departure.step])
    return _margin(draft.propose(anchor_M, mask_M, context)[slot] @ target.head_weight.T) < margin


def find_cause(target: Target, draft: DraftModel, departure: Departure, comparison: Comparison) -> Cause:
    """What is to be said about a departure: what the draft is given comes first, of whichever prompt it was seen."""
    if comparison.cause is not None:
        return comparison.cause
    again = decode_speculative(target, draft, departure.prompt.sample, departure.prompt.max_new_tokens)
    return OTHER_REPORT if again.accepted == departure.served.accepted else UNKNOWN


def other_dtype(served_in: str, evaluated_in: str) -> Cause:
    """Where nothing else differs."""
    return Cause(
        f"features and positions of the prompt are the right ones, but SGLang serves in {served_in} and evaluate "
        f"decoded in {evaluated_in}, and rounding makes other answers, in which the draft may be worse",
        f'give evaluate dtype = "{served_in}" too, and train on features of that dtype',
    )


def _along(target: Target, layer_ids: Sequence[int], prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Logits [S, V] and features [S, F] of the prompt with its answer, in one forward pass."""
    ids = torch.cat([prompt.sample.input_ids[: prompt.sample.prompt_tokens], torch.tensor(prompt.tokens)])
    whole = evolve(prompt.sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with target.capture_inputs(layer_ids) as captured:
        logits = target.forward(target.inputs([whole]), use_cache=False).logits[0]
    return logits, captured.features()[0]


def _margin(logits_V: Tensor) -> float:
    best = logits_V.float().topk(2).values
    return float(best[0] - best[1])
