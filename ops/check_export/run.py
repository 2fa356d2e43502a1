"""The gate: check a serving directory against the contract, serve prompts with SGLang, and write what is shipped.

The static stage needs no SGLang and always runs. The live stage runs SGLang's own code; `live` decides whether it must.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from dsl.errors import DataError
from dsl.files import replace_file
from dsl.stage import Stage
from ops.check_export.conflicts import report_mistakes
from ops.check_export.op import WORKERS, CheckExport, without_worker
from ops.check_export.outcome import Outcome, card_text
from ops.check_export.served_prompts import LiveResult, LiveUnavailable, Prompt
from ops.export_draft.card import (
    UNREAD,
    prompt_warnings,
    rotary_warning,
    with_measured,
    with_served_tag,
)
from ops.lib.data.batching import spread_over_each
from ops.lib.data.files import link_or_copy, read_json, read_jsonl, read_text, write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.backbone.config import algorithm_of
from ops.lib.drafts.backbone.contract import embedding_warnings, refuse
from ops.lib.drafts.backbone.load import CONFIG, WEIGHTS
from ops.lib.drafts.backbone.serving_contract import CARD, SPECULATORS, check_serving, formats_of, is_imported
from ops.lib.forecasts import ReportForecast, by_field, refuse_conflicts
from ops.lib.sglang.model_classes import not_run, served_class
from ops.lib.sglang.serve_command import number_formats
from ops.lib.sglang.version import require_sglang, versions_of
from ops.lib.target.model import read_config
from ops.lib.vision.family_config import is_qwen

SERVED = "served.jsonl"


def check_export(config: CheckExport, stage: Stage) -> None:
    """Write the CheckedDraft artifact.

    Raises DataError if the draft breaks the contract, if SGLang's results differ from those of `evaluate`, or if the
    report is of another draft.
    """
    draft, target, tokens = (stage.inputs[name] for name in ("draft", "target", "tokens"))
    report = read_json(stage.inputs["report"].path / "report.json")
    check_report(report, stage.inputs)
    check_serving(draft.path, target, tokens)
    rows = list(read_jsonl(stage.inputs["report"].path / "prompts.jsonl"))
    prompts = choose_prompts(config, stage, report, rows)
    served, skipped = serve(config, stage, prompts)
    serving, of_tokens = read_json(draft.path / CONFIG), read_json(tokens.path / "tokens.json")
    engine = algorithm_of(serving).engine
    target_config = read_config(target.path / "model")
    of_servers = (
        *image_warnings(of_tokens),
        *engine_warnings(of_tokens, serving),
        *server_arg_warnings(serving),
        *rotary_warnings(serving),
        *embedding_warnings(serving, target_config).values(),
    )
    outcome = Outcome(
        report=report,
        prompts=prompts,
        engine=engine,
        served=served,
        skipped=skipped,
        warnings=of_servers if engine else (),
        of_target=None if is_qwen(target_config) else engine_sentence(config, target_config),
    )
    outcome.show(stage)
    stage.log(outcome.metrics(), step=0)
    if served is not None and served.mistakes:
        kept = stage.work_dir / SERVED
        write_jsonl(kept, outcome.served_rows())
        more = f"SGLang's answer to each prompt: {kept}"
        refuse(draft.path, served.mistakes, more, is_imported=is_imported(draft.path))
    write(stage, outcome, is_served=bool(engine) and serves_target(config, target_config))
    stage.progress(1, 1)


def check_report(report: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
    """Check that a report was made with the gate's inputs and serving settings. Raises DataError.

    `check_serving` checks the draft.
    """
    digests = {edge: given.digest for edge, given in inputs.items()}
    refuse_conflicts(by_field(report_mistakes(ReportForecast.of(report), digests, None)), inputs["report"])


def choose_prompts(
    config: CheckExport, stage: Stage, report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]
) -> list[Prompt]:
    """The prompts to serve: `live_prompts` of each category, spread over those of the evaluation and in their order."""
    reader = TokenReader(stage.inputs["tokens"], report["split"])
    index = {record["id"]: place for place, record in enumerate(reader.records)}
    groups = [(row["category"], row.get("topic", "")) for row in rows]
    return [
        Prompt(
            reader.sample(index[rows[place]["id"]]),
            tuple(rows[place]["tokens"]),
            tuple(rows[place]["accepted"]),
            report["max_new_tokens"],
        )
        for place in spread_over_each(groups, config.live_prompts)
    ]


def serve(config: CheckExport, stage: Stage, prompts: Sequence[Prompt]) -> tuple[LiveResult | None, str | None]:
    """The results of SGLang for the prompts, or why it was not used. Raises DataError if it was required and failed."""
    if config.live == "off":
        return None, 'live = "off"'
    draft_dir, target_dir = stage.inputs["draft"].path, stage.inputs["target"].path / "model"
    written = read_json(draft_dir / CONFIG)
    engine = algorithm_of(written).engine
    if engine not in WORKERS:
        return _skipped(config, LiveUnavailable(without_worker(engine)))
    try:
        require_sglang("the live stage of check_export", written["dflow"].get("engine"))
    except DataError as error:
        return _skipped(config, error)
    if reason := not_run(read_config(target_dir)):
        return _skipped(config, LiveUnavailable(reason))
    try:
        from ops.check_export.live import check_live

        return check_live(draft_dir, target_dir, prompts, config, stage), None
    except LiveUnavailable as error:
        return _skipped(config, error)


def engine_sentence(config: CheckExport, target_config: Mapping[str, Any]) -> str:
    """A sentence on whether the installed SGLang serves a draft for this target, read from its class.

    Of a class that dflow does not run, for its vision tower, nothing is claimed.
    """
    found = None if config.live == "off" else served_class(target_config)
    if found is None:
        return UNREAD.removesuffix(".")
    return not_run(target_config) or found.sentence


def serves_target(config: CheckExport, target_config: Mapping[str, Any]) -> bool:
    """Whether the installed SGLang is known to serve a draft for this target, as `engine_sentence` says."""
    return config.live != "off" and served_class(target_config) is not None and not not_run(target_config)


def _skipped(config: CheckExport, error: DataError) -> tuple[None, str]:
    if config.live == "required":
        raise DataError(f'{error} (live = "required"; "auto" skips the stage)') from error
    return None, str(error)


def image_warnings(tokens: Mapping[str, Any]) -> list[str]:
    """A warning if a server would prepare images differently than the training did."""
    if tokens["image_token_id"] is None or tokens.get("image_backend") != "pillow":
        return []
    return [
        "the draft's images were prepared with pillow, and SGLang prepares them with torchvision, whose pixels differ "
        "if an image is resized: start the server with --image-processor-backend pil, as the model card does"
    ]


def engine_warnings(tokens: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """Warnings if the engines that the draft was exported for make other prompts than the training did."""
    return prompt_warnings(tokens, versions_of(config["dflow"].get("engine")), formats_of(config))


def server_arg_warnings(config: Mapping[str, Any]) -> list[str]:
    """A warning if the features were captured with arguments that the live stage does not pass to SGLang."""
    flags = number_formats(config["dflow"].get("server_args"))
    if not flags:
        return []
    return [
        f"the draft's features were captured by SGLang with {shlex.join(flags)}, which the live stage and evaluate do "
        "not use: start the server with it, as dflow serve and the model card do; tau may differ there"
    ]


def rotary_warnings(config: Mapping[str, Any]) -> list[str]:
    """A warning if some programs would rotate other dimensions of the heads than the training did."""
    warning = rotary_warning(config["partial_rotary_factor"])
    return [] if warning is None else [warning]


def write(stage: Stage, outcome: Outcome, *, is_served: bool) -> None:
    """Write the serving directory to ship, with tau in its model card, and check.json. is_served: by SGLang."""
    source, shipped = stage.inputs["draft"].path, stage.out_dir / "draft"
    folders = ("", SPECULATORS) if SPECULATORS in formats_of(read_json(source / CONFIG)) else ("",)
    for folder in folders:
        (shipped / folder).mkdir(exist_ok=True)
        for name in (CONFIG, WEIGHTS):
            link_or_copy(source / folder / name, shipped / folder / name)
    card = with_measured(read_text(source / CARD), card_text(outcome))
    if is_served:
        card = with_served_tag(card)
    replace_file(shipped / CARD, card.encode())
    write_json(stage.out_dir / "check.json", outcome.to_json())
    if outcome.served is not None:
        write_jsonl(stage.out_dir / SERVED, outcome.served_rows())
