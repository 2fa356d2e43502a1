"""The tensors of anybody's draft under the names of the serving contract; those that do not belong there are refused.

V vocabulary, M hidden size, L target layers
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from attrs import define, field, frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import pad

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.lib.data.files import read_object
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.rope import rope_frequencies
from ops.lib.drafts.backbone.serving_contract import expected_shapes
from ops.lib.drafts.backbone.stored_tensors import DTYPES
from ops.lib.target.checkpoint_files import INDEX, SINGLE
from ops.lib.target.ends import tensor_files
from ops.lib.target.model import target_info
from ops.load_draft.known_keys import TENSORS, UNQUANTISED
from ops.load_draft.read_config import ReadDraft

W1, W2, CONFIDENCE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"
PREFIXES = ("model.", "dflash_module.", "logit_head.")
SPELLINGS = {  # other names than those of the contract
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
    "markov_w1.weight": W1,
    "markov_w2.weight": W2,
    "confidence_proj.weight": CONFIDENCE,
    "confidence_proj.bias": "confidence_head.proj.bias",
}
EMBED, HEAD = "embed_tokens.weight", "lm_head.weight"
OF_VERIFIER = ("verifier_norm.weight", "verifier_lm_head.weight")  # speculators compute training targets with them
FREQUENCIES = "rotary_emb.inv_freq"
FC = "fc.weight"
ROWS = 16384  # of an embedding that are compared at a time
SHOWN = 8
BY_NAME = {stored: name for name, stored in DTYPES.items()}  # safetensors' name -> config.json's
FORBIDDEN = {
    "mask_embedding.pt": "replaces the target's embedding of the mask token in engines, and dflow has no such thing",
    "hf_quant_config.json": UNQUANTISED,
}


@frozen
class StoredTensor:
    """A tensor in a file: its name there, its shape, and safetensors' name of its dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    def read(self) -> Tensor:
        with safe_open(self.file, framework="pt") as tensors:
            return tensors.get_tensor(self.name)


@frozen(kw_only=True)
class DraftTensors:
    """by_name: the tensors of the contract. dtype: as config.json names it. notes: what of the files is left out."""

    by_name: Mapping[str, Tensor]
    dtype: str
    notes: tuple[str, ...]


def read_tensors(directory: Path, draft: ReadDraft, target: TargetModel) -> DraftTensors:
    """Reads the weights of a directory, checked by `draft_folder_mistakes`, for the config that was read of it.

    Raises DataError with everything that is missing, has another shape, or would be left out although it changes the
    draft.
    """
    finding = _Finding(draft, target)
    finding.mistakes += [f"{name}: {why}" for name, why in FORBIDDEN.items() if (directory / name).exists()]
    for name, stored in _stored(directory, finding.mistakes).items():
        finding.take(name, stored)
    finding.check_shapes()
    if finding.mistakes:
        listed = "\n".join(f"  {mistake}" for mistake in finding.mistakes)
        raise DataError(f"{directory}: these weights cannot be imported:\n{listed}")
    dtypes = {stored.dtype for stored in finding.own.values()}
    dtype = BY_NAME[dtypes.pop() if len(dtypes) == 1 else "F32"]
    if dtypes:
        finding.notes.append("weights: of several dtypes, all kept as float32")
    tensors = {name: stored.read().to(getattr(torch, dtype)) for name, stored in finding.own.items()}
    tensors[FC] = _reordered(tensors[FC], draft.layer_order)
    _complete(tensors, draft)
    return DraftTensors(by_name=tensors, dtype=dtype, notes=tuple(finding.notes))


def _reordered(fc: Tensor, layer_order: Sequence[int]) -> Tensor:
    """fc.weight [M, L * M] with its columns in another order of the layers."""
    return fc.unflatten(1, (len(layer_order), -1))[:, list(layer_order)].flatten(1).contiguous()


def _complete(tensors: dict[str, Tensor], draft: ReadDraft) -> None:
    """Adds what DSpark's contract has and the draft has not, with values that change nothing.

    Only w2 is zero where there is no Markov head: with w1 zero, too, a training would have no gradient of either.
    """
    shapes, dtype = expected_shapes(to_serving(draft.config)), tensors[FC].dtype
    if not draft.has_bias:
        tensors |= {W1: torch.ones(shapes[W1], dtype=dtype), W2: torch.zeros(shapes[W2], dtype=dtype)}
    if not draft.confidence_reads_token and CONFIDENCE in tensors:
        missing = shapes[CONFIDENCE][1] - tensors[CONFIDENCE].shape[1]
        tensors[CONFIDENCE] = pad(tensors[CONFIDENCE], (0, missing))


def _shapes_in_files(draft: ReadDraft) -> dict[str, tuple[int, ...]]:
    """The tensors of the contract that the files must have, before `_complete`."""
    shapes = dict(expected_shapes(to_serving(draft.config)))
    if not draft.has_bias:
        del shapes[W1], shapes[W2]
    if not draft.confidence_reads_token and CONFIDENCE in shapes:
        shapes[CONFIDENCE] = (1, draft.config.hidden_size)
    return shapes


