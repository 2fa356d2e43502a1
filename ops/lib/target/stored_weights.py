"""What the tensors of a target's files say: quantised weights that no target may have, tensors that its model has no
place for, a head that its config.json denies, and the names of its embedding and head. Loads no torch, and of the
tensors only two that may be equal.

V vocabulary, M hidden size of the target
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.errors import DataError
from ops.lib.target.quantised import (
    LAST_NAMES,
    METHODS,
    UNQUANTISED,
    UNQUANTISED_ONE,
    method_mistake,
    method_of,
    quantises,
    signs_of,
)
from ops.lib.vision.family_config import MTP, QWEN, VISUAL, is_tied, text_part

PARTS = ("embed_tokens", "layers", "norm", "lm_head", "visual")
BEFORE = re.compile(r"^(model\.|language_model\.)+")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
LAYERS = "layers."
CHUNK = 1 << 22  # bytes read at once
SHOWN = 3  # names in a message


@frozen
class StoredTensor:
    """A tensor in a file: its name there, shape, safetensors' name of the dtype, and the file's bytes that it takes."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


def weights_mistakes(directory: Path, config: Mapping[str, Any], stored: Mapping[str, StoredTensor]) -> list[str]:
    """Sentences on mistakes in a checkpoint's weights. config: content of config.json.

    stored: the tensors that would be loaded, by name.
    """
    mistakes = []
    if method_of(config):
        if mistake := method_mistake(config, stored):
            mistakes.append(f"{directory}: {mistake}")
    elif signs := signs_of(directory, config, stored):
        mistakes.append(
            f"{directory}: quantised weights ({listed(signs)}), and of those only {', '.join(METHODS)} are taken, as "
            f"quant_method of quantization_config in config.json; {UNQUANTISED_ONE}"
        )
    if config.get("auto_map"):
        return mistakes
    if config.get("model_type") in QWEN:
        unexpected = [name for name in sorted(stored) if not quantises(name, stored) and _is_unexpected(name, config)]
        if unexpected:
            mistakes.append(unexpected_tensors(directory, unexpected))
    return mistakes + _head_mistakes(directory, is_tied(config), stored)


def unexpected_tensors(directory: Path, names: list[str]) -> str:
    """The message for tensors that have no place in the model, which would silently be ignored."""
    return (
        f"{directory}: the files hold tensors that the model of config.json does not have: {listed(names)}; use the "
        "config.json that belongs to these files, or remove them"
    )


def is_of_model(name: str) -> bool:
    """Whether a tensor belongs to a part of the model that takes part in the computation."""
    return BEFORE.sub("", name).partition(".")[0] in PARTS


def _is_unexpected(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor's name alone shows that the model has no place for it; transformers finds others
    while loading.
    """
    if not is_of_model(name):
        return False
    text = config.get("text_config")
    depth = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    layer = re.match(r"layers\.(\d+)\.", BEFORE.sub("", name))
    beyond = layer is not None and isinstance(depth, int) and int(layer[1]) >= depth
    return beyond or name.rpartition(".")[2] not in LAST_NAMES


def _head_mistakes(directory: Path, tied: bool, stored: Mapping[str, StoredTensor]) -> list[str]:
    """Mistakes about the head: a config that ties it to the embedding while the files hold another head, or the
    reverse.

    In the first case transformers would use the files' head, and SGLang would not.
    """
    embedding, head = ({key: each for key, each in stored.items() if _is(key, end)} for end in (EMBEDDING, HEAD))
    if not tied and embedding and not head:
        return [
            f"{directory}: none of the tensors end in {HEAD}, and config.json does not set tie_word_embeddings; set it "
            "to true if the embedding is the head, or add the missing file"
        ]
    if not tied or len(embedding) != 1:
        return []
    other = [key for key, each in head.items() if not _equal(each, next(iter(embedding.values())))]
    return [
        f"{directory}: config.json sets tie_word_embeddings, but {key} differs from {next(iter(embedding))}; set "
        f"tie_word_embeddings = false if {key} is the head, or remove that tensor"
        for key in other
    ]


def _is(key: str, end: str) -> bool:
    return BEFORE.sub("", key) == end


def _equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether the tensors have the same bytes; reads up to the first difference."""
    size = first.end - first.start
    if (first.shape, first.dtype, size) != (second.shape, second.dtype, second.end - second.start):
        return False
    with first.file.open("rb") as one, second.file.open("rb") as other:
        one.seek(first.start)
        other.seek(second.start)
        for done in range(0, size, CHUNK):
            count = min(CHUNK, size - done)
            if one.read(count) != other.read(count):
                return False
    return True


def listed(names: list[str]) -> str:
    """The first names as text, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


EMBED_ENDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")
HEAD_ENDINGS = ("lm_head.weight", "embed_out.weight")
BIAS_ENDINGS = ("lm_head.bias", "embed_out.bias")


@frozen
class Ends:
    """Tensor names of the embedding and the head in the checkpoint's files; equal if they are tied."""

    embed_key: str
    lm_head_key: str


class UnknownEnd(DataError):
    """A tensor that is not found. field: the field of load_target that names it."""

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
    """Find the embedding and head, tensors of shape [V, M], or check the given keys. config: a config.json with its
    sizes.

    A tied model's lm_head.weight, if its files hold one, equals the embedding (`weights_mistakes`). Raises UnknownEnd
    with the candidates if a key is missing, has another shape, or is ambiguous.
    """
    text = text_part(config)
    shape = (text["vocab_size"], text["hidden_size"])
    fitting = sorted(
        key
        for key, tensor in stored.items()
        if tensor.shape == shape and tensor.dtype in UNQUANTISED and not _elsewhere(key)
    )
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


def head_bias(directory: Path, names: Iterable[str], ends: Ends, expected: bool) -> str | None:
    """The name of the head's bias; None without one. names: of the stored tensors. expected: whether config.json has
    it. Raises DataError where the files say another thing.
    """
    beside = ends.lm_head_key.removesuffix("weight") + "bias"
    found = sorted(name for name in names if name == beside or name.endswith(BIAS_ENDINGS))
    if expected and len(found) != 1:
        count = f"{len(found)} tensors ({', '.join(found)})" if found else "no tensor"
        raise DataError(f"{directory}: the head of this model has a bias, and {count} can be it; copy the files again")
    if found and not expected:
        raise DataError(
            f"{directory}: the files hold {found[0]}, a bias of the head that dflow does not know of this model type"
        )
    return found[0] if found else None


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
    """Whether a tensor is in a layer, as the copies of both ends that some layers for several tokens have."""
    return any(f".{part}" in f".{key}" for part in (MTP, VISUAL, LAYERS))
