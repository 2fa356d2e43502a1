"""Token shards on disk: the writer of one shard, and a reader that maps shards into memory.

Legend: N samples, T tokens, R pixel rows, I images, S tokens of one sample.

Qwen's images are pixel rows and grids. The tensors of any other processor keep their names and shapes: a shard has the
values of each as "seen.NAME", flat and joined, with their shapes [N, dimensions] as "shape.NAME", zeros for samples
without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from attrs import define, evolve, field, frozen
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TokenShards
from ops.lib.data.files import artifact_file, read_json, read_jsonl

SEEN, SHAPE = "seen.", "shape."
KINDS = ("none", "reasoning", "text", "call", "end")  # of a token, by its number in a shard
KIND_TENSOR = "kinds"
IMAGE_TOKENS = "image_tokens"  # in TokenSample.seen, int64 [I]: how many tokens each image takes
OFFSETS = {
    "input_ids": "token_offsets",
    "loss_mask": "token_offsets",
    KIND_TENSOR: "token_offsets",
    "pixel_values": "pixel_offsets",
    "image_grid_thw": "image_offsets",
}


@frozen(eq=False)
class TokenSample:
    """One tokenised sample; R pixel rows and I images are 0 for text only.

    input_ids int64 [S]; loss_mask bool [S]; pixel_values float32 [R, patch_dim]; image_grid_thw int64 [I, 3];
    prompt_tokens: length of the prompt to answer, including the generation prompt. seen: of images of a target that is
    not Qwen's, what its processor makes for a batch of this sample, by name; empty for text only.

    Where answers stand in contexts of a server: answers: the first token of each that can be asked, the last one's at
    prompt_tokens, and the answers of the conversation before it; kinds uint8 [S]: places in KINDS, 0 where nothing is
    learnt, None without an answer.
    """

    id: str
    category: str
    input_ids: Tensor
    loss_mask: Tensor
    pixel_values: Tensor
    image_grid_thw: Tensor
    prompt_tokens: int
    seen: Mapping[str, Tensor] = field(factory=dict)
    answers: tuple[tuple[int, int], ...] = ()
    kinds: Tensor | None = None

    @property
    def has_images(self) -> bool:
        return bool(len(self.image_grid_thw) or self.seen)

    @property
    def image_bytes(self) -> int:
        """The bytes of what the target gets of the images."""
        return self.pixel_values.nbytes + sum(tensor.nbytes for tensor in self.seen.values())

    def prompt(self) -> TokenSample:
        """The sample without its last answer."""
        end = self.prompt_tokens
        kinds = None if self.kinds is None else self.kinds[:end]
        return evolve(self, input_ids=self.input_ids[:end], loss_mask=self.loss_mask[:end], kinds=kinds)


@define
class TokenReader:
    """The samples of a token artifact (optionally of one split), in shard order, read from memory-mapped files."""

    tokens: TokenShards
    split: str | None = None
    info: dict[str, Any] = field(init=False)
    records: list[dict[str, Any]] = field(init=False)
    _files: dict[Path, Any] = field(init=False, factory=dict)
    _offsets: dict[Path, dict[str, Tensor]] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.info = read_json(self.tokens.path / "tokens.json")
        rows = read_jsonl(self.tokens.path / "samples.jsonl")
        self.records = [row for row in rows if self.split in (None, row["split"])]

    def __len__(self) -> int:
        return len(self.records)

    def sample(self, index: int) -> TokenSample:
        """The index-th sample; only its own rows are read."""
        record = self.records[index]
        tensors, offsets = self._shard(artifact_file(self.tokens.path, record["shard"]))
        named = {name: record[name] for name in ("id", "category", "prompt_tokens")}
        return stored_sample(tensors, offsets, record["row"], **named, answers=record.get("answers", ()))

    def labels(self, index: int) -> tuple[Tensor, Tensor]:
        """input_ids int64 [S] and loss_mask bool [S] of a sample, without reading its images."""
        record = self.records[index]
        parts = _stored_parts(
            *self._shard(artifact_file(self.tokens.path, record["shard"])), record["row"], ("input_ids", "loss_mask")
        )
        return parts["input_ids"].to(torch.int64), parts["loss_mask"].to(torch.bool)

    def kinds(self, index: int) -> Tensor | None:
        """The kinds of a sample's tokens, uint8 [S], as in TokenSample."""
        record = self.records[index]
        shard = self._shard(artifact_file(self.tokens.path, record["shard"]))
        return _stored_parts(*shard, record["row"], (KIND_TENSOR,)).get(KIND_TENSOR)

    def image_tokens(self, index: int) -> list[int]:
        """How many tokens each image of a sample takes, without reading its pixels."""
        record = self.records[index]
        tensors, offsets = self._shard(artifact_file(self.tokens.path, record["shard"]))
        seen = _stored_seen(tensors, offsets, record["row"], (IMAGE_TOKENS,))
        if seen:
            return list(map(int, seen[IMAGE_TOKENS]))
        grids = _stored_parts(tensors, offsets, record["row"], ("image_grid_thw",))["image_grid_thw"].tolist()
        return [prod(grid) // self.info["merge_size"] ** 2 for grid in grids]

    def _shard(self, shard: Path) -> tuple[Any, dict[str, Tensor]]:
        """An open shard and its offsets, opened on first use."""
        if shard not in self._files:
            self._files[shard] = safe_open(shard, framework="pt")
            self._offsets[shard] = stored_offsets(self._files[shard])
        return self._files[shard], self._offsets[shard]


def stored_offsets(tensors: Any) -> dict[str, Tensor]:
    """The offsets [N + 1] of an open shard, by name, and the shapes [N, dimensions] of what other processors made."""
    shapes = [name for name in tensors.keys() if name.startswith(SHAPE)]  # noqa: SIM118  an open file is no mapping
    return {name: tensors.get_tensor(name) for name in (*set(OFFSETS.values()), *shapes)}


def stored_sample(
    tensors: Any,
    offsets: Mapping[str, Tensor],
    row: int,
    *,
    id: str,
    category: str,
    prompt_tokens: int,
    answers: Iterable[Sequence[int]] = (),
) -> TokenSample:
    """The row-th sample of an open shard."""
    parts = _stored_parts(tensors, offsets, row, OFFSETS)
    return TokenSample(
        id=id,
        category=category,
        input_ids=parts["input_ids"].to(torch.int64),
        loss_mask=parts["loss_mask"].to(torch.bool),
        pixel_values=parts["pixel_values"],
        image_grid_thw=parts["image_grid_thw"],
        prompt_tokens=prompt_tokens,
        seen=_stored_seen(tensors, offsets, row, [name.removeprefix(SHAPE) for name in offsets]),
        answers=tuple((start, turn) for start, turn in answers),
        kinds=parts.get(KIND_TENSOR),
    )


def _stored_seen(tensors: Any, offsets: Mapping[str, Tensor], row: int, names: Iterable[str]) -> dict[str, Tensor]:
    """Those of the named tensors that the row-th sample's images have."""
    found = {}
    for name in sorted(name for name in names if SHAPE + name in offsets):
        sizes_N = offsets[SHAPE + name].prod(dim=1)
        start, size = int(sizes_N[:row].sum()), int(sizes_N[row])
        if size:
            values = tensors.get_slice(SEEN + name)[start : start + size]
            found[name] = values.reshape(offsets[SHAPE + name][row].tolist())
    return found


def _stored_parts(tensors: Any, offsets: Mapping[str, Tensor], row: int, names: Iterable[str]) -> dict[str, Tensor]:
    parts, stored = {}, set(tensors.keys())
    for name in stored.intersection(names):
        start, end = offsets[OFFSETS[name]][row : row + 2].tolist()
        parts[name] = tensors.get_slice(name)[start:end]
    return parts


def write_token_shard(
    file: Path, samples: Sequence[TokenSample], patch_dim: int, metadata: dict[str, str] | None = None
) -> None:
    """Write samples to a shard file, joined along their first dimension, with offsets [N + 1] of tokens, pixel rows and
    images, and with the tensors that other processors than Qwen's made.

    Raises DataError for one that has other numbers of dimensions, or dtypes, in two samples.
    """
    empty = {
        "input_ids": torch.empty(0, dtype=torch.int64),
        "loss_mask": torch.empty(0, dtype=torch.bool),
        "pixel_values": torch.empty(0, patch_dim),
        "image_grid_thw": torch.empty(0, 3, dtype=torch.int64),
    }
    tensors = {
        "input_ids": torch.cat([empty["input_ids"], *(sample.input_ids for sample in samples)]).to(torch.int32),
        "loss_mask": torch.cat([empty["loss_mask"], *(sample.loss_mask for sample in samples)]).to(torch.uint8),
        "pixel_values": torch.cat([empty["pixel_values"], *(sample.pixel_values for sample in samples)]),
        "image_grid_thw": torch.cat([empty["image_grid_thw"], *(sample.image_grid_thw for sample in samples)]),
        "token_offsets": _ends([len(sample.input_ids) for sample in samples]),
        "pixel_offsets": _ends([len(sample.pixel_values) for sample in samples]),
        "image_offsets": _ends([len(sample.image_grid_thw) for sample in samples]),
    }
    kinds = [sample.kinds for sample in samples if sample.kinds is not None]
    if len(kinds) not in (0, len(samples)):
        raise ValueError("only some samples of a shard have kinds")
    if kinds:
        tensors[KIND_TENSOR] = torch.cat(kinds)
    save_file(tensors | _joined_seen(samples), file, metadata)


def _joined_seen(samples: Sequence[TokenSample]) -> dict[str, Tensor]:
    """The tensors of all samples' images, flat, and their shapes."""
    joined = {}
    for name in sorted({name for sample in samples for name in sample.seen}):
        parts = [sample.seen[name] for sample in samples if name in sample.seen]
        kinds = {(part.ndim, part.dtype) for part in parts}
        if len(kinds) > 1:
            raise DataError(f"the processor makes {name} of {len(kinds)} kinds (dimensions, dtype): {kinds}")
        absent = [0] * parts[0].ndim
        shapes = [list(sample.seen[name].shape) if name in sample.seen else absent for sample in samples]
        joined[SEEN + name] = torch.cat([part.reshape(-1) for part in parts])
        joined[SHAPE + name] = torch.tensor(shapes, dtype=torch.int64)
    return joined


def _ends(lengths: list[int]) -> Tensor:
    """The row bounds: 0 and the running sums of the lengths, int64 [N + 1]."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
