"""Which way of verification is right for a target, tried on its own cache.

The answer follows from what the cache holds, not from the model's name. A target whose layers of attention all see the
whole past verifies batches. Of every other target two short texts are decoded token by token, and then verified in
blocks that are accepted in part, in each way from the fastest: the first in which layers compute the same is right.
What layers add to their input is compared, in the first layer of each kind: further on, rounding grows, and may send
tokens to other experts.

A window is shorter than these texts while they are tried: models read its size from their config at every pass, and so
does `windows_of`. A model that takes it from elsewhere differs from its own decoding in batches, and is verified one
prompt at a time.

    L layers that are compared, P places of a text, M hidden size
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import PretrainedConfig

from dsl.errors import DataError
from ops.lib.data.token_shards import TokenSample
from ops.lib.target.cache import (
    Rows,
    attention_of,
    decoder_config,
    keeps_all_columns,
    own_cache,
    whole_cache,
    windows_of,
)
from ops.lib.target.model import Target
from ops.lib.target.no_memory import lacks_memory
from ops.lib.target.prefill import prefill
from ops.lib.target.verify import Verification, verifier_of

BLOCK = 4
WINDOW = 4
# What a model raises that does not take a cache, or does not continue it by a block.
CACHE_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)

_FOUND: WeakKeyDictionary[nn.Module, Verification] = WeakKeyDictionary()


@frozen(eq=False)
class _Text:
    """A prompt and the tokens of its answer. kept: how many of them each block brings."""

    prompt: list[int]
    answer: list[int]
    kept: tuple[int, ...]

    def block(self, place: int) -> list[int]:
        """The tokens of one block: those to accept, and others behind them."""
        start = sum(self.kept[:place])
        return (self.answer[start : start + self.kept[place]] + self.prompt)[:BLOCK]


def verification_of(target: Target) -> Verification:
    """The fastest way of verification that is right for a target; tried once for each loaded model.

    Raises DataError with the reason if there is none.
    """
    if target.model not in _FOUND:
        _FOUND[target.model] = _find(target)
    return _FOUND[target.model]


@torch.inference_mode()
def _find(target: Target) -> Verification:
    config = decoder_config(target)
    known_masks = attention_of(target) in ("sdpa", "eager") and windows_of(config) is not None
    batches = known_masks and keeps_all_columns(whole_cache(target))
    if batches and getattr(config, "sliding_window", None) is None:
        return Verification.BATCH
    texts, layers = _texts(target), _first_of_kinds(target)
    with _short_window(config):
        try:
            expected = [_token_by_token(target, layers, text) for text in texts]
        except CACHE_ERRORS as error:
            if lacks_memory(error):
                raise
            raise _refused(target, f"it cannot continue a DynamicCache ({type(error).__name__}: {error})") from error
        for way in Verification:
            if way is Verification.BATCH and not batches:
                continue
            try:
                found = _in_blocks(target, layers, way, texts)
            except CACHE_ERRORS as error:
                if lacks_memory(error):
                    raise
                continue  # the next way asks less of the cache
            if all(map(_agree, texts, found, expected)):
                return way
    raise _refused(target, "its cache cannot be put back to where it was before a verification")


def _refused(target: Target, reason: str) -> DataError:
    return DataError(
        f"a {target.model.config.model_type} target cannot verify a draft: {reason}. Its features can be captured and "
        "drafts trained on them, but not evaluated"
    )


@contextmanager
def _short_window(config: PretrainedConfig) -> Iterator[None]:
    """Opens a context in which the layers with a window see WINDOW tokens."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        yield
        return
    config.sliding_window = WINDOW
    try:
        yield
    finally:
        config.sliding_window = window


