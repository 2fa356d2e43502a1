"""A rule between the fields of a node, which both the check of its values and the JSON schema read."""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen
class Needs:
    """Validator of a field: with this value of it, the fields of `given` are not None, and those of `left_out` are.

    Raises ValueError with the message.
    """

    value: Any
    message: str
    given: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __call__(self, instance: Any, _attribute: object, value: object) -> None:
        if value != self.value:
            return
        lacks = any(getattr(instance, name) is None for name in self.given)
        if lacks or any(getattr(instance, name) is not None for name in self.left_out):
            raise ValueError(self.message)
