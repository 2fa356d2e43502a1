"""The tensors of anybody's draft under the names of the serving contract; those that do not belong there are refused.

V vocabulary, M hidden size, L target layers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import pad

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.rope import rope_frequencies
from ops.lib.drafts.backbone.sizes import expected_shapes
from ops.lib.target.embedding_and_head import tensor_files
from ops.lib.target.model import target_info
from ops.lib.target.stored_weights import StoredTensor
from ops.load_draft.headers import (
    CONFIDENCE,
    DTYPES,
    EMBED,
    NOT_THE_TARGETS,
    W1,
    W2,
    DraftFiles,
    read_headers,
    unfit_weights,
)
from ops.load_draft.read_config import ReadDraft

FC = "fc.weight"
ROWS = 16384  # of an embedding that are compared at a time


@frozen(kw_only=True)
class DraftTensors:
    """The tensors of an imported draft.

    by_name: under the serving contract's names. dtype: as config.json names it. notes: on tensors that were left out.
    """

    by_name: Mapping[str, Tensor]
    dtype: str
    notes: tuple[str, ...]


def read_tensors(directory: Path, draft: ReadDraft, target: TargetModel) -> DraftTensors:
    """Read the weights of a directory, for the config that was read from it.

    `draft_folder_mistakes` has already checked the directory. Raises DataError with all tensors that are missing, have
    another shape, or would be left out although they change the draft.
    """
    files = read_headers(directory, draft)
    if not files.mistakes:
        files.mistakes += [*_other_ends(files, target), *_other_frequencies(files, draft.config)]
    if files.mistakes:
        raise DataError(unfit_weights(directory, files.mistakes))
    notes = [f"{name}: equals the target's, and is left out" for name in files.ends]
    notes += [f"{name}: of the target, and left out; only speculators' training uses it" for name in files.verifier]
    notes += [f"{name}: equals what the config gives, and is left out" for name in files.frequencies]
    dtypes = {stored.dtype for stored in files.own.values()}
    dtype = DTYPES[dtypes.pop() if len(dtypes) == 1 else "F32"]
    if dtypes:
        notes.append("weights: of several dtypes, all kept as float32")
    tensors = {name: _read(stored).to(getattr(torch, dtype)) for name, stored in files.own.items()}
    tensors[FC] = _reordered(tensors[FC], draft.layer_order)
    _complete(tensors, draft)
    return DraftTensors(by_name=tensors, dtype=dtype, notes=tuple(notes))


def _read(stored: StoredTensor) -> Tensor:
    with safe_open(stored.file, framework="pt") as tensors:
        return tensors.get_tensor(stored.name)


def _reordered(fc: Tensor, layer_order: Sequence[int]) -> Tensor:
    """The tensor fc.weight [M, L * M] with its columns in another order of the layers."""
    return fc.unflatten(1, (len(layer_order), -1))[:, list(layer_order)].flatten(1).contiguous()


def _complete(tensors: dict[str, Tensor], draft: ReadDraft) -> None:
    """Add the tensors that DSpark requires and the draft lacks, with values that change nothing.

    Without a Markov head only w2 is zero: with w1 zero too, neither would get a gradient in a training.
    """
    shapes, dtype = expected_shapes(to_serving(draft.config)), tensors[FC].dtype
    if not draft.has_bias:
        tensors |= {W1: torch.ones(shapes[W1], dtype=dtype), W2: torch.zeros(shapes[W2], dtype=dtype)}
    if not draft.confidence_reads_token and CONFIDENCE in tensors:
        missing = shapes[CONFIDENCE][1] - tensors[CONFIDENCE].shape[1]
        tensors[CONFIDENCE] = pad(tensors[CONFIDENCE], (0, missing))


def _other_ends(files: DraftFiles, target: TargetModel) -> Iterator[str]:
    """Mistakes for an embedding or a head that is not the target's."""
    info, of_target = target_info(target), tensor_files(target.path / "model")
    for name, stored in files.ends.items():
        key = info["embed_key"] if name == EMBED else info["lm_head_key"]
        if not _is_same(stored, of_target[key], key):
            yield f"{name}: {NOT_THE_TARGETS}"


def _other_frequencies(files: DraftFiles, config: DraftConfig) -> Iterator[str]:
    for name, stored in files.frequencies.items():
        frequencies, _ = rope_frequencies(config)
        found = _read(stored)
        rounding = 4 * torch.finfo(found.dtype).eps
        if found.shape != frequencies.shape or not torch.allclose(found.float(), frequencies, rtol=rounding, atol=0):
            yield f"{name}: differs from the rotary frequencies that config.json gives"


def _is_same(stored: StoredTensor, file: Path, key: str) -> bool:
    """Whether two tensors [V, M] are equal, at least after rounding one to the other's dtype."""
    with safe_open(stored.file, framework="pt") as draft, safe_open(file, framework="pt") as target:
        ours, theirs = draft.get_slice(stored.name), target.get_slice(key)
        if ours.get_shape() != theirs.get_shape():
            return False
        for start in range(0, ours.get_shape()[0], ROWS):
            a, b = ours[start : start + ROWS], theirs[start : start + ROWS]
            if not (torch.equal(a, b.to(a.dtype)) or torch.equal(a.to(b.dtype), b)):
                return False
    return True