def _texts(target: Target) -> list[_Text]:
    """Two texts of ordinary tokens from all over the vocabulary."""
    ordinary = ordinary_tokens(target)
    tokens = [ordinary[place * len(ordinary) // 31] for place in range(31)]
    return [_Text(tokens[:5], tokens[5:14], (2, 3, BLOCK)), _Text(tokens[14:22], tokens[22:31], (BLOCK, 2, 3))]


def ordinary_tokens(target: Target) -> list[int]:
    """The ids of the target's vocabulary that its config does not name, such as an EOS."""
    config = target.model.config.to_dict()
    named = [*config.items(), *(config.get("text_config") or {}).items()]
    values = (value for name, value in named if name.endswith(("_token_id", "_token_index")))
    special = {number for value in values for number in (value if isinstance(value, list) else [value])}
    return [token for token in range(len(target.embed_weight)) if token not in special]


def sample_of(ids: Sequence[int]) -> TokenSample:
    """A sample of text that is all prompt."""
    no_answer, no_images = torch.zeros(len(ids), dtype=torch.bool), torch.empty(0, 3, dtype=torch.int64)
    return TokenSample("trial", "text", torch.tensor(ids), no_answer, torch.empty(0, 0), no_images, len(ids))


def _first_of_kinds(target: Target) -> list[int]:
    """The first layer of each kind, as the config names it and the cache has it."""
    caches, count = own_cache(target).layers, len(target.decoder_layers)
    names = getattr(decoder_config(target), "layer_types", None) or [""] * count
    kinds: dict[tuple[str, type | None], int] = {}
    for index in range(count):
        kinds.setdefault((names[index], type(caches[index]) if index < len(caches) else None), index)
    return list(kinds.values())


@contextmanager
def _changes(target: Target, layers: Sequence[int]) -> Iterator[list[Tensor]]:
    """Opens a context in which every forward pass appends what these layers add to their input, each [B, S, M]."""
    changes: list[Tensor] = []

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        changes.append((output[0] if isinstance(output, tuple) else output) - before)

    handles = [target.decoder_layers[index].register_forward_hook(record, with_kwargs=True) for index in layers]
    try:
        yield changes
    finally:
        for handle in handles:
            handle.remove()


def _joined(changes: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """The changes of one or more passes, [L, B, S, M]."""
    return torch.stack([torch.cat(changes[place :: len(layers)], dim=1) for place in range(len(layers))])


def _token_by_token(target: Target, layers: Sequence[int], text: _Text) -> Tensor:
    """What the layers add for each token of the answer, [L, P, M], in plain decoding."""
    cache = own_cache(target)
    begun = prefill(target, target.prompts([sample_of(text.prompt)]), cache)
    with _changes(target, layers) as changes:
        for place, token in enumerate(text.answer, start=len(text.prompt)):
            target.model(
                input_ids=torch.tensor([[token]], device=target.device),
                position_ids=begun.offset_B[:, None] + place,
                past_key_values=cache,
                use_cache=True,
            )
        return _joined(changes, layers)[:, 0]


def _in_blocks(target: Target, layers: Sequence[int], way: Verification, texts: list[_Text]) -> list[Tensor]:
    """What the layers add for each token of the answers, one [L, P, M] per text, in blocks accepted in part."""
    if way is Verification.BATCH:
        return _verified(target, layers, way, texts)
    return [found for text in texts for found in _verified(target, layers, way, [text])]


def _verified(target: Target, layers: Sequence[int], way: Verification, texts: Sequence[_Text]) -> list[Tensor]:
    found: list[list[Tensor]] = [[] for _ in texts]
    begun = prefill(target, target.prompts([sample_of(text.prompt) for text in texts]), whole_cache(target))
    rows = Rows.of(begun.mask_BS)
    with target.capture_inputs((0,)) as captured, _changes(target, layers) as changes:
        verifier = verifier_of(way, target, captured, begun, rows, room=len(texts[0].answer) + BLOCK)
        for place in range(len(texts[0].kept)):
            block_BK = torch.tensor([text.block(place) for text in texts], device=target.device)
            kept = [text.kept[place] for text in texts]
            changes.clear()
            verifier.verify(block_BK)
            for row, (parts, count) in enumerate(zip(found, kept, strict=True)):
                parts.append(_joined(changes, layers)[:, row, :count])
            kept_B = torch.tensor(kept, device=target.device)
            verifier.settle(block_BK, kept_B)
            rows.advance(kept_B)
    return [torch.cat(parts, dim=1) for parts in found]


def _agree(text: _Text, found_LPM: Tensor, expected_LPM: Tensor) -> bool:
    """Whether each layer adds the same to the tokens of each block, but for rounding.

    Medians are compared, since a few elements of hidden states are very large, and so is their rounding. Parts of a
    model compute in float32 whatever its dtype.
    """
    allowed = max(torch.finfo(found_LPM.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
    kept = list(text.kept)
    return all(
        bool((found - expected).abs().median() <= allowed * expected.abs().median())
        for found_PM, expected_PM in zip(found_LPM, expected_LPM, strict=True)
        for found, expected in zip(found_PM.split(kept), expected_PM.split(kept), strict=True)
    )
