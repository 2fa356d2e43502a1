"""How a draft is used when it decodes: the settings of training, unless they are changed to see what that does."""

from __future__ import annotations

from attrs import frozen

from dsl.errors import ConfigError
from ops.lib.drafts.backbone.config import DraftConfig


@frozen(kw_only=True)
class DraftUse:
    """The way a draft is used while decoding.

    target_layer_ids: the layers whose outputs are its context. mask_token_id: the token of the slots after the anchor.
    block_size: slots of a block, including the anchor's. block_offset: shift of the block's positions against the
    context; 0 is right.
    """

    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    block_offset: int = 0

    @classmethod
    def of(cls, draft: DraftConfig, block_size: int | None = None) -> DraftUse:
        """The use that the draft was trained for, or one with smaller blocks. Raises ConfigError for larger blocks."""
        size = draft.block_size if block_size is None else block_size
        if mistake := block_size_mistake(draft, size):
            raise ConfigError(mistake)
        return cls(target_layer_ids=tuple(draft.target_layer_ids), mask_token_id=draft.mask_token_id, block_size=size)


@frozen
class ChainUse:
    """The way a head is used that proposes token by token. block_size: slots of a block, including the anchor's: one
    more than the num_speculative_tokens of vLLM and the speculative_num_steps of SGLang, whose usual value is 3.
    """

    block_size: int = 4


def block_size_mistake(draft: DraftConfig, size: int, field: str = "block_size") -> str:
    """A text on why a draft cannot decode in blocks of this size; empty if it can. field: the name of the setting."""
    if 2 <= size <= draft.block_size:
        return ""
    return f"{field}: must lie in 2..{draft.block_size}, which is the draft's in training, got {size}"
