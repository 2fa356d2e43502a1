"""What dflow wrote into the config.json of its own exports, by which later changes are found. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dsl.finding import Finding
from ops.lib.drafts.backbone.config import table_of
from ops.lib.drafts.backbone.contract import DTYPES, config_mistakes, mistake
from ops.load_draft.headers import StoredTensor
from ops.load_draft.publishers import OF_DFLOW

IMPORT_AGAIN = "import the draft again from where it came"


def record_mistakes(
    config: Mapping[str, Any], target: Mapping[str, Any] | None = None, pad_token_ids: Collection[int] = ()
) -> list[Finding]:
    """The fields of an export of dflow that were changed since it was written; none of a draft of others.

    target: its target.json, None if it is not known yet.
    """
    record = table_of(config, OF_DFLOW)
    if not record:
        return []
    mistakes = config_mistakes(config, target, str(record.get("target")), pad_token_ids)
    if "imported" in record and not _is_import(record["imported"]):
        wrong = f"is no record of an import: {json.dumps(record['imported'])}"
        mistakes.append(mistake("config.json", wrong, "does not read it", IMPORT_AGAIN, part="dflow.imported"))
    return mistakes


def _is_import(imported: Any) -> bool:
    return (
        isinstance(imported, Mapping)
        and isinstance(imported.get("assumed"), Mapping)
        and isinstance(imported.get("notes"), list)
        and all(isinstance(note, str) for note in imported["notes"])
        and isinstance(imported.get("trained_for", ""), str)
    )


def dtype_mistakes(config: Mapping[str, Any], tensors: Iterable[StoredTensor]) -> list[str]:
    """The tensors of an export of dflow that have another dtype than it wrote, by their headers."""
    if not table_of(config, OF_DFLOW):
        return []
    dtype = DTYPES[config["dtype"]]
    return [
        f"{tensor.name}: of dtype {tensor.dtype}, and the export has {dtype}"
        for tensor in tensors
        if tensor.dtype != dtype
    ]
