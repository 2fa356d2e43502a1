"""Declaration of `train_dflash`: the draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from attrs import frozen, validators

from dsl.convert import ChosenBy, Clash, Given, Needs, Only, structure
from dsl.errors import ConfigError, StructureError
from dsl.op import field, op, op_of, seed_field
from dsl.op_table import own_algorithms
from ops.artifacts import BatchPlan, Draft, DraftCheckpoint, TargetFeatures, TargetModel, TokenShards
from ops.capture_targets.op import LAYER_IDS, ascending_layers
from ops.lib.drafts.algorithms import (
    CONFIGS,
    algorithm_class,
    code_of,
    own_options,
)
from ops.lib.drafts.dflash2.config import Dflash2Options
from ops.lib.drafts.dspark.config import DsparkOptions
from ops.lib.drafts.lilicorr.config import LilicorrOptions
from ops.lib.drafts.losses.kinds import LossKind, Terms, needs_teacher
from ops.lib.sequence_parallel.degree import known_exchange

LAYERS = 5
PROMPTS_AT_ONCE = 8  # val prompts that are decoded together to measure tau
PAUSE = "pause_after"
ONLINE_SPLITS = ("train", "val")  # that a training captures itself
AT_LEAST_1 = validators.optional(validators.ge(1))
SHARE = validators.and_(validators.ge(0), validators.lt(1))


def _sliding_layers(instance: Any, _attribute: object, layers: tuple[int, ...]) -> None:
    """A validator: the layers must exist in the draft."""
    num_layers = getattr(instance, "num_layers", None)  # missing if its own value is wrong
    outside = [layer for layer in layers if layer < 0 or (num_layers is not None and layer >= num_layers)]
    if outside:
        bound = "" if num_layers is None else num_layers - 1
        raise ValueError(f"'sliding_layers': {outside} outside 0..{bound} (num_layers)")


def _kv_heads(instance: Any, _attribute: object, kv_heads: int | None) -> None:
    heads = getattr(instance, "num_heads", None)
    if kv_heads is not None and kv_heads < 1:
        raise ValueError(f"'num_kv_heads' must be >= 1: {kv_heads}")
    if kv_heads is not None and heads is not None and heads % kv_heads:
        raise ValueError(f"'num_kv_heads': num_heads = {heads} is no multiple of {kv_heads}")


def _phases(instance: Any, _attribute: object, _ratio: float) -> None:
    """A validator: warm-up and decay of "wsd" must not overlap."""
    ratios = [getattr(instance, name, 0.0) for name in ("warmup_ratio", "decay_ratio")]
    if getattr(instance, "schedule", "") == "wsd" and sum(ratios) > 1:
        raise ValueError(f"warmup_ratio = {ratios[0]} and decay_ratio = {ratios[1]} overlap: their sum must be <= 1")


# Features are an input, or captured from tokens, never both.
CAPTURE = (
    Needs(
        "stored",
        'features are missing: give the output of capture_targets, or set capture = "online" and give tokens',
        given=("features",),
    ),
    Needs("online", "'capture' = \"online\" makes the features itself: leave features out", left_out=("features",)),
    Needs("online", "'capture' = \"online\" needs tokens: what it captures features of", given=("tokens",)),
)


# A field that decides how to capture, or how to measure tau, must not be ignored silently.
ONLINE_ONLY = Only(
    "capture", "online", "'{name}' needs capture = \"online\"; capture_targets decides it for stored features"
)
TAU_ONLY = (
    Given("'{name}' needs eval_every: the steps between measurements of tau", given=("eval_every",)),
    Given("'{name}' needs tokens: the prompts are their split val", given=("tokens",)),
)


def _select(instance: Any, _attribute: object, select: str) -> None:
    """A validator: the metric to select by must be measured."""
    if select == "last":
        return
    lacks = []
    if getattr(instance, "eval_every", 1) is None:
        lacks.append("eval_every: the steps between measurements on the split val")
    if select == "tau" and instance.tokens is None:
        lacks.append("tokens: whose split val holds the prompts")
    if select == "tau" and getattr(instance, "eval_prompts", 1) == 0:
        lacks.append("eval_prompts of at least 1")
    if lacks:
        raise ValueError(f"'select' = \"{select}\" needs " + "; and ".join(lacks))


def _of_algorithm(name: str) -> ChosenBy:
    return ChosenBy("algorithm", name, f"'{{name}}' needs algorithm = \"{name}\"")


def _known_algorithm(_instance: Any, _attribute: object, name: str) -> None:
    """A validator: the algorithm comes with dflow, or its folder can be used. Raises ValueError."""
    try:
        if name in own_algorithms():
            from ops.lib.drafts.own_config import try_config  # a pipeline without such a folder does not load it

            try_config(name)
        else:
            algorithm_class(name)
    except ConfigError as error:
        raise ValueError(str(error)) from error


def _own_table(instance: Any, _attribute: object, table: Mapping[str, Any] | None) -> None:
    """A validator of `own`: the fields of a user's algorithm, with their types; other algorithms have no such table."""
    algorithm: str = getattr(instance, "algorithm", "")  # missing if its own value is wrong
    if algorithm in CONFIGS and table is not None:
        raise Clash(f"'own' is the table of an algorithm of your own, and \"{algorithm}\" is none", ["algorithm"])
    if algorithm in own_algorithms():
        try:
            algorithm_class(algorithm), own_options(algorithm)
        except ConfigError:
            return  # a mistake of the algorithm
        try:
            terms = _own_terms(algorithm, table)
        except (StructureError, ConfigError) as error:
            raise ValueError(f"'own': {error}") from error
        if terms is not None and (mistake := _sizes_mistake(algorithm, terms)):
            raise ValueError(f"'own': {mistake}")


