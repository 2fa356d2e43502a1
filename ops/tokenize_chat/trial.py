"""Whether the chat template serves at all: a sample at fault is dropped, a template at fault ends the run."""

from __future__ import annotations

from attrs import define, field

from dsl.errors import DataError
from ops.tokenize_chat.template import MISFITS

FIRST_SAMPLES = 100  # misfits without one sample kept; enough for odd samples that stand together


@define
class TemplateTrial:
    """Told of every sample in the order of the rows, so that the outcome does not depend on the workers.

    The template is at fault where samples are misfits, one after the other, before any is kept: the first
    FIRST_SAMPLES of them, or all where there are fewer. Samples dropped for something else say nothing about it.
    """

    source: str
    _misfits: int = field(default=0, init=False)
    _served: bool = field(default=False, init=False)
    _first: str = field(default="", init=False)

    def kept(self) -> None:
        self._served = True

    def dropped(self, reason: str, sample_id: str, detail: str) -> None:
        """Raises DataError once the template is at fault."""
        if self._served or reason not in MISFITS:
            return
        self._first = self._first or f'sample "{sample_id}": {reason}: {detail}'
        self._misfits += 1
        if self._misfits == FIRST_SAMPLES:
            self.finish()

    def finish(self) -> None:
        """After the last sample. Raises DataError where the template is at fault."""
        if self._misfits and not self._served:
            raise DataError(
                f"the chat template of {self.source} fits none of {self._misfits} samples, the first of which is "
                f"{self._first}; do template, tokenizer and samples belong together?"
            )
