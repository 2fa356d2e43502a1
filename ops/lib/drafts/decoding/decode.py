"""Greedy decoding of one prompt, plain and speculative, with KV caches for target and draft.

The draft proposes block_size - 1 tokens behind the anchor; one forward pass of the target over the block verifies
them; the longest matching prefix is kept, and the target's own next token becomes the new anchor.

    S prompt length, K block size, F captured feature width, M hidden size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from attrs import define, field, frozen
from torch import Tensor
from transformers import DynamicCache

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.algorithms import ReadsContext, part_of
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.block_context import BlockContext
from ops.lib.drafts.decoding.decode_options import DraftUse
from ops.lib.target.cache import own_cache, roll_back, save, whole_cache
from ops.lib.target.cache_trial import verification_of
from ops.lib.target.model import LayerInputs, Target
from ops.lib.target.verify import Verification

# The type of the function `scores` in an algorithm's reference.py.
Scores = Callable[..., Tensor]


@frozen
class Decoded:
    """The answer to one prompt.

    tokens: includes the first token (from the prefill) and EOS. accepted: draft tokens accepted in each verification
    step, even after EOS. margins: distance of the target's two best logits for each token. near: place -> the tokens
    whose logits are within the requested distance of the best one, with their distance; only places with several.
    confidence: for each step, the draft's confidence in the accepted tokens and in the refused one, if it has a
    confidence head.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...] = ()
    margins: tuple[float, ...] = ()
    near: Mapping[int, Mapping[int, float]] = field(factory=dict)
    confidence: tuple[tuple[float, ...], ...] = ()

    @property
    def steps(self) -> int:
        """The number of verification steps."""
        return len(self.accepted)

    @property
    def generated(self) -> int:
        """The number of tokens from verification steps: all but the first, none after EOS."""
        return len(self.tokens) - 1

    @property
    def generated_unclipped(self) -> int:
        """The number of tokens after the first, including those accepted after EOS or past the length limit."""
        return sum(self.accepted) + self.steps


@torch.inference_mode()
def decode_plain(target: Target, sample: TokenSample, max_new_tokens: int) -> Decoded:
    """The target's own greedy answer, one token per forward pass."""
    cache = own_cache(target)
    logits_V = target.forward(target.prompts([sample]), past_key_values=cache, logits_to_keep=1).logits[0, -1]
    tokens: list[int] = []
    margins: list[float] = []
    while True:
        margins += margins_of(logits_V[None], sample.id, len(tokens))
        tokens.append(int(logits_V.argmax()))
        if tokens[-1] in target.eos_token_ids or len(tokens) > max_new_tokens:
            return Decoded(tuple(tokens), margins=tuple(margins))
        logits_V = _extend(target, cache, [tokens[-1]])[-1]


@torch.inference_mode()
def decode_speculative(
    target: Target, draft: DraftModel, sample: TokenSample, max_new_tokens: int, use: DraftUse | None = None
) -> Decoded:
    """The answer of `decode_plain` by speculative decoding; at most `max_new_tokens` after the first token.

    use: how the draft is fed; default: as in training.
    """
    use = use or DraftUse.of(draft.config)
    by_token = verification_of(target) is Verification.TOKEN
    cache = whole_cache(target)
    with target.capture_inputs(use.target_layer_ids) as captured:
        output = target.forward(target.prompts([sample]), past_key_values=cache, logits_to_keep=1)
        context = DraftContext(draft)
        context.append(captured.features()[0])
        tokens = [int(output.logits[0, -1].argmax())]
        margins = margins_of(output.logits[0, -1:], sample.id, 0)
        accepted: list[int] = []
        while tokens[-1] not in target.eos_token_ids and len(tokens) <= max_new_tokens:
            proposal = propose(target, draft, context, tokens[-1], use)
            block = [tokens[-1], *proposal]
            if by_token:
                logits_KV, features_KF = _verify_by_token(target, cache, captured, block)
            else:
                before = save(cache)
                logits_KV, features_KF = _extend(target, cache, block), captured.features()[0]
            choices = logits_KV.argmax(-1).tolist()
            count = matching_prefix(proposal, choices)
            accepted.append(count)
            margins += margins_of(logits_KV[: count + 1], sample.id, len(tokens))
            context.append(features_KF[: count + 1])
            if not by_token and count < len(proposal) and roll_back(cache, before, count + 1):
                _extend(target, cache, block[: count + 1])
            tokens += until_eos([*proposal[:count], choices[count]], target.eos_token_ids)
    tokens = tokens[: max_new_tokens + 1]
    return Decoded(tuple(tokens), accepted=tuple(accepted), margins=tuple(margins[: len(tokens)]))


