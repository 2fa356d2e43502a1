"""The names of a target's embedding and lm_head among the tensors of its files. Loads no torch.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.lib.target.stored_weights import StoredTensor
from ops.lib.vision.model_types import MTP, VISUAL, is_tied

EMBED_ENDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")
HEAD_ENDINGS = ("lm_head.weight",)


@frozen
class Ends:
    """Tensor names of the embedding and the head in the checkpoint's files; equal if they are tied."""

    embed_key: str
    lm_head_key: str


class UnknownEnd(DataError):
    """A tensor that is not found, and the field of load_target that names it."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def find_ends(
    directory: Path,
    config: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    embed_key: str | None = None,
    lm_head_key: str | None = None,
) -> Ends:
    """Finds the tensors of shape [V, M], or checks the given ones. config: the content of a config.json with its sizes.

    A tied model's lm_head.weight, if its files hold one, is equal to the embedding (`weights_mistakes`). Raises
    UnknownEnd with the candidates if a key is missing, has another shape, or is ambiguous.
    """
    text = config.get("text_config") or config
    shape = (text["vocab_size"], text["hidden_size"])
    fitting = sorted(key for key, tensor in stored.items() if tensor.shape == shape and not _elsewhere(key))
    embed = _find("embed_key", embed_key, EMBED_ENDINGS, fitting, directory, shape)
    if not is_tied(config):
        others = [key for key in fitting if key != embed]
        return Ends(embed, _find("lm_head_key", lm_head_key, HEAD_ENDINGS, others, directory, shape))
    if lm_head_key not in (None, embed):
        raise UnknownEnd(
            f'{directory}: lm_head_key = "{lm_head_key}", but the config has tie_word_embeddings set, so the head is '
            f"{embed}",
            "lm_head_key",
        )
    return Ends(embed, embed)


def _find(
    field: str, given: str | None, endings: tuple[str, ...], fitting: Sequence[str], directory: Path, shape: tuple
) -> str:
    """The given key, or the only candidate with a known ending."""
    listed = f"the tensors of shape {list(shape)} are: {', '.join(fitting) or 'none'}"
    if given is not None:
        if given not in fitting:
            raise UnknownEnd(f'{directory}: {field} = "{given}" is not one of the candidates; {listed}', field)
        return given
    found = [key for key in fitting if key.endswith(endings)]
    if len(found) != 1:
        count = "none" if not found else f"{len(found)}"
        raise UnknownEnd(
            f"{directory}: {count} of the tensors end in {' or '.join(endings)}; {listed}; name one of them as {field}",
            field,
        )
    return found[0]


def _elsewhere(key: str) -> bool:
    return any(f".{part}" in f".{key}" for part in (MTP, VISUAL))
