"""The sizes of DFlash2, their form in config.json, its tensors, and what a training of it may set. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from attrs import frozen, validators

from dsl.op import field
from ops.lib.drafts.layout import Layout, masks_first

if TYPE_CHECKING:
    from ops.lib.drafts.backbone.config import DraftConfig

SERVED = {
    "taps": "conv_kernel_size",
    "group": "conv_group_size",
    "rank": "selector_rank",
    "candidates": "selector_top_k",
}
NEST = "dflash_config"
# Triton's arange, by which SGLang's kernel goes through the candidates, takes no other sizes.
POWER_OF_2 = "must be a power of two, or SGLang's walk on CUDA cannot start"


@frozen(kw_only=True)
class Dflash2:
    """The sizes of the algorithm DFlash2.

    taps: slots that a convolution reads, including its own. group: neighbouring dimensions that share a kernel value
    made from the slot. rank: of the selector's tables. candidates: tokens of each slot from which the selector chooses.
    """

    taps: int = 2
    group: int = 16
    rank: int = 256
    candidates: int = 16

    name: ClassVar[str] = "dflash2"
    architecture: ClassVar[str] = "DFlash2DraftModel"
    engine: ClassVar[str] = "DFLASH"
    speculators_type: ClassVar[str] = "dflash2"
    speculators_architecture: ClassVar[str] = "DFlash2DraftModel"
    source: ClassVar[str] = "https://github.com/z-lab/dflash"

    def layout(self, block_size: int) -> Layout:
        return masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return ("candidate_recall",)

    def mistakes(self, draft: DraftConfig) -> list[str]:
        mistakes = [
            f"{field_name(name)}: must be at least 1, got {getattr(self, name)}"
            for name in SERVED
            if getattr(self, name) < 1
        ]
        if mistakes:
            return mistakes
        if draft.hidden_size % self.group:
            mistakes.append(f"{field_name('group')}: {self.group} does not divide hidden_size = {draft.hidden_size}")
        if self.taps > draft.block_size:
            mistakes.append(f"{field_name('taps')}: {self.taps} slots of a block of {draft.block_size}")
        if self.candidates & (self.candidates - 1):
            mistakes.append(f"{field_name('candidates')}: {POWER_OF_2}, got {self.candidates}")
        if self.candidates > draft.vocab_size:
            mistakes.append(f"{field_name('candidates')}: {self.candidates} of a vocabulary of {draft.vocab_size}")
        return mistakes

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        return serving | {NEST: serving[NEST] | self.to_speculators()}

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Dflash2, dict[str, Any]]:
        nest = dict(data[NEST])
        own = {name: nest.pop(served) for name, served in SERVED.items()}
        return cls(**own), {**data, NEST: nest}

    def to_speculators(self) -> dict[str, Any]:
        return {served: getattr(self, name) for name, served in SERVED.items()}

    def slot_flops(self, draft: DraftConfig) -> float:
        M, scored = draft.hidden_size, self.candidates + 1  # with the label
        convolution = 2 * self.taps * (M // self.group) * M
        selector = self.rank * (M + scored)
        # Candidates come from the logits of the loss; those of the scored ones are computed again, with a gradient.
        return 3 * 2 * (2 * draft.num_hidden_layers * convolution + selector) + 2 * 2 * scored * M


def field_name(name: str) -> str:
    """A field's name for messages, with its names in a pipeline and in config.json."""
    return f"dflash2.{name} ({SERVED[name]})"


def sizes(draft: DraftConfig) -> Dflash2:
    """The config of the DFlash2 algorithm in the config of a draft."""
    assert isinstance(draft.algorithm, Dflash2)
    return draft.algorithm


WITHOUT = "serves the draft as less than it is, in silence: without {what}, fewer tokens are accepted"
CONVOLUTIONS = "refuses to start; without both conv fields it " + WITHOUT.format(what="its convolutions")
MISSING: Mapping[str, str] = {
    "dflash_config.conv_kernel_size": CONVOLUTIONS,
    "dflash_config.conv_group_size": CONVOLUTIONS,
    "dflash_config.selector_rank": "refuses to start",
    "dflash_config.selector_top_k": "refuses to start",
    "dflow.algorithm": "does not read it",
}
WRONG: Mapping[str, str] = {
    "architectures": WITHOUT.format(what="its selector"),
    "conv_kernel_size": "stops at the weights' shapes",
    "conv_group_size": "stops at the weights' shapes",
    "selector_rank": "stops at the weights' shapes",
    "selector_top_k": "silently chooses among more or fewer candidates than the draft was trained for",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the algorithm adds to the backbone, by name. config: a config.json.

    None where sizes are missing or no numbers.
    """
    nest, hidden = config["dflash_config"], config["hidden_size"]
    names = ("conv_kernel_size", "conv_group_size", "selector_rank")
    values = [config.get("vocab_size"), *map(nest.get, names)]
    sizes = [value for value in values if type(value) is int and value > 0]
    if len(sizes) < len(values):
        return {}
    vocabulary, taps, group, rank = sizes
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (vocabulary, rank),
        "candidate_selector.successor_codebook": (vocabulary, rank),
        "candidate_selector.hidden_projection.weight": (rank, hidden),
    }
    return shapes | convolution_shapes(config["num_hidden_layers"], taps, group, hidden)


def convolution_shapes(layers: int, taps: int, group: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the convolutions around the sublayers, by name. hidden: the backbone's hidden size."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(layers):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{index}.{conv}.base_kernel"] = (2, taps, hidden)
            shapes[f"layers.{index}.{conv}.kernel_projection.weight"] = (2 * taps * hidden // group, hidden)
    return shapes


AT_LEAST_1 = validators.ge(1)


def _power_of_2(_instance: Any, _attribute: object, count: int) -> None:
    if count & (count - 1):
        raise ValueError(f"'candidates' {POWER_OF_2}: {count}")


def _objective(instance: Any, _attribute: object, selector: float) -> None:
    if selector == 0 and getattr(instance, "base", 1.0) == 0:
        raise ValueError("base = 0 and selector = 0 leave nothing to train for: one of them must be > 0")


@frozen(kw_only=True)
class Dflash2Options:
    """The table of DFlash2 in a training: sizes, and terms of the loss."""

    taps: int = field(default=2, validator=AT_LEAST_1, help="slots that a convolution reads, the own one among them")
    group: int = field(default=16, validator=AT_LEAST_1, help="dimensions that share a kernel made of the slot")
    rank: int = field(default=256, validator=AT_LEAST_1, help="of the selector's tables")
    candidates: int = field(
        default=16,
        validator=validators.and_(AT_LEAST_1, _power_of_2),
        help="tokens of each slot that the selector chooses among, a power of two",
    )
    base: float = field(default=1.0, validator=validators.ge(0), help="weight of `loss`, that of the plain logits")
    selector: float = field(
        default=1.0,
        validator=validators.and_(validators.ge(0), _objective),
        help="weight of the selector's cross-entropy over the candidates",
    )
    label: Literal["data", "target"] = field(
        default="data",
        help="what the selector learns to choose: the token of the data, or the target's most probable one (needs "
        "final_hidden)",
    )
    missing: Literal["replace", "skip"] = field(
        default="replace",
        help="a label that is no candidate: it replaces the last one, in training only, or adds nothing to this term",
    )

    @property
    def needs_teacher(self) -> bool:
        return self.label == "target"

    def sizes(self) -> dict[str, Any]:
        """The values of the algorithm's config fields."""
        return {"taps": self.taps, "group": self.group, "rank": self.rank, "candidates": self.candidates}
