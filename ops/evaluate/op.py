"""Declaration of `evaluate`: real speculative decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import frozen, validators

from dsl.errors import DataError
from dsl.op import field, op, seed_field
from ops.artifacts import Draft, Report, TargetModel, TokenShards
from ops.evaluate.rivals import RIVALS
from ops.lib.drafts.algorithms import algorithm_names, code_of

LEAST_TEMPERATURE = 0.001  # nearly greedy; dividing logits by much less overflows
# Four units in the last place of a logit between 16 and 32 in half precision, fifty in float32.
TIE_MARGINS = {"float32": 1e-4, "float16": 0.0625, "bfloat16": 0.5}


def _temperature(_instance: object, _attribute: object, temperature: float) -> None:
    """A validator: the temperature is 0, or a number that logits can be divided by."""
    if not math.isfinite(temperature) or 0 < temperature < LEAST_TEMPERATURE:
        raise ValueError(
            f"'temperature': {temperature:g} is neither 0 nor a finite number of at least {LEAST_TEMPERATURE:g}"
        )


@op(
    version=2,
    run="ops.evaluate.run:evaluate",
    key_libraries=("torch", "transformers", "numpy", "scipy", "tokenizers", "pillow"),
    resumable=True,
    single_process=True,
    gpu=True,
)
@frozen(kw_only=True)
class Evaluate:
    """Decode prompts with the draft and the target; measure tau and check that nothing is lost."""

    draft: Draft | None = None
    target: TargetModel
    tokens: TokenShards
    mtp: bool = field(
        default=False,
        keyed_default=False,
        help="decode with the target's own MTP head instead of a draft, of Qwen3.5 and Qwen3-Next (docs/evaluation.md)",
    )
    eagle3: str | None = field(
        default=None,
        external=True,
        keyed_default=False,
        help="decode with an EAGLE-3 draft instead, of a folder as SGLang serves it (docs/evaluation.md)",
    )
    split: Literal["val", "test"] = field(default="test", help="the split of the prompts, without a benchmark")
    prompts: Literal["last", "each"] = field(
        default="last",
        keyed_default=False,
        help='of a split: "last": each conversation is asked for its last answer; "each": for every answer of it, '
        'in the context in which a server asks for it, which needs tokens with contexts = "served"',
    )
    benchmark: str | None = field(
        default=None,
        external=True,
        help="prompts from a file instead of the split: JSON lines with id, category, messages and, if there are "
        "any, images, or the file of a published benchmark (docs/evaluation.md)",
    )
    benchmark_form: Literal["auto", "messages", "turns", "humaneval", "gsm8k", "math", "bfcl"] = field(
        default="auto", keyed_default=False, help="the form of the benchmark's rows; auto: by the keys of the first one"
    )
    benchmark_prompt: Literal["as-is", "z-lab"] = field(
        default="as-is",
        keyed_default=False,
        help="z-lab: with the words around questions of GSM8K, MATH-500 and HumanEval that z-lab's figures have",
    )
    first_turn: bool = field(
        default=False,
        keyed_default=False,
        help="only the first turn of each row of a benchmark is asked; default: each, after the target's own answers",
    )
    max_prompts: int | None = field(
        default=64,
        validator=validators.optional(validators.ge(1)),
        help="prompts of each category, image and text or those of the benchmark, at even distances in the split or "
        'file: every source, and every "category" of the rows, has its share; none: all',
    )
    max_new_tokens: int = field(default=128, validator=validators.ge(1), help="generated tokens per prompt, at most")
    temperature: float = field(
        default=0.0,
        validator=(validators.ge(0), _temperature),
        help="0: greedy, and answers are checked token by token; above: speculative sampling from the target's own "
        "distribution, whose answers cannot be checked",
    )
    temperatures: tuple[float, ...] = field(
        default=(),
        keyed_default=False,
        validator=validators.deep_iterable(validators.and_(validators.ge(0), _temperature)),
        help="further temperatures at which tau is measured, one after the other; answers are checked at 0",
    )
    block_size: int | None = field(
        default=None,
        validator=validators.optional(validators.ge(2)),
        help="slots of a block at inference, the anchor's included; default and maximum: that of the training; with "
        "mtp or eagle3 any number, 4 by default",
    )
    batch_size: int = field(
        default=8,
        neutral=True,
        validator=validators.ge(1),
        help="prompts decoded at the same time; the speed-up is measured at this size",
    )
    batch_sizes: tuple[int, ...] = field(
        default=(),
        keyed_default=False,
        validator=validators.deep_iterable(validators.ge(1)),
        help="further batch sizes at which the speed-up is measured, one after the other",
    )
    block_sizes: tuple[int, ...] = field(
        default=(),
        keyed_default=False,
        validator=validators.deep_iterable(validators.ge(2)),
        help="further block sizes at which tau, and the speed-up at each batch size, are measured; at most that of the "
        "training",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = field(
        default="float32", help="of the forward passes of target and draft"
    )
    random_draft: bool = field(default=True, help="measure a randomly initialised draft too; not with mtp or eagle3")
    tie_margin: float | None = field(
        default=None,
        validator=validators.optional(validators.ge(0)),
        help="the first difference of two answers is a tie and no error if the logits of both tokens are less than "
        "this below the best one, in plain and speculative decoding; default: 0.0001 in float32, 0.0625 in "
        "float16, 0.5 in bfloat16",
    )
    bootstrap: int = field(default=2000, validator=validators.ge(1), help="resamplings for the 95 % intervals")
    seed: int | None = seed_field()
    output = Report
    shows_results = True
    judged_by = "eval/tau"
    main_figures = (
        "eval/(tau(_(?!random|unclipped|context_|turn_|kind_|block_).+)?|speedup|lossless_errors|ties|prompts)"
    )
    answers = ("good", "safe")

    @staticmethod
    def mistakes_with_nodes_above(values: Mapping[str, Any], above: Callable[..., Mapping[str, Any]]) -> dict[str, str]:
        """Mistakes against nodes above: blocks larger than in training, or a split that ingest leaves empty.

        Each is checked only if the pipeline has that node. Fields of a benchmark without one are mistakes too, and
        every answer asked of tokens without contexts of their own, and none or several of a draft, mtp and eagle3.
        """
        trained = above("draft", "draft").get("block_size")
        wrong = {}
        chosen = [name for name in ("draft", *RIVALS) if values.get(name)]
        if not chosen and "draft" in values:
            wrong["draft"] = (
                'the required key "draft" is missing: name the draft\'s node, or set mtp = true to evaluate the '
                "target's own MTP head, or eagle3 to evaluate an EAGLE-3 draft"
            )
        if len(chosen) > 1:
            instead = "a draft" if chosen[0] == "draft" else chosen[0]
            wrong[chosen[-1]] = f"{RIVALS[chosen[-1]]} is evaluated instead of {instead}: leave one of them out"
        for name, sizes in (
            ("block_size", (values.get("block_size"),)),
            ("block_sizes", values.get("block_sizes", ())),
        ):
            size = max(filter(None, sizes), default=None)
            if size is not None and trained is not None and size > trained:
                wrong[name] = f"{size} is more than the {trained} that the draft is trained with: use 2 to {trained}"
        if values.get("benchmark") is None:
            given = {name: values.get(name) for name in ("benchmark_form", "benchmark_prompt", "first_turn")}
            wrong |= {
                name: "is about a benchmark: set benchmark, or leave it out"
                for name, value in given.items()
                if value not in (None, "auto", "as-is", False)
            }
        if values.get("prompts") == "each":
            contexts = above("tokens").get("contexts")
            if values.get("benchmark") is not None:
                wrong["prompts"] = "is about the split, and a benchmark is asked: leave one of them out"
            elif contexts not in (None, "served"):
                wrong["prompts"] = '"each" needs contexts = "served" in the node of tokens'
        only, split = above("tokens", "samples", "samples").get("split"), values.get("split")
        if values.get("benchmark") is None and None not in (only, split) and only != split:
            wrong["split"] = f'has no samples: ingest puts all of them into "{only}"'
        return wrong

    @property
    def rival(self) -> str | None:
        """The field of RIVALS that is set; None where a draft is evaluated."""
        return next((name for name in RIVALS if getattr(self, name)), None)

    @property
    def largest_tie(self) -> float:
        """The largest difference of logits that counts as a tie: tie_margin, or the dtype's default."""
        return TIE_MARGINS[self.dtype] if self.tie_margin is None else self.tie_margin

    @property
    def further_passes(self) -> tuple[tuple[float, int], ...]:
        """Temperature and batch size of each pass over the prompts after the first one."""
        temperatures = dict.fromkeys((self.temperature, *self.temperatures))
        sizes = dict.fromkeys((self.batch_size, *self.batch_sizes))
        every = [*((each, self.batch_size) for each in temperatures), *((self.temperature, each) for each in sizes)]
        return tuple(each for each in every if each != (self.temperature, self.batch_size))

    def external_files(self) -> Mapping[str, Path | None]:
        """The files that the benchmark names: images, and functions of BFCL."""
        if self.benchmark is None or not Path(self.benchmark).is_file():
            return {}
        from ops.evaluate.benchmark_rows import Benchmark, named_files  # slow

        try:
            return dict(named_files(Benchmark.of(self)))
        except DataError:  # told by missing_here, beside the mistakes of other nodes
            return {}

    def chosen_libraries(self) -> tuple[str, ...]:
        """Libraries in the key besides key_libraries: those that read a benchmark and render its messages."""
        if self.benchmark is None:
            return ()
        return ("jinja2", "pyarrow") if self.benchmark.lower().endswith(".parquet") else ("jinja2",)

    def chosen_code(self) -> tuple[str, ...]:
        """The code of all draft algorithms, since the draft's is known only once it exists."""
        return code_of(algorithm_names(), "model")