def _sizes_mistake(algorithm: str, terms: Terms) -> str:
    """A text on why an algorithm's config class rejects the sizes of its table; "" if it accepts them."""
    place = f"{own_algorithms()[algorithm] / 'config.py'}: {type(terms).__name__}.sizes"
    try:
        algorithm_class(algorithm)(**terms.sizes())
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return f"{place}: {type(error).__name__}: {error}"
    return ""


def _own_terms(algorithm: str, table: Mapping[str, Any] | None) -> Terms | None:
    options = own_options(algorithm)
    if options is None and table:
        raise ConfigError(f"the algorithm {algorithm} has no class of options, so no fields")
    terms: Terms | None = None if options is None else structure(options, dict(table or {}))
    return terms


PHASE = validators.and_(validators.ge(0), validators.lt(1), _phases)


@op(
    version=1,
    run="ops.train_dflash.run:train_dflash",
    key_libraries=("torch", "transformers"),
    resumable=True,
    sequence_parallel=True,
    pool=True,
    gpu=True,
)
@frozen(kw_only=True)
class TrainDflash:
    """Train a DFlash draft on captured features with the target's frozen embedding and head."""

    features: TargetFeatures | None = None
    batches: BatchPlan
    target: TargetModel
    tokens: TokenShards | None = None
    warm_start: Draft | None = None
    continues: DraftCheckpoint | None = field(default=None, keyed_default=False)
    capture: Literal["stored", "online"] = field(
        default="stored",
        validator=CAPTURE,
        help="stored: use the features of capture_targets; online: capture features of the tokens during training, and "
        "store none",
    )
    capture_layers: int = field(
        default=LAYERS,
        validator=validators.and_(validators.ge(1), ONLINE_ONLY),
        help="online: target layers, spread from the 2nd to the 3rd-last, as num_layers of capture_targets",
    )
    target_layer_ids: tuple[int, ...] | None = field(
        default=None,
        validator=[
            validators.optional(ascending_layers),
            ONLINE_ONLY,
            Given("'{name}' and capture_layers: give only one of them", left_out={"capture_layers": LAYERS}),
        ],
        schema=LAYER_IDS,
        help="online: the target layers by number, instead of capture_layers",
    )
    capture_dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32",
        validator=ONLINE_ONLY,
        help="online: of the target's forward pass and, without feature_dtype, of the features",
    )
    feature_dtype: Literal["float8"] | None = field(
        default=None,
        validator=ONLINE_ONLY,
        keyed_default=False,
        help="online: float8: features as feature_dtype of capture_targets stores them; default: capture_dtype",
    )
    algorithm: str = field(
        default="dflash",
        validator=_known_algorithm,
        schema={"examples": list(CONFIGS)},
        help="dflash: every token by itself; dflash2: convolutions, and a walk over each slot's best tokens; dspark: a "
        "bias that knows the token before; lilicorr: a walk over each slot's best tokens, scored by a small "
        "transformer; or one of your own, whose folder [pipeline] drafts names",
    )
    dflash2: Dflash2Options | None = field(default=None, validator=_of_algorithm("dflash2"), help="see algorithm")
    dspark: DsparkOptions | None = field(default=None, validator=_of_algorithm("dspark"), help="see algorithm")
    lilicorr: LilicorrOptions | None = field(
        default=None, validator=_of_algorithm("lilicorr"), keyed_default=False, help="see algorithm"
    )
    own: dict[str, bool | int | float | str] | None = field(
        default=None,
        validator=_own_table,
        help="the fields of an algorithm of your own, those of the class of options in its config.py",
    )
    block_size: int = field(
        default=16,
        validator=validators.ge(2),
        help="tokens verified at once, the anchor among them: one less is proposed, so 8 for DSpark's blocks of 7",
    )
    mask_token_id: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(0)),
        help="id of the mask token, one that no text gives; default: the target's. Nothing above the training depends "
        "on it, so another one runs only the training again",
    )
    num_layers: int = field(default=5, validator=validators.ge(1), help="draft layers")
    num_heads: int | None = field(default=None, validator=AT_LEAST_1, help="query heads; default: the target's")
    num_kv_heads: int | None = field(
        default=None, validator=_kv_heads, schema={"minimum": 1}, help="key/value heads; default: the target's"
    )
    head_dim: int | None = field(default=None, validator=AT_LEAST_1, help="size of a head; default: the target's")
    intermediate_size: int | None = field(default=None, validator=AT_LEAST_1, help="of the MLP; default: the target's")
    sliding_layers: tuple[int, ...] = field(
        default=(),
        validator=[_sliding_layers, Given("'{name}' needs a sliding_window", given=("sliding_window",))],
        help="draft layers, counted from 0, with a sliding window: causal, over the last sliding_window tokens",
    )
    sliding_window: int | None = field(
        default=None,
        validator=[
            validators.optional(validators.ge(2)),
            Given(
                "'{name}' needs sliding_layers: the numbers of the sliding layers",
                given=("sliding_layers",),
            ),
        ],
        help="tokens that a query of a sliding layer sees, its own included",
    )
    rope_theta: float | None = field(
        default=None,
        validator=validators.optional(validators.gt(0)),
        help="base of the rotary frequencies; default: the target's",
    )
    num_anchors: int = field(
        default=512, validator=validators.ge(1), help="maximum number of anchors drawn per sequence"
    )
    gamma: float | None = field(
        default=None,
        validator=validators.optional(validators.gt(0)),
        help="decay of the slots' weights; default: 7 / 5 / 4 for block sizes 16 and 17 / 10 / 8, else half the "
        "block size",
    )
    loss: LossKind = field(
        default="dflash",
        help="cross-entropy with DFlash's weights; D-PACE's weights from the draft's own confidence; focal; or a "
        "distance from the target's distribution: kl, l1, or one of the LK losses (lk: a blend of both, nla: -log of "
        "the overlap). For a distance, stored features need final_hidden of capture_targets",
    )
    focal_gamma: float = field(default=2.0, validator=validators.ge(0), help="exponent of the focal loss")
    dpace_alpha: float = field(
        default=0.5,
        validator=validators.and_(validators.ge(0), validators.le(1)),
        help="smoothing of the confidences in D-PACE",
    )
    dtype: Literal["float32", "bfloat16", "float64"] = field(
        default="float32",
        help="of the computation; weights, softmax and loss are float32 at least. bfloat16 is for GPUs",
    )
    optimizer: Literal["adamw", "muon"] = field(
        default="adamw",
        help="muon: for hidden matrices, with AdamW for norms, biases, and an algorithm's tables and kernels",
    )
    lr: float = field(
        default=6e-4, validator=validators.and_(validators.gt(0), validators.lt(1)), help="peak learning rate"
    )
    weight_decay: float = field(
        default=0.0, validator=validators.ge(0), help="on matrices only, not on the fixed kernels of dflash2"
    )
    schedule: Literal["cosine", "wsd"] = field(
        default="cosine", help="of the learning rate: half a cosine, or warm-up, stable, decay"
    )
    warmup_ratio: float = field(default=0.04, validator=PHASE, help="share of the steps")
    decay_ratio: float = field(
        default=0.2, validator=PHASE, help='share of the steps that schedule = "wsd" decays over'
    )
    min_lr_ratio: float = field(default=0.0, validator=SHARE, help="last learning rate as a share of the peak")
    grad_clip: float = field(default=1.0, validator=validators.gt(0), help="maximum global norm of the gradient")
    ema_decay: float | None = field(
        default=None,
        validator=validators.optional(validators.and_(validators.gt(0), validators.lt(1))),
        help="keep an exponential moving average of the weights, and measure and export it",
    )
    max_steps: int | None = field(default=None, validator=AT_LEAST_1, help="stop before the plan of batches ends")
    pause_after: int | None = field(
        default=None,
        validator=AT_LEAST_1,
        keyed_default=False,
        help="end after so many steps of this very training, whose learning rates do not change by it, and keep its "
        "state, from which a node with `continues` goes on as if there had been no pause",
    )
    micro_batch_tokens: int = field(
        default=16384, validator=validators.ge(1), neutral=True, help="padded tokens in one forward pass of the draft"
    )
    anchor_chunk: int = field(
        default=512,
        validator=validators.ge(1),
        neutral=True,
        help="blocks in one pass: memory does not grow with further anchors; 32 is nearly as fast on a CPU",
    )
    activation_checkpointing: bool = field(
        default=False, neutral=True, help="compute layers twice instead of keeping their activations"
    )
    compile: bool | None = field(
        default=None, neutral=True, help="use torch.compile for the layers; default: only on a GPU"
    )
    sp_exchange: str = field(
        default="auto",
        validator=known_exchange,
        neutral=True,
        help='with launch.sp_degree > 1: "ulysses", "gather", or "auto" for the one that sends fewer bytes',
    )
    capture_batch_tokens: int = field(
        default=8192,
        validator=validators.and_(validators.ge(1), ONLINE_ONLY),
        neutral=True,
        help="online: padded tokens in one forward pass of the target",
    )
    buffer_batches: int = field(
        default=2,
        validator=validators.ge(1),
        neutral=True,
        help="maximum number of prepared micro-batches; one more is being read or captured. With launch.pool: of "
        "requested ones; 2 * workers * sp_degree / nproc keeps all workers busy",
    )
    checkpoint_every: int = field(default=50, validator=validators.ge(1), neutral=True, help="steps")
    keep_checkpoints: int = field(
        default=2,
        validator=validators.ge(1),
        neutral=True,
        help="checkpoints to keep, the newest ones; the selected one is kept as well",
    )
    max_nonfinite: int = field(
        default=3,
        validator=validators.ge(1),
        neutral=True,
        help="consecutive steps with a non-finite loss or gradient after which training fails; fewer are skipped",
    )
    log_every: int = field(
        default=5, validator=validators.ge(1), neutral=True, help="steps; a logged train/... is the mean of them"
    )
    eval_every: int | None = field(
        default=None,
        validator=AT_LEAST_1,
        help="steps between measurements on the val split: loss and accuracy and, with tokens, tau; default: loss and "
        "accuracy, only at the end",
    )
    eval_prompts: int = field(
        default=8,
        validator=validators.and_(validators.ge(0), *TAU_ONLY),
        help="with eval_every: val prompts of each category to decode for tau, at even distances in the split, so that "
        'every source, and every "category" of the rows, has its share; 0: no tau',
    )
    eval_new_tokens: int = field(
        default=64,
        validator=validators.and_(validators.ge(1), *TAU_ONLY),
        help="with eval_every: maximum number of generated tokens per prompt",
    )
    select: Literal["tau", "loss", "last"] = field(
        default="last",
        validator=_select,
        help="the step whose weights are exported: the measured one with the highest tau or the lowest loss on the val "
        "split, or the last step",
    )
    seed: int | None = seed_field()
    output = DraftCheckpoint
    answers = ("limit",)

    @property
    def terms(self) -> Terms | None:
        """The chosen algorithm's table; None for plain DFlash."""
        if self.algorithm not in CONFIGS:
            return _own_terms(self.algorithm, self.own)
        chosen: Terms | None = getattr(self, self.algorithm, None)
        return chosen

    @property
    def needs_teacher(self) -> bool:
        """Whether the loss needs the target's distribution, computed from its final hidden states."""
        return needs_teacher(self.loss, self.terms)

    def chosen_code(self) -> tuple[str, ...]:
        return code_of((self.algorithm,), "model", "loss")

    @property
    def measures_tau(self) -> bool:
        return self.eval_every is not None and self.eval_prompts > 0 and self.tokens is not None

    def idle_workers(self, workers: int, groups: int) -> str:
        """A sentence on workers of a pool that can have nothing to do; empty if all can have.

        groups: of ranks that share every sequence; each requests `buffer_batches` micro-batches.
        """
        busy = self.buffer_batches * groups
        if busy >= workers:
            return ""
        return (
            f"buffer_batches = {self.buffer_batches} keeps at most {busy} of {workers} pool workers busy: "
            f"set it to {-(-2 * workers // groups)}, or use fewer workers"
        )

    @staticmethod
    def mistakes_with_nodes_above(values: Mapping[str, Any], above: Callable[..., Mapping[str, Any]]) -> dict[str, str]:
        """Mistakes against the training that this one continues: no state there, or another training than this."""
        earlier = above("continues")
        if not earlier:
            return {}
        if earlier.get("pause_after") is None:
            return {"continues": "that training has no pause_after, so it keeps no state to go on from"}
        wrong = {
            name: f"{values[name]}, but {earlier[name]} in the training that this one continues: give both the same"
            for name, entry in op_of(TrainDflash).fields.items()
            if not entry.neutral and name != PAUSE
            if name in values and name in earlier and values[name] != earlier[name]
        }
        end = values.get(PAUSE)
        if end is not None and end < earlier[PAUSE]:
            wrong[PAUSE] = f"{end}, but the training that this one continues has {earlier[PAUSE]} steps already"
        return wrong

    @staticmethod
    def launch_mistakes(values: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, str]:
        """Mistakes between config and launch: stored features need no pool."""
        if launch.get("pool") is not None and values.get("capture", "stored") != "online":
            return {"launch.pool": 'a pool captures features online: set capture = "online", or leave pool out'}
        return {}