@define
class DraftContext:
    """The keys and values of every draft layer for all tokens before the anchor.

    last_1F: the target's features of the last of them.
    """

    draft: DraftModel
    length: int = 0
    kv: list[tuple[Tensor, Tensor]] = field(factory=list)
    last_1F: Tensor | None = None

    def append(self, features_SF: Tensor) -> None:
        """Append the target's features of the next tokens."""
        positions_S = torch.arange(self.length, self.length + len(features_SF), device=features_SF.device)
        features_SF = features_SF.to(self.draft.fc.weight.dtype)
        new = self.draft.context_kv(features_SF, positions_S)
        if self.kv:
            self.kv = [
                (torch.cat([k, new_k], dim=-2), torch.cat([v, new_v], dim=-2))
                for (k, v), (new_k, new_v) in zip(self.kv, new, strict=True)
            ]
        else:
            self.kv = new
        self.length += len(features_SF)
        self.last_1F = features_SF[-1:]

    def around(self, target: Target) -> tuple[BlockContext, ...]:
        """The further arguments of `scores` for the next block: its surroundings, if the algorithm reads them."""
        if not isinstance(self.draft.config.algorithm, ReadsContext):
            return ()
        assert self.last_1F is not None
        last_1M = self.draft.context_feature(self.last_1F)
        is_there_1 = torch.ones(1, dtype=torch.bool, device=last_1M.device)
        return (BlockContext(target.embed_weight, last_1M, is_there_1),)


def propose(
    target: Target, draft: DraftModel, context: DraftContext, anchor: int, use: DraftUse | None = None
) -> list[int]:
    """The draft's K - 1 greedy tokens after the anchor, chosen in order from one forward pass.

    Raises DataError where the scores are not finite.
    """
    use = use or DraftUse.of(draft.config)
    rows_2M = target.embed_weight[[anchor, use.mask_token_id]].to(draft.fc.weight.dtype)
    anchor_M, mask_M = draft.embedded(rows_2M)
    hidden_DM = draft.propose(anchor_M, mask_M, context.kv, use.block_size, use.block_offset)
    scores: Scores = part_of(draft.config.algorithm, "reference:scores")
    given, around = (draft.config, draft.state_dict(), hidden_DM, target.head_weight), context.around(target)
    tokens, best = [anchor], []
    for _ in range(len(hidden_DM)):
        best_score, token = scores(*given, tokens, *around).max(-1)
        tokens.append(int(token))
        best.append(best_score)
    best_D = torch.stack(best)
    check_finite(
        best_D[None], "draft", best_D.dtype, lambda _, column: f"slot {column + 1} behind {context.length} tokens"
    )
    return tokens[1:]


def margins_of(logits_SV: Tensor, sample_id: str, first: int) -> list[float]:
    """The distance of the two best logits of each row. first: the number of the row's first token in the answer.

    Raises DataError where it is not finite.
    """
    best_S2 = logits_SV.float().topk(2).values
    margins_S = best_S2[:, 0] - best_S2[:, 1]
    check_finite(
        margins_S[None],
        "target",
        logits_SV.dtype,
        lambda _, column: f"sample {sample_id}, token {first + column} of the answer",
    )
    return margins_S.tolist()


def matching_prefix(proposal: list[int], choices: list[int]) -> int:
    """The number of leading proposals that equal the target's choices."""
    for count, (proposed, chosen) in enumerate(zip(proposal, choices, strict=False)):
        if proposed != chosen:
            return count
    return len(proposal)


def until_eos(tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """The tokens up to and including the first EOS."""
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return tokens[: index + 1]
    return tokens


def _extend(target: Target, cache: DynamicCache, tokens: list[int]) -> Tensor:
    """Logits [len(tokens), V] behind each token.

    A model with vision derives the positions from the cache and the prompt's rope deltas; some text models count from
    0 in every pass.
    """
    input_ids = torch.tensor([tokens], device=target.device)
    next_positions = cache.get_seq_length() + torch.arange(len(tokens), device=target.device)[None]
    given = {} if target.family.has_own_positions else {"position_ids": next_positions}
    return target.model(input_ids=input_ids, **given, past_key_values=cache, use_cache=True).logits[0]


def _verify_by_token(
    target: Target, cache: DynamicCache, captured: LayerInputs, block: list[int]
) -> tuple[Tensor, Tensor]:
    """Logits and features of a block, up to the first token behind which the target chooses another than proposed."""
    logits, features = [], []
    for place, token in enumerate(block):
        logits.append(_extend(target, cache, [token]))
        features.append(captured.features()[0])
        if block[place + 1 : place + 2] != [int(logits[-1].argmax())]:
            break
    return torch.cat(logits), torch.cat(features)


def check_finite(values_BK: Tensor, model: str, dtype: torch.dtype, place: Callable[[int, int], str]) -> None:
    """Check that values which decide about a token are finite. Raises DataError.

    model: "target" or "draft". place(row, column): where a value is, in words.
    """
    wrong = (~values_BK.isfinite()).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        named = str(dtype).removeprefix("torch.")
        raise DataError(
            f"{place(row, column)}: the {model}'s logits are not finite numbers in {named}, so no token can be chosen "
            "by them. Decode in float32 (float16 overflows above 65504): where they are not finite there either, the "
            f"{model}'s weights are damaged"
        )
