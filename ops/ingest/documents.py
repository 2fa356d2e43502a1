"""The documents of a row that its answers stand on, as chat templates take them: [{"title": ..., "text": ...}].

    documents               a list of objects, or its JSON
    chat_template_kwargs    with such a key, as servers are asked

Which keys of a document a template shows is its own choice; they keep their order. `regenerate_answers` sends them to
a server in `chat_template_kwargs`, which SGLang and vLLM give to the chat template.
"""

from __future__ import annotations

from typing import Any

from ops.ingest.row_values import INVALID, INVALID_TEXT, is_none, json_fault, parsed
from ops.lib.data.sample_account import Unusable

Document = dict[str, Any]

KEY, ARGUMENTS = "documents", "chat_template_kwargs"
NO_JSON = "documents are not JSON"
OTHERS = f'"{KEY}" that are no list of objects, which are left out: chat templates take objects'


def given_documents(row: dict[str, Any]) -> Any:
    """What a row or a request has as documents; None for nothing."""
    arguments = row.get(ARGUMENTS)
    of_template = arguments.get(KEY) if isinstance(arguments, dict) else None
    return next(
        (value for value in (row.get(KEY), of_template) if value not in ("", "[]") and not is_none(value)), None
    )


def normal_documents(row: dict[str, Any]) -> tuple[Document, ...] | None:
    """The documents of a row; None where they have another form than chat templates take.

    Raises Unusable for values that JSON lacks.
    """
    given = given_documents(row)
    if isinstance(given, str):
        try:
            given = parsed(given)
        except ValueError:
            return None
    if is_none(given):
        return ()
    if not isinstance(given, list):
        return None
    documents = [each for each in given if not is_none(each)]
    if not all(isinstance(each, dict) for each in documents):
        return None
    if fault := json_fault(documents):
        raise Unusable(INVALID, KEY) if fault == INVALID_TEXT else Unusable(NO_JSON, fault)
    return tuple(documents)