def _stored(directory: Path, mistakes: list[str]) -> dict[str, StoredTensor]:
    """The tensors of the single file, or else of those that the index names, by their names in the contract."""
    found: dict[str, StoredTensor] = {}
    for file in _files(directory, mistakes):
        try:
            with safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
                entries = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
        except SafetensorError as error:
            mistakes.append(f"{file.name}: damaged ({error}); copy or download it again")
            continue
        for name, (shape, dtype) in entries.items():
            own = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
            own = SPELLINGS.get(own, own)
            if own in found:
                mistakes.append(f"{own}: is there twice, in {found[own].file.name} and in {file.name} as {name}")
            found[own] = StoredTensor(file, name, shape, dtype)
    return found


def _files(directory: Path, mistakes: list[str]) -> list[Path]:
    """The files of the weights; others of the same format would be left out, which is a mistake."""
    present = {file.name for file in directory.glob("*.safetensors")}
    if SINGLE in present:
        used = {SINGLE}
    else:
        used = {str(name) for name in read_object(directory / INDEX)["weight_map"].values()}
    outside = sorted(name for name in used if Path(name).name != name)
    mistakes += [f"{INDEX}: names {name}, which is no file of this directory" for name in outside]
    mistakes += [
        f"{name}: is not among the weights; remove it if the draft does not need it" for name in present - used
    ]
    return [directory / name for name in sorted(used - set(outside))]


@define
class _Finding:
    """The tensors found so far."""

    draft: ReadDraft
    target: TargetModel
    own: dict[str, StoredTensor] = field(factory=dict)
    notes: list[str] = field(factory=list)
    mistakes: list[str] = field(factory=list)
    expected: Mapping[str, tuple[int, ...]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.expected = _shapes_in_files(self.draft)

    def take(self, name: str, stored: StoredTensor) -> None:
        """A tensor of the contract, or one that can be left out; any other is a mistake."""
        if name in self.expected:
            self.own[name] = stored
        elif name in (EMBED, HEAD):
            self._take_end(name, stored)
        elif name in OF_VERIFIER:
            self.notes.append(f"{name}: of the target, and left out; only speculators' training uses it")
        elif name.endswith(FREQUENCIES) and stored.dtype in BY_NAME:
            self._take_frequencies(name, stored)
        else:
            why = next((why for part, why in TENSORS.items() if part in name), None)
            self.mistakes.append(f"{name}: {why or 'dflow does not know this tensor, which may change the draft'}")

    def _take_end(self, name: str, stored: StoredTensor) -> None:
        """An embedding or a head, which is left out if it is the target's."""
        info = target_info(self.target)
        key = info["embed_key"] if name == EMBED else info["lm_head_key"]
        file = tensor_files(self.target.path / "model")[key]
        if _is_same(stored, file, key):
            self.notes.append(f"{name}: equals the target's, and is left out")
        else:
            self.mistakes.append(
                f"{name}: is not the target's, and dflow's drafts use the target's; give the target that this draft "
                "was made for"
            )

    def _take_frequencies(self, name: str, stored: StoredTensor) -> None:
        frequencies, _ = rope_frequencies(self.draft.config)
        found = stored.read()
        rounding = 4 * torch.finfo(found.dtype).eps
        if found.shape == frequencies.shape and torch.allclose(found.float(), frequencies, rtol=rounding, atol=0):
            self.notes.append(f"{name}: equals what the config gives, and is left out")
        else:
            self.mistakes.append(f"{name}: differs from the rotary frequencies that config.json gives")

    def check_shapes(self) -> None:
        """What is missing, of another shape, or of a dtype that is no plain floating one."""
        missing = sorted(self.expected.keys() - self.own.keys())
        if missing:
            more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
            self.mistakes.append(f"missing: {', '.join(missing[:SHOWN])}{more}")
        self.mistakes += _shape_mistakes(self.own, self.expected)


def _shape_mistakes(own: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    for name, stored in sorted(own.items()):
        if stored.dtype not in BY_NAME:
            yield f"{name}: of dtype {stored.dtype}, and only {', '.join(sorted(BY_NAME))} are supported: {UNQUANTISED}"
        elif stored.shape != expected[name]:
            yield f"{name}: has the shape {list(stored.shape)}, and by config.json it is {list(expected[name])}"


def _is_same(stored: StoredTensor, file: Path, key: str) -> bool:
    """Whether two tensors of [V, M] are equal, if need be after one is rounded to the dtype of the other."""
    with safe_open(stored.file, framework="pt") as draft, safe_open(file, framework="pt") as target:
        ours, theirs = draft.get_slice(stored.name), target.get_slice(key)
        if ours.get_shape() != theirs.get_shape():
            return False
        for start in range(0, ours.get_shape()[0], ROWS):
            a, b = ours[start : start + ROWS], theirs[start : start + ROWS]
            if not (torch.equal(a, b.to(a.dtype)) or torch.equal(a.to(b.dtype), b)):
                return False
    return True
