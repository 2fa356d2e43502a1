"""Decode held-out prompts by real speculative decoding, and measure tau.

Every prompt is decoded plainly as well, both for the check that nothing is lost and for the speed-up. The two take
turns prompt by prompt, so that a slow moment of the machine hits both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from attrs import asdict, frozen
from matplotlib.figure import Figure

from dsl.errors import DataError, StopRequested
from dsl.stage import Stage
from ops.dflash.decode import Decoded, decode_plain, decode_speculative
from ops.dflash.load import load_draft, random_draft
from ops.dflash.model import DraftModel
from ops.evaluate.op import Evaluate
from ops.evaluate.statistics import acceptance_by_slot, acceptance_length
from ops.files import write_json, write_jsonl
from ops.load_target.model import Target, check_images_fit, check_tokens_fit
from ops.tokenize_chat.shards import TokenReader, TokenSample


@frozen
class PromptResult:
    """What was decoded for one prompt, and in how many seconds."""

    sample: TokenSample
    plain: Decoded
    speculative: Decoded
    random: Decoded | None
    plain_seconds: float
    speculative_seconds: float


@frozen
class Difference:
    """The first token at which a speculative answer leaves the plain one."""

    sample_id: str
    position: int
    plain_token: int | None
    speculative_token: int | None
    margin: float


def evaluate(config: Evaluate, stage: Stage) -> None:
    """Write the Report artifact; raises DataError where speculative decoding changed an answer beyond a tie."""
    dtype = getattr(torch, config.dtype)
    target = Target.load(stage.inputs["target"], stage.device, dtype)
    draft = load_draft(stage.inputs["draft"].path, stage.device, dtype)
    untrained = random_draft(draft.config, config.seed or 0, stage.device, dtype) if config.random_draft else None
    reader = TokenReader(stage.inputs["tokens"], config.split)
    check_tokens_fit(reader.info, target.info)
    check_images_fit(reader, target.family)
    samples = choose_prompts(reader, config.max_prompts)
    if not samples:
        raise DataError(
            f'the split "{config.split}" holds no samples to evaluate; give samples a "split" in the JSONL file, '
            "or raise test_fraction or val_fraction of ingest"
        )
    results: list[PromptResult] = []
    stage.progress(0, len(samples))
    for sample in samples:
        if stage.stop_requested():
            raise StopRequested("evaluation stopped; it starts again from the first prompt")
        results.append(decode_prompt(target, draft, untrained, sample, config.max_new_tokens))
        stage.progress(len(results), len(samples))
    differences = [difference for result in results for difference in first_differences(result)]
    errors = [found for found in differences if found.margin >= config.tie_margin]
    report = summarise(config, draft.config.block_size, results, len(differences) - len(errors), len(errors))
    report["inputs"] = {name: stage.inputs[name].digest for name in ("draft", "target", "tokens")}
    write_json(stage.out_dir / "report.json", report)
    write_jsonl(stage.out_dir / "prompts.jsonl", [prompt_row(result) for result in results])
    measured = speed(results)
    write_json(stage.out_dir / "measurements.json", measured)
    stage.log(metrics(report) | {f"eval/{name}": value for name, value in measured.items()}, step=0)
    stage.figure("acceptance_by_slot", slots_figure(report))
    if errors:
        raise DataError(lossless_message(errors, len(results)))


def choose_prompts(reader: TokenReader, max_prompts: int | None) -> list[TokenSample]:
    """The first `max_prompts` samples of each category, in the order of the split."""
    taken: dict[str, int] = {}
    chosen = []
    for index, record in enumerate(reader.records):
        category = record["category"]
        if max_prompts is None or taken.get(category, 0) < max_prompts:
            taken[category] = taken.get(category, 0) + 1
            chosen.append(reader.sample(index))
    return chosen


def decode_prompt(
    target: Target, draft: DraftModel, untrained: DraftModel | None, sample: TokenSample, max_new_tokens: int
) -> PromptResult:
    plain, plain_seconds = timed(lambda: decode_plain(target, sample, max_new_tokens))
    speculative, speculative_seconds = timed(lambda: decode_speculative(target, draft, sample, max_new_tokens))
    by_chance = None
    if untrained is not None:
        by_chance = decode_speculative(target, untrained, sample, max_new_tokens)
    return PromptResult(sample, plain, speculative, by_chance, plain_seconds, speculative_seconds)


def timed(decode: Callable[[], Decoded]) -> tuple[Decoded, float]:
    """The answer and the wall-clock seconds it took, the device's work included."""
    synchronise()
    start = time.perf_counter()
    answer = decode()
    synchronise()
    return answer, time.perf_counter() - start


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_differences(result: PromptResult) -> Iterator[Difference]:
    """For each draft, where its answer first differs from the plain one; nothing where they are equal.

    The margin is that of the plain answer's two best logits at the place: below `tie_margin` the two forward
    passes only rounded differently.
    """
    plain = result.plain
    for answer in (result.speculative, result.random):
        if answer is None or answer.tokens == plain.tokens:
            continue
        pairs = zip(plain.tokens, answer.tokens, strict=False)
        shorter = min(len(plain.tokens), len(answer.tokens))
        position = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
        yield Difference(
            sample_id=result.sample.id,
            position=position,
            plain_token=plain.tokens[position] if position < len(plain.tokens) else None,
            speculative_token=answer.tokens[position] if position < len(answer.tokens) else None,
            margin=plain.margins[position] if position < len(plain.margins) else float("inf"),
        )


