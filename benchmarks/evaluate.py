"""Decoding in batches against one prompt at a time, plain and speculative: CPU seconds for the same answers.

    python benchmarks/evaluate.py                                  # a random target of the built-in pipeline's size
    python benchmarks/evaluate.py --target T --draft D --tokens K  # artifacts of a run: folders of its store
    python benchmarks/evaluate.py --prompts 32 --batches 4 16 --rounds 5 --json figures.json
    python benchmarks/evaluate.py --device cuda --hidden 1024 --layers 16    # in bfloat16, wall-clock seconds

One by one are the slow references, `decode_plain` and `decode_speculative`. A round runs every side once, in an order
that rotates from round to round; ratios are medians of the rounds' ratios. Answers of the two are compared: how many
differ, and how close the two best logits were at the first differing token. A random draft has almost nothing
accepted, so with it a speculative step yields one token.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from attrs import evolve, frozen

from benchmarks.capture import Shapes, make_samples, small_target
from benchmarks.harness import in_rounds, median_ratio, parser, save_figures, table, verdict
from benchmarks.sides.ours import draft_config
from benchmarks.sides.problem import Sizes
from ops.artifacts import TargetModel, TokenShards
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.backbone.load import load_draft, random_draft
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.drafts.decoding.decode import Decoded, decode_plain, decode_speculative
from ops.lib.drafts.decoding.decode_batch import DecodeSettings, decode_plain_batch, decode_speculative_batch
from ops.lib.target.model import Target

GOAL = 0.5
Side = Callable[[], list[Decoded]]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    torch.set_num_threads(arguments.threads)
    case = from_run(arguments) if arguments.target else random_case(arguments)
    figures, rows = {}, [("decoding", "batch", "one by one", "in batches", "ratio", f"goal <= {GOAL:g}", "differ")]
    for kind in ("plain", "speculative"):
        sides = sides_of(case, kind, arguments.new_tokens, arguments.batches)
        answers = {name: decode() for name, decode in sides.items()}  # warm up; they are the same in every round
        timed = {name: partial(seconds_of, decode, arguments.device) for name, decode in sides.items()}
        seconds = in_rounds(timed, arguments.rounds)
        for size in arguments.batches:
            ratio = median_ratio(seconds[size], seconds[None])
            differ = [margin for pair in zip(answers[None], answers[size], strict=True) for margin in difference(*pair)]
            figures[f"{kind} {size}"] = {
                "single": seconds[None],
                "batched": seconds[size],
                "ratio": ratio,
                "answers": len(answers[size]),
                "tokens": sum(len(one.tokens) for one in answers[size]),
                "margins_of_differing": differ,
            }
            times = [f"{statistics.median(seconds[side]):.2f} s" for side in (None, size)]
            nearness = f"{len(differ)} of {len(answers[size])}" + (f", margins to {max(differ):.0e}" if differ else "")
            rows.append((kind, str(size), *times, f"{ratio:.2f}", verdict(ratio <= GOAL), nearness))
        print(f"{kind}: {statistics.mean(len(one.tokens) for one in answers[None]):.1f} tokens an answer", flush=True)
    steps = sum(one.steps for one in answers[None])
    print(f"tau {sum(one.generated for one in answers[None]) / max(steps, 1):.2f}")
    print(table(rows))
    unit = "CPU seconds" if arguments.device == "cpu" else f"seconds on {arguments.device}"
    print(f"{len(case.samples)} prompts, {arguments.threads} threads, {arguments.rounds} rounds; {unit}")
    save_figures(arguments.json, figures)
    return 0


@frozen
class Case:
    """A target, a draft, and the prompts to decode."""

    target: Target
    draft: DraftModel
    samples: list[TokenSample]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__, rounds=3)
    for name in ("target", "draft", "tokens"):
        options.add_argument(f"--{name}", type=Path, metavar="FOLDER", help="an artifact; all three or none")
    options.add_argument("--prompts", type=int, default=64)
    options.add_argument("--new-tokens", type=int, default=64, help="most tokens of an answer after its first")
    options.add_argument("--batches", type=int, nargs="+", default=(8, 32), help="prompts of a batch, one row each")
    options.add_argument("--hidden", type=int, default=128, help="hidden size of a random target")
    options.add_argument("--layers", type=int, default=8, help="and its number of layers")
    options.add_argument("--threads", type=int, default=1)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = options.parse_args(argv)
    if len({bool(arguments.target), bool(arguments.draft), bool(arguments.tokens)}) > 1:
        options.error("--target, --draft and --tokens: all three or none")
    return arguments


def from_run(arguments: argparse.Namespace) -> Case:
    """The case of a run's artifacts: its target, its draft, and test prompts of each category in turn."""
    reader = TokenReader(TokenShards(arguments.tokens, "benchmark"), "test")
    seen: Counter[str] = Counter()
    turns = []
    for place, record in enumerate(reader.records):
        turns.append((seen[record["category"]], place))
        seen[record["category"]] += 1
    samples = [reader.sample(place) for _, place in sorted(turns)[: arguments.prompts]]
    target = Target.load(TargetModel(arguments.target, "benchmark"), arguments.device, _dtype(arguments.device))
    return Case(target, load_draft(arguments.draft, arguments.device, _dtype(arguments.device)), samples)


