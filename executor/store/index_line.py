"""A line of the index: what was computed for a key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import frozen

from dsl.json_files import known_fields
from executor.system.json_values import Check, fit, is_id, is_moment, is_table_of, is_text

PULLED = "pulled"  # the acceptance of a line whose artifact another store computed


@frozen
class IndexLine:
    """A line of the index: the artifact `digest` was computed for a key by a run. digest, time: empty before the
    commit.

    acceptance: "computed"; "forced" by --from; "pulled" from `source`, a URL; or "accepted", if `user` declared for
    `reason` that the artifact of accepted_key, which differs by code only, is valid for this key. without_code: the key
    with the code left out.
    """

    digest: str
    run: str
    time: float
    neutral: Mapping[str, Any] = {}
    acceptance: str = "computed"
    without_code: str = ""
    accepted_key: str = ""
    reason: str = ""
    user: str = ""
    source: str = ""

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> IndexLine | None:
        """The index line in a JSON object, without fields of a newer dflow; None for a line that no dflow writes."""
        is_line = line.keys() >= NEEDS and fit(CHECKS, line)
        return cls(**known_fields(cls, line)) if is_line else None

    @property
    def is_pulled(self) -> bool:
        """Whether another store computed the artifact; lines accepted in that store name a source too."""
        return self.acceptance == PULLED or bool(self.source)

    def to_json(self) -> dict[str, Any]:
        """The line as JSON, without empty texts."""
        return {name: value for name, value in attrs.asdict(self).items() if value != ""}


NEEDS = {"digest", "run", "time"}
CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("digest", "run"), is_id),
    "time": is_moment,
    "neutral": is_table_of(lambda value: True),
    **dict.fromkeys(("acceptance", "without_code", "reason", "user", "source"), is_text),
    "accepted_key": lambda value: value == "" or is_id(value),
}
