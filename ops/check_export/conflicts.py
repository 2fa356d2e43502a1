"""What the gate needs of its inputs, as promised and as they are. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsl.errors import DataError
from ops.check_export.op import LIKE_SERVED, CheckExport, unlike_serving
from ops.lib.drafts.backbone.config import draft_misfit
from ops.lib.forecasts import (
    DraftForecast,
    ReportForecast,
    TargetStated,
    are_different,
    by_field,
    identity_of,
    of_another_target,
)
from ops.lib.sglang.model_classes import not_run
from ops.lib.vision.family_config import check_served_config


def conflicts(config: CheckExport, forecast: Mapping[str, Any]) -> dict[str, str]:
    """Conflicts by field: a report on other inputs or with settings unlike serving, a draft of another target.

    Another conflict is a target that SGLang must serve, but would load as another model.
    """
    report, draft = forecast["report"], forecast["draft"]
    block_size = draft.shape.block_size if draft is not None else None
    read = {edge: identity_of(statement) for edge, statement in forecast.items()}
    of_report = () if report is None else report_mistakes(report, read, block_size)
    return by_field(
        (*of_report, *_of_draft(draft, forecast["target"]), *_of_serving(config, forecast["target"])),
    )


def report_mistakes(
    report: ReportForecast, read: Mapping[str, str | None], block_size: int | None
) -> Iterator[tuple[str, str]]:
    """Conflicts of an evaluation report with the gate: other inputs, or settings unlike those of serving.

    Serving takes prompts from the tokens, and answers are compared token by token. read: the identities of the gate's
    inputs, by edge. block_size: the training's.
    """
    other = [edge for edge, identity in report.inputs.items() if are_different(identity, read.get(edge))]
    if other:
        yield (
            "report",
            f"this report was made with another {' and another '.join(other)} than this node reads; give evaluate and "
            "check_export the same draft, target and tokens",
        )
    if unlike := unlike_serving(report.settings, report.settings.get("block_size_trained", block_size)):
        yield "report", f"this evaluation has {' and '.join(unlike)}, and {LIKE_SERVED}"


def _of_serving(config: CheckExport, target: TargetStated | None) -> Iterator[tuple[str, str]]:
    if target is None or config.live != "required":
        return
    try:
        check_served_config(target.config)
    except DataError as error:
        yield "live", f'{error}; live = "auto" skips the stage'
    if reason := not_run(target.config):
        yield "live", f'{reason}; "auto" skips the stage'


def _of_draft(draft: DraftForecast | None, target: TargetStated | None) -> Iterator[tuple[str, str]]:
    if draft is None or target is None:
        return
    if misfit := draft_misfit(draft.shape, target.info):
        yield "draft", misfit
    elif wrong := of_another_target(draft, target):
        yield "target", f"{wrong}; give export_draft, evaluate and check_export the target of the training"
