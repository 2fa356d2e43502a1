"""The sizes of LiLiCorr, their form in config.json, its tensors, and what a training of it may set. Loads no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import evolve, frozen, validators

from dsl.op import field
from ops.lib.drafts.dflash2.config import AT_LEAST_1, Dflash2, convolution_shapes
from ops.lib.drafts.layout import Layout, masks_first

if TYPE_CHECKING:
    from ops.lib.drafts.algorithms import Algorithm
    from ops.lib.drafts.backbone.config import DraftConfig

NEST = "dflash_config"
ENABLED = "lilicorr_enabled"
SERVED = {
    "candidates": "lilicorr_candidate_topk",
    "width": "lilicorr_hidden_size",
    "layers": "lilicorr_num_layers",
    "heads": "lilicorr_num_heads",
    "mlp_ratio": "lilicorr_mlp_ratio",
    "factors": "lilicorr_factor_dim",
    "vector_eps": "lilicorr_vector_eps",
    "logit_scale": "lilicorr_logit_scale",
    "taps": "conv_kernel_size",
    "group": "conv_group_size",
}
COUNTS = ("candidates", "width", "layers", "heads", "factors")
MOST_CANDIDATES = 16  # of a walk in SGLang and vLLM
CPU_NODES, CUDA_NODES = 2**9, 2**14  # of lattices whose activations are alive at a time
FEATURES = 5  # numbers that describe a candidate
CANDIDATES = f"must be a power of two up to {MOST_CANDIDATES}, or engines refuse to start"
RAW_LOGITS = "engines give LiLiCorr the plain product with the head; leave it out"


@frozen(kw_only=True)
class Lilicorr:
    """The sizes of the algorithm LiLiCorr.

    candidates: of each slot. width: of the transformer over them. layers, heads, mlp_ratio: its own. factors: the size
    of the vectors whose cosine scores a candidate. vector_eps: the least length that they are divided by. logit_scale:
    the factor of the cosines. taps, group: of convolutions around the sublayers, as in DFlash2; both 0 for none.
    """

    candidates: int = 8
    width: int = 1024
    layers: int = 2
    heads: int = 8
    mlp_ratio: float = 2.0
    factors: int = 1024
    vector_eps: float = 1e-4
    logit_scale: float = 8.0
    taps: int = 0
    group: int = 0

    name: ClassVar[str] = "lilicorr"
    architecture: ClassVar[str] = "LiLiCorrDraftModel"
    engine: ClassVar[str] = "DFLASH"
    source: ClassVar[str] = "https://arxiv.org/abs/2608.20530"
    reads_context: ClassVar[bool] = True
    plain_logits: ClassVar[bool] = True

    def layout(self, block_size: int) -> Layout:
        return masks_first(block_size)

    def metrics(self, with_teacher: bool) -> tuple[str, ...]:
        return ("candidate_recall", "prefix_recall")

    def mistakes(self, draft: DraftConfig) -> list[str]:
        mistakes = [
            f"{field_name(name)}: must be at least 1, got {getattr(self, name)}"
            for name in COUNTS
            if getattr(self, name) < 1
        ]
        mistakes += [
            f"{field_name(name)}: must be above 0, got {getattr(self, name)}"
            for name in ("mlp_ratio", "vector_eps", "logit_scale")
            if not (isfinite(getattr(self, name)) and getattr(self, name) > 0)
        ]
        if mistakes:
            return mistakes
        if self.candidates & (self.candidates - 1) or self.candidates > MOST_CANDIDATES:
            mistakes.append(f"{field_name('candidates')}: {CANDIDATES}, got {self.candidates}")
        if self.candidates > draft.vocab_size:
            mistakes.append(f"{field_name('candidates')}: {self.candidates} of a vocabulary of {draft.vocab_size}")
        if self.width % self.heads:
            mistakes.append(f"{field_name('heads')}: {self.heads} does not divide width = {self.width}")
        if self.mlp_width < 1:
            mistakes.append(f"{field_name('mlp_ratio')}: {self.mlp_ratio:g} of width = {self.width} is less than 1")
        mistakes += self._convolution_mistakes(draft)
        for name, default in (("output_multiplier", 1), ("final_logit_softcapping", None)):
            if getattr(draft, name) != default:
                mistakes.append(f"{name}: {RAW_LOGITS}")
        return mistakes

    def _convolution_mistakes(self, draft: DraftConfig) -> list[str]:
        if self.taps == self.group == 0:
            return []
        if self.taps < 1 or self.group < 1:
            return [
                f"{field_name('taps')}: {self.taps}, and {field_name('group')} is {self.group}: both must be at least "
                "1, or both 0 for no convolution"
            ]
        mistakes = []
        if draft.hidden_size % self.group:
            mistakes.append(f"{field_name('group')}: {self.group} does not divide hidden_size = {draft.hidden_size}")
        if self.taps > draft.block_size:
            mistakes.append(f"{field_name('taps')}: {self.taps} slots of a block of {draft.block_size}")
        return mistakes

    def start_mistake(self, parent: Algorithm) -> str:
        """What to do about a draft from which a training cannot start; "" for one with the same convolutions or none
        that is DFlash2's, whose selector is dropped, or has the same lattice.
        """
        if not isinstance(parent, (Dflash2, Lilicorr)):
            return "a training of LiLiCorr starts from a draft of DFlash, DFlash2 or LiLiCorr"
        taps, group = parent.taps, parent.group
        if taps and (taps, group) != (self.taps, self.group):
            return (
                "the draft's backbone was trained with its convolutions: set lilicorr.conv = true, "
                f"lilicorr.taps = {taps} and lilicorr.group = {group}"
            )
        if isinstance(parent, Lilicorr) and evolve(parent, taps=self.taps, group=self.group) != self:
            return "set the sizes of lilicorr as in the draft; only convolutions can be added"
        return ""

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)

    def to_serving(self, serving: dict[str, Any]) -> dict[str, Any]:
        own = {served: getattr(self, name) for name, served in SERVED.items()}
        return serving | {NEST: serving[NEST] | {ENABLED: True} | own}

    @classmethod
    def from_serving(cls, data: Mapping[str, Any]) -> tuple[Lilicorr, dict[str, Any]]:
        nest = dict(data[NEST])
        own = {name: nest.pop(served) for name, served in SERVED.items()}
        del nest[ENABLED]
        return cls(**own), {**data, NEST: nest}

    def slot_flops(self, draft: DraftConfig) -> float:
        M, H, R, scored = draft.hidden_size, self.width, self.factors, self.candidates + 1  # with the label
        nodes = (draft.block_size - 1) * self.candidates
        token = 0 if H == M else 2 / 3 * M * H  # of the frozen embedding
        layer = 4 * H * H + 2 * H * self.mlp_width + 2 * nodes * H
        vectors = 2 * H * H + H * R + R
        after = H * R  # of the true token alone
        lattice = M * H + after + self.candidates * (token + FEATURES * H + H * H + self.layers * layer + vectors)
        convolution = 2 * self.taps * (M // self.group) * M if self.taps else 0
        # Candidates come from the logits of the loss; those of the scored ones are computed again, with a gradient.
        return 3 * 2 * (2 * draft.num_hidden_layers * convolution + lattice) + 2 * 2 * scored * M

    def pass_bytes(self, draft: DraftConfig, blocks: int, item_size: int) -> int:
        """What some blocks' lattices keep for their backward pass on a GPU, and its largest step (loss.py)."""
        M, H, R = draft.hidden_size, self.width, self.factors
        nodes = (draft.block_size - 1) * self.candidates
        together = min(blocks, max(1, CUDA_NODES // nodes))
        token = 0 if H == M else M
        layer = 10 * H + 2 * self.mlp_width + self.heads * nodes  # with the scores of a node to all others
        step = 2 * self.mlp_width + 3 * H + 2 * self.heads * nodes
        node = token + 8 * H + 2 * R + self.layers * layer + step
        return together * nodes * node * item_size


def field_name(name: str) -> str:
    """A field's name for messages, with its names in a pipeline and in config.json."""
    return f"lilicorr.{name} ({SERVED[name]})"


def sizes(draft: DraftConfig) -> Lilicorr:
    """The config of the LiLiCorr algorithm in the config of a draft."""
    assert isinstance(draft.algorithm, Lilicorr)
    return draft.algorithm


_REFUSES = "refuses to start (ValueError)"
_STOPS = "stops at the weights' shapes"
MISSING: Mapping[str, str] = {
    f"{NEST}.{ENABLED}": "takes it for true",
    **{f"{NEST}.{served}": _REFUSES for name, served in SERVED.items() if name not in ("taps", "group")},
    f"{NEST}.{SERVED['taps']}": f"{_REFUSES} where there are convolutions",
    f"{NEST}.{SERVED['group']}": f"{_REFUSES} where there are convolutions",
    "dflow.algorithm": "does not read it",
}
WRONG: Mapping[str, str] = {
    "architectures": "serves the draft as less than it is, in silence: without its lattice, fewer tokens are accepted",
    ENABLED: f"{_REFUSES} if it is false",
    SERVED["candidates"]: f"{_REFUSES} for another number than 1, 2, 4, 8 and 16, and {_STOPS}",
    SERVED["width"]: _STOPS,
    SERVED["layers"]: _REFUSES,
    SERVED["heads"]: _STOPS,
    SERVED["mlp_ratio"]: _STOPS,
    SERVED["factors"]: _STOPS,
    SERVED["vector_eps"]: "silently divides vectors by another length than in training",
    SERVED["logit_scale"]: "silently draws from a distribution for which the draft was not trained",
    SERVED["taps"]: _REFUSES + " or " + _STOPS,
    SERVED["group"]: _REFUSES + " or " + _STOPS,
}

# Parts of the names of tensors of which SGLang compares what it needs with what there is.
COMPARED = ("lilicorr.", ".attention_conv.", ".mlp_conv.")
# SGLang 0.5.21 has other names for these tensors than 0.5.23 and vLLM 0.33; each refuses the other's.
OLD_ENGINE = "sglang-0.5.21"
_OLD_NAMES = (
    (r"lilicorr\.feature_norm\.", "lilicorr.feature_mlp.0."),
    (r"lilicorr\.feature_mlp\.up_proj\.", "lilicorr.feature_mlp.1."),
    (r"lilicorr\.feature_mlp\.down_proj\.", "lilicorr.feature_mlp.3."),
    (r"(lilicorr\.layers\.\d+\.mlp)\.up_proj\.", r"\1.0."),
    (r"(lilicorr\.layers\.\d+\.mlp)\.down_proj\.", r"\1.2."),
)
_NEW_NAMES = (
    (r"lilicorr\.feature_mlp\.0\.", "lilicorr.feature_norm."),
    (r"lilicorr\.feature_mlp\.1\.", "lilicorr.feature_mlp.up_proj."),
    (r"lilicorr\.feature_mlp\.3\.", "lilicorr.feature_mlp.down_proj."),
    (r"(lilicorr\.layers\.\d+\.mlp)\.0\.", r"\1.up_proj."),
    (r"(lilicorr\.layers\.\d+\.mlp)\.2\.", r"\1.down_proj."),
)


def stored_name(name: str, engine: object) -> str:
    """The name of a tensor in an export for this engine (`export_draft.engine`); names of the backbone stay."""
    return _replaced(name, _OLD_NAMES) if engine == OLD_ENGINE else name


def contract_name(stored: str) -> str:
    """The name in the contract of a stored tensor, whichever engine it was exported for; the inverse of
    `stored_name`.
    """
    return _replaced(stored, _NEW_NAMES)


def form_of(name: str) -> str:
    """The engines that read a tensor by this name; "" if all do that read it at all."""
    if contract_name(name) != name:
        return "SGLang 0.5.21"
    return "SGLang 0.5.23 and vLLM 0.33" if stored_name(name, OLD_ENGINE) != name else ""


def _replaced(name: str, names: tuple[tuple[str, str], ...]) -> str:
    for pattern, other in names:
        found, count = re.subn(f"^{pattern}", other, name)
        if count:
            return found
    return name


def shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors that the algorithm adds to the backbone, by name. config: a config.json.

    None where sizes are missing or no numbers.
    """
    nest, M = config[NEST], config["hidden_size"]
    counts = [config.get("block_size"), *(nest.get(SERVED[name]) for name in COUNTS)]
    ratio, taps, group = (nest.get(SERVED[name]) for name in ("mlp_ratio", "taps", "group"))
    given = [count for count in counts if type(count) is int and count > 0]
    if len(given) < len(counts):
        return {}
    if type(ratio) not in (int, float) or type(taps) is not int or type(group) is not int or bool(taps) != bool(group):
        return {}
    block, C, H, layers, heads, R = given
    linears = {
        **({} if H == M else {"token_proj": (H, M)}),
        "pass_hidden_proj": (H, M),
        "feature_mlp.up_proj": (H, FEATURES),
        "feature_mlp.down_proj": (H, H),
        "context_proj": (H, M),
        "factor_input_proj": (H, 3 * H),
        **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (R, H)),
    }
    own: dict[str, tuple[int, ...]] = {
        "feature_norm.weight": (FEATURES,),
        "feature_norm.bias": (FEATURES,),
        "slot_embedding": (1, 1, block - 1, 1, H),
        "rank_embedding": (1, 1, 1, C, H),
        "relative_slot_bias": (heads, 2 * block - 1),
        "same_slot_bias": (heads,),
        "output_norm.weight": (H,),
        "anchor_norm.weight": (H,),
    }
    for index in range(layers):
        layer, wide = f"layers.{index}", int(H * ratio)
        own |= {f"{layer}.attn_norm.weight": (H,), f"{layer}.mlp_norm.weight": (H,)}
        own |= {f"{layer}.attn.in_proj_weight": (3 * H, H), f"{layer}.attn.in_proj_bias": (3 * H,)}
        linears |= {f"{layer}.attn.out_proj": (H, H)}
        linears |= {f"{layer}.mlp.up_proj": (wide, H), f"{layer}.mlp.down_proj": (H, wide)}
    for name, shape in linears.items():
        own |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    engine = config["dflow"].get("engine") if isinstance(config.get("dflow"), Mapping) else None
    found = {stored_name(f"lilicorr.{name}", engine): shape for name, shape in own.items()}
    return found | (convolution_shapes(config["num_hidden_layers"], taps, group, M) if taps else {})


def _power_of_2(_instance: Any, _attribute: object, count: int) -> None:
    if count & (count - 1) or not 2 <= count <= MOST_CANDIDATES:  # of a single one there is nothing to learn
        raise ValueError(f"'candidates' must be a power of two from 2 to {MOST_CANDIDATES}: {count}")


def _divides(instance: Any, _attribute: object, heads: int) -> None:
    width = getattr(instance, "width", heads)  # missing if its own value is wrong
    if width % heads:
        raise ValueError(f"'heads': {heads} does not divide width = {width}")


def _objective(instance: Any, _attribute: object, regret: float) -> None:
    """A validator: the lattice must be trained, or it would be exported as it started."""
    if regret == getattr(instance, "cross_entropy", 1.0) == getattr(instance, "hinge", 1.0) == 0:
        raise ValueError("cross_entropy = 0, hinge = 0 and regret = 0 train no lattice: one of them must be > 0")


WEIGHT = validators.ge(0)
POSITIVE = validators.gt(0)


@frozen(kw_only=True)
class LilicorrOptions:
    """The table of LiLiCorr in a training: sizes, and terms of the loss.

    With regret = 0, no final_hidden is needed.
    """

    candidates: int = field(
        default=8,
        validator=_power_of_2,
        help=f"tokens of each slot that the lattice holds, a power of two from 2 to {MOST_CANDIDATES}",
    )
    width: int = field(default=1024, validator=AT_LEAST_1, help="of the transformer over the candidates")
    layers: int = field(default=2, validator=AT_LEAST_1, help="of that transformer")
    heads: int = field(
        default=8, validator=validators.and_(AT_LEAST_1, _divides), help="of its attention; they divide width"
    )
    mlp_ratio: float = field(default=2.0, validator=POSITIVE, help="of its MLP's width to width")
    factors: int = field(default=1024, validator=AT_LEAST_1, help="size of the vectors whose cosine scores a candidate")
    vector_eps: float = field(
        default=1e-4,
        validator=validators.and_(POSITIVE, validators.lt(0.5)),
        help="least length by which such a vector is divided",
    )
    logit_scale: float = field(default=8.0, validator=POSITIVE, help="factor of the cosines, which is not trained")
    conv: bool = field(default=False, help="DFlash2's convolutions around every sublayer, too")
    taps: int = field(default=2, validator=AT_LEAST_1, help="with conv: slots that a convolution reads, with its own")
    group: int = field(
        default=16, validator=AT_LEAST_1, help="with conv: dimensions that share a kernel made of the slot"
    )
    base: float = field(default=1.0, validator=WEIGHT, help="weight of `loss`, that of the plain logits")
    cross_entropy: float = field(
        default=0.25, validator=WEIGHT, help="weight of the cross-entropy over the candidates after the true token"
    )
    hinge: float = field(
        default=0.0, validator=WEIGHT, help="weight of relu(margin - gap), the gap to the best other candidate"
    )
    margin: float = field(default=2.0, validator=POSITIVE, help="with hinge: the gap beyond which it is 0")
    regret: float = field(
        default=0.25,
        validator=validators.and_(WEIGHT, _objective),
        help="weight of the expected loss of the target's logit against the true token's; needs final_hidden",
    )

    @property
    def needs_teacher(self) -> bool:
        return self.regret > 0

    def sizes(self) -> dict[str, Any]:
        """The values of the algorithm's config fields."""
        own = {name: getattr(self, name) for name in SERVED}
        return own if self.conv else own | {"taps": 0, "group": 0}