def random_case(arguments: argparse.Namespace) -> Case:
    """A case with random weights and prompts, half of them with an image; one token in 40 ends an answer."""
    target = small_target(arguments.hidden, arguments.layers)
    with torch.no_grad():  # large enough that answers do not repeat
        for weight in target.model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=2 * weight.shape[1] ** -0.5)
    device, dtype, vocabulary = torch.device(arguments.device), _dtype(arguments.device), Shapes().vocabulary
    target.model.to(device, dtype)
    info = {**target.info, "eos_token_ids": list(range(39, vocabulary, 40))}
    target = evolve(target, info=info, device=device)
    sizes = Sizes(
        context=2048,
        anchors=0,
        hidden=arguments.hidden,
        layers=1,
        heads=max(1, arguments.hidden // 32),
        kv_heads=max(1, arguments.hidden // 64),
        intermediate=3 * arguments.hidden,
        vocabulary=vocabulary,
        block=8,
        target_layers=arguments.layers - 3,
    )
    samples = [
        evolve(sample, prompt_tokens=len(sample.input_ids))
        for sample in make_samples(arguments.prompts, (16, 48), (False, True))
    ]
    return Case(target, random_draft(draft_config(sizes), 0, arguments.device, dtype), samples)


def _dtype(device: str) -> torch.dtype:
    """The dtype to decode in: bfloat16 on a GPU, float32 on a CPU."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def seconds_of(decode: Side, device: str) -> float:
    """Measure one decoding: CPU seconds, or on a GPU wall-clock seconds until it is idle."""
    if device == "cpu":
        start = time.process_time()
        decode()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    decode()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def sides_of(case: Case, kind: str, new_tokens: int, batches: Sequence[int]) -> dict[int | None, Side]:
    """The functions to measure, by the number of prompts in a batch; None: the references, one prompt at a time."""
    settings = DecodeSettings(new_tokens)

    def single() -> list[Decoded]:
        if kind == "plain":
            return [decode_plain(case.target, sample, new_tokens) for sample in case.samples]
        return [decode_speculative(case.target, case.draft, sample, new_tokens) for sample in case.samples]

    def batched(size: int) -> list[Decoded]:
        cut = [case.samples[start : start + size] for start in range(0, len(case.samples), size)]
        if kind == "plain":
            return [one for batch in cut for one in decode_plain_batch(case.target, batch, settings)]
        return [one for batch in cut for one in decode_speculative_batch(case.target, case.draft, batch, settings)]

    return {None: single, **{size: lambda size=size: batched(size) for size in batches}}


def difference(single: Decoded, batched: Decoded) -> list[float]:
    """The margin between the two best logits at the first token that differs; empty if no token differs."""
    places = range(min(len(single.tokens), len(batched.tokens)))
    return [single.margins[place] for place in places if single.tokens[place] != batched.tokens[place]][:1]


if __name__ == "__main__":
    raise SystemExit(main())
