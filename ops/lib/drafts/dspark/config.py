"""The sizes of DSpark, their form in config.json, its tensors, and what a training of it may set. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen, validators

from dsl.op import field
from ops.lib.drafts.layout import Layout, anchor_first, masks_first

if TYPE_CHECKING:
    from ops.lib.drafts.backbone.config import DraftConfig

NEST = "dflash_config"
HEAD = "vanilla"  # the kind of Markov head
TOP = ("mask_token_id", "target_layer_ids")  # at the top level, and not nested
OWN = (
    *("markov_rank", "markov_head_type", "sample_from_anchor"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)


@frozen(kw_only=True)
class Dspark:
    """The sizes of the algorithm DSpark.

    rank: of the two tables whose product is the bias. sample_from_anchor: whether the anchor's slot predicts too.
    confidence_head: whether one is trained.
    """

    rank: int = 256
    sample_from_anchor: bool = True
    confidence_head: bool = True

    name: ClassVar[str] = "dspark"
    architecture: ClassVar[str] = "Qwen3DSparkModel"
    engine: ClassVar[str] = "DSPARK"
    speculators_type: ClassVar[str] = "dspark"
    speculators_architecture: ClassVar[str] = "DSparkSpeculator"
    source: ClassVar[str] = "https://arxiv.org/abs/2607.05147"

    def layout(self, block_size: int) -> Layout:
        return anchor_first(block_size) if self.sample_from_anchor else masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return (("overlap", "confidence") if self.confidence_head else ("overlap",)) if with_teacher else ()

    def mistakes(self, draft: DraftConfig) -> list[str]:
        found = [] if self.rank >= 1 else [f"dspark.rank (markov_rank): must be at least 1, got {self.rank}"]
        for name in ("output_multiplier", "final_logit_softcapping"):
            if getattr(draft, name) not in (1, None):
                found.append(f"{name}: engines add DSpark's bias to the plain product with the head; leave it out")
        return found

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        """DSpark's serving config.json; its block_size counts proposals, as SGLang reads it."""
        top = dict(serving)
        block_size = self.layout(serving["block_size"]).proposals
        return top | {**top.pop(NEST), "block_size": block_size, **self.to_speculators()}

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Dspark, dict[str, Any]]:
        own = cls(
            rank=data["markov_rank"],
            sample_from_anchor=data["sample_from_anchor"],
            confidence_head=data["enable_confidence_head"],
        )
        plain = {name: value for name, value in data.items() if name not in (*TOP, *OWN)}
        return own, plain | {NEST: {name: data[name] for name in TOP}, "block_size": data["block_size"] + 1}

    def to_speculators(self) -> dict[str, Any]:
        return {
            "markov_rank": self.rank,
            "markov_head_type": HEAD,
            "sample_from_anchor": self.sample_from_anchor,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_head,
        }

    def slot_flops(self, draft: DraftConfig) -> float:
        return 3 * 2 * self.rank * draft.vocab_size


def sizes(draft: DraftConfig) -> Dspark:
    """The config of the algorithm of a DSpark draft."""
    assert isinstance(draft.algorithm, Dspark)
    return draft.algorithm


MISSING: Mapping[str, str] = {
    "block_size": "silently proposes 7 tokens, whatever the draft was trained with",
    "mask_token_id": "refuses to start (ValueError)",
    "target_layer_ids": "computes ids by the formula for the number of draft layers: it captures other layers than in "
    "training, or refuses to start where fc.weight is of another width",
    "markov_rank": "refuses to start (ValueError)",
    "markov_head_type": "refuses to start (ValueError)",
    "sample_from_anchor": "takes it for true, in silence: in the other layout each slot predicts another token",
    "enable_confidence_head": "does not read it: the head is built where the verification is ragged",
    "confidence_head_with_markov": "takes it for true",
    "dflow.algorithm": "does not read it",
}
WRONG: Mapping[str, str] = {
    "architectures": "stops as DSPARK (AttributeError), and as DFLASH drops both heads, in silence: fewer tokens are "
    "accepted",
    "block_size": "silently proposes another number of tokens, for which the draft was not trained",
    "markov_rank": "refuses to start (ValueError) below 1, and stops at the weights' shapes",
    "markov_head_type": "silently computes another bias, from weights that are not there",
    "sample_from_anchor": "silently shifts what each slot predicts by one: almost nothing is accepted",
    "enable_confidence_head": "does not read it: the head is built where the verification is ragged",
    "confidence_head_with_markov": "stops at the weights' shapes where the head is built",
}


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the algorithm adds to the backbone, by name. config: a config.json.

    None where sizes are missing or no numbers.
    """
    hidden, vocabulary, rank = config["hidden_size"], config.get("vocab_size"), config.get("markov_rank")
    if not (type(vocabulary) is int and type(rank) is int and vocabulary > 0 and rank > 0):
        return {}
    if type(config.get("enable_confidence_head")) is not bool:
        return {}
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (vocabulary, rank),
        "markov_head.markov_w2.weight": (vocabulary, rank),
    }
    if config["enable_confidence_head"]:
        shapes |= {"confidence_head.proj.weight": (1, hidden + rank), "confidence_head.proj.bias": (1,)}
    return shapes


def _objective(instance: Any, _attribute: object, weight: float) -> None:
    """A validator: the loss must train something, and an exported confidence head must be trained."""
    has_head = getattr(instance, "confidence_head", False)
    if weight == 0 and has_head:
        raise ValueError("confidence = 0 trains no confidence head: set confidence_head = false")
    if not has_head and getattr(instance, "base", 1.0) == 0 and getattr(instance, "l1", 1.0) == 0:
        raise ValueError("base = 0 and l1 = 0 without a confidence head leave nothing to train for: one must be > 0")


@frozen(kw_only=True)
class DsparkOptions:
    """The table of DSpark in a training: sizes, layout, and terms of the loss.

    With l1 = 0 and confidence_head = false, no final_hidden is needed.
    """

    rank: int = field(default=256, validator=validators.ge(1), help="of the two tables that hold the bias")
    sample_from_anchor: bool = field(
        default=True,
        help="the anchor's slot predicts too, so a block has one slot less; false: the layout of plain DFlash",
    )
    confidence_head: bool = field(default=True, help="a head for the probability that a proposal is accepted")
    base: float = field(default=0.1, validator=validators.ge(0), help="weight of `loss`")
    l1: float = field(
        default=0.9, validator=validators.ge(0), help="weight of the distance to the target's distribution"
    )
    confidence: float = field(
        default=1.0,
        validator=validators.and_(validators.ge(0), _objective),
        help="weight of the confidence head's loss; above 0 unless confidence_head = false",
    )

    @property
    def needs_teacher(self) -> bool:
        return self.l1 > 0 or self.confidence_head

    def sizes(self) -> dict[str, Any]:
        """The values of the algorithm's config fields."""
        return {
            "rank": self.rank,
            "sample_from_anchor": self.sample_from_anchor,
            "confidence_head": self.confidence_head,
        }
