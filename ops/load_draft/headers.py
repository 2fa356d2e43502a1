"""The tensors of anybody's draft by the headers of its files: what can be imported of them. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

from dsl.errors import DataError
from ops.lib.data.files import read_object
from ops.lib.drafts.backbone.config import table_of, to_serving
from ops.lib.drafts.backbone.contract import DTYPES as STORED_DTYPES
from ops.lib.drafts.backbone.sizes import expected_shapes
from ops.lib.drafts.lilicorr.config import contract_name
from ops.lib.target.checkpoint_check import tensor_headers
from ops.lib.target.checkpoint_files import INDEX, SINGLE
from ops.lib.target.stored_weights import StoredTensor
from ops.load_draft.publishers import OF_DFLOW
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
NOT_THE_TARGETS = (
    "is not the target's, and dflow's drafts use the target's; give the target that this draft was made for"
)
DTYPES = {stored: name for name, stored in STORED_DTYPES.items()}
SHOWN = 8
# Files that change a draft: another embedding of the mask token, and quantised weights.
FORBIDDEN = ("mask_embedding.pt", "hf_quant_config.json")


@define
class DraftFiles:
    """The tensors of an imported draft, without a common prefix.

    own: those of the serving contract. ends: an embedding or a head. verifier, frequencies: left out if they change
    nothing. mistakes: all reasons in the headers against an import.
    """

    own: dict[str, StoredTensor] = field(factory=dict)
    ends: dict[str, StoredTensor] = field(factory=dict)
    verifier: dict[str, StoredTensor] = field(factory=dict)
    frequencies: dict[str, StoredTensor] = field(factory=dict)
    mistakes: list[str] = field(factory=list)


def read_headers(directory: Path, draft: ReadDraft) -> DraftFiles:
    """Sort the tensors of a draft's directory by their headers, for the config that was read from it.

    `draft_folder_mistakes` has already checked the directory.
    """
    found, expected, config = DraftFiles(), _shapes_in_files(draft), draft.config
    found.mistakes += [
        f"{name}: changes the draft, and dflow has no such thing" for name in FORBIDDEN if (directory / name).exists()
    ]
    for name, stored in _stored(directory, found.mistakes).items():
        if name in expected:
            found.own[name] = stored
        elif name in (EMBED, HEAD):
            found.ends[name] = stored
            if stored.shape != (config.vocab_size, config.hidden_size):
                found.mistakes.append(f"{name}: {NOT_THE_TARGETS}")
        elif name in OF_VERIFIER:
            found.verifier[name] = stored
        elif name.endswith(FREQUENCIES) and stored.dtype in DTYPES:
            found.frequencies[name] = stored
        else:
            found.mistakes.append(f"{name}: dflow does not know this tensor, which may change the draft")
    missing = sorted(expected.keys() - found.own.keys())
    if missing:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        found.mistakes.append(f"missing: {', '.join(missing[:SHOWN])}{more}")
    found.mistakes += _shape_mistakes(found.own, expected)
    return found


def dtype_mistakes(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> list[str]:
    """Mistakes for tensors of a dflow export with another dtype than it wrote, by their headers."""
    if not table_of(config, OF_DFLOW):
        return []
    dtype = STORED_DTYPES[config["dtype"]]
    return [
        f"{tensor.name}: of dtype {tensor.dtype}, and the export has {dtype}"
        for tensor in tensors
        if tensor.dtype != dtype
    ]


def unfit_weights(directory: Path, mistakes: list[str]) -> str:
    """The message for mistakes in a draft's weights."""
    return "\n".join([f"{directory}: these weights cannot be imported:", *(f"  {mistake}" for mistake in mistakes)])


def _shapes_in_files(draft: ReadDraft) -> dict[str, tuple[int, ...]]:
    """The tensors that a draft's files must have, with shapes; some of DSpark's are optional (`AlgorithmFields`)."""
    shapes = dict(expected_shapes(to_serving(draft.config)))
    if not draft.has_bias:
        del shapes[W1], shapes[W2]
    if not draft.confidence_reads_token and CONFIDENCE in shapes:
        shapes[CONFIDENCE] = (1, draft.config.hidden_size)
    return shapes


def _stored(directory: Path, mistakes: list[str]) -> dict[str, StoredTensor]:
    """The tensors of the single file, or else of those that the index names; a common prefix of names is removed."""
    found: dict[str, StoredTensor] = {}
    for file in _files(directory, mistakes):
        try:
            headers = tensor_headers(file)
        except DataError as error:
            mistakes.append(str(error))
            continue
        for name, header in headers.items():
            own = next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)
            own = contract_name(SPELLINGS.get(own, own))
            if own in found:
                mistakes.append(f"{own}: is there twice, in {found[own].file.name} and in {file.name} as {name}")
            found[own] = header
    return found


def _files(directory: Path, mistakes: list[str]) -> list[Path]:
    """The files of the weights. Further files of the format would be ignored, which is reported as a mistake."""
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


def _shape_mistakes(own: Mapping[str, StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Mistakes for tensors of another shape, or of a dtype that is no plain float."""
    for name, stored in sorted(own.items()):
        if stored.dtype not in DTYPES:
            yield f"{name}: of dtype {stored.dtype}; only {', '.join(sorted(DTYPES))} are read, so no quantised weights"
        elif stored.shape != expected[name]:
            yield f"{name}: has the shape {list(stored.shape)}, and by config.json it is {list(expected[name])}"