def lossless_message(errors: Sequence[Difference], prompts: int) -> str:
    shown = "\n".join(
        f"  sample {error.sample_id}: token {error.position} is {error.speculative_token}, plain decoding gives "
        f"{error.plain_token} by a margin of {error.margin:.2e}"
        for error in errors[:10]
    )
    return (
        f"speculative decoding changed {len(errors)} of {prompts} answers beyond a tie; the draft and the target do "
        f"not fit together, or tie_margin is too small for this dtype:\n{shown}"
    )


def summarise(
    config: Evaluate, block_size: int, results: Sequence[PromptResult], ties: int, errors: int
) -> dict[str, Any]:
    """The content of report.json."""
    trained = [result.speculative for result in results]
    untrained = [result.random for result in results if result.random is not None]
    report: dict[str, Any] = {
        "split": config.split,
        "dtype": config.dtype,
        "max_new_tokens": config.max_new_tokens,
        "tie_margin": config.tie_margin,
        "block_size": block_size,
        "prompts": len(results),
        "lossless": {"errors": errors, "ties": ties},
        "tau": by_category(config, results, trained),
        "acceptance_by_slot": acceptance_by_slot(trained, block_size),
    }
    if untrained:
        report["tau_random"] = by_category(config, results, untrained)
        report["acceptance_by_slot_random"] = acceptance_by_slot(untrained, block_size)
    return report


def by_category(
    config: Evaluate, results: Sequence[PromptResult], answers: Sequence[Decoded]
) -> dict[str, dict[str, float]]:
    """tau over all prompts under "all", and for each category under its name."""
    groups: dict[str, list[Decoded]] = {"all": list(answers)}
    for result, answer in zip(results, answers, strict=True):
        groups.setdefault(result.sample.category, []).append(answer)
    return {
        name: asdict(acceptance_length(group, config.bootstrap, config.seed or 0)) for name, group in groups.items()
    }


def speed(results: Sequence[PromptResult]) -> dict[str, float]:
    """Wall-clock figures, as measured."""
    plain = sum(result.plain_seconds for result in results)
    speculative = sum(result.speculative_seconds for result in results)
    return {"plain_seconds": plain, "speculative_seconds": speculative, "speedup": plain / speculative}


def metrics(report: dict[str, Any]) -> dict[str, float]:
    """The report's figures under the names they have in MLflow."""
    flat: dict[str, float] = {"eval/prompts": report["prompts"]}
    flat |= {"eval/lossless_errors": report["lossless"]["errors"], "eval/ties": report["lossless"]["ties"]}
    for kind in ("tau", "tau_random"):
        for category, tau in report.get(kind, {}).items():
            name = f"eval/{kind}" if category == "all" else f"eval/{kind}_{category}"
            flat |= {name: tau["tau"], f"{name}_low": tau["low"], f"{name}_high": tau["high"]}
    flat["eval/tau_unclipped"] = report["tau"]["all"]["unclipped"]
    for slot, share in enumerate(report["acceptance_by_slot"], start=1):
        flat[f"eval/acceptance_slot_{slot:02d}"] = share
    return flat


def prompt_row(result: PromptResult) -> dict[str, Any]:
    """One line of prompts.jsonl."""
    return {
        "id": result.sample.id,
        "category": result.sample.category,
        "tokens": list(result.plain.tokens),
        "accepted": list(result.speculative.accepted),
        "accepted_random": None if result.random is None else list(result.random.accepted),
        "identical": result.speculative.tokens == result.plain.tokens,
    }


def slots_figure(report: dict[str, Any]) -> Figure:
    """Acceptance by position in the block, the random draft beside the trained one."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for key, label in (("acceptance_by_slot", "trained draft"), ("acceptance_by_slot_random", "random draft")):
        if key in report:
            axes.plot(range(1, len(report[key]) + 1), report[key], marker="o", label=label)
    axes.set(xlabel="slot of the block", ylabel="share of steps in which it was accepted", ylim=(-0.02, 1.02))
    axes.set_title(f"tau {report['tau']['all']['tau']:.2f} of {report['block_size']}")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
