"""The answers of a shard under way, kept batch by batch: what a stop or a kill leaves of it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from attrs import asdict, define, field, frozen

from ops.lib.data.files import json_line


@frozen
class Answer:
    """One answer as the target gave it, before any filter.

    tokens: how many, the EOS included; retokenised_differently: its text gives other tokens in tokenize_chat;
    prompted_differently: a server read other tokens than tokenize_chat makes of the prompt. reason: why no sample can
    be made of it, empty where one can.
    """

    text: str
    finish_reason: str
    tokens: int
    retokenised_differently: bool = False
    prompted_differently: bool = False
    reason: str = ""
    detail: str = ""


Key = tuple[str, int]  # the sample's id, and which of its answers, from 0


@define
class Journal:
    """Answers in a file with one line a batch; half a line, which a kill may leave, is cut off."""

    path: Path
    answers: dict[Key, Answer] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        if not self.path.exists():
            return
        written = self.path.read_bytes()
        whole = written[: written.rfind(b"\n") + 1]
        if len(whole) < len(written):
            os.truncate(self.path, len(whole))  # never written anew: a kill in between would lose all
        for line in whole.splitlines():
            self.answers |= {(sample_id, turn): Answer(**answer) for sample_id, turn, answer in json.loads(line)}

    def add(self, answers: Mapping[Key, Answer]) -> None:
        """Keep the answers of one batch."""
        with self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(json_line([[*key, asdict(answer)] for key, answer in answers.items()]))
        self.answers |= answers
