"""A config.json of others, key by key by its publisher's table. Loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from attrs import define, field

from ops.lib.drafts.backbone.speculators import AUX_LAYER_IDS, LAYER_CONFIG
from ops.load_draft.publishers import FIELDS, IGNORED, KEYS, LAYERS, NEST, OFF, SPECULATORS, Publisher

WANTED = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list[int]: "a list of whole numbers",
    list[str]: "a list of texts",
}


@define
class Reading:
    """A config.json with its nests flattened, and what comes up while it is read."""

    publisher: Publisher
    algorithm: str
    config: Mapping[str, Any]
    values: dict[str, Any] = field(factory=dict)
    assumed: dict[str, Any] = field(factory=dict)
    notes: list[str] = field(factory=list)
    mistakes: list[str] = field(factory=list)
    is_malformed: bool = False  # a value has another type than its key

    def __attrs_post_init__(self) -> None:
        rules = {**KEYS, **self.publisher.keys, **FIELDS[self.algorithm]}
        for prefix, table in self._tables():
            for name, value in table.items():
                self._take(prefix, name, value, rules.get(name))

    def _tables(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """The places where a publisher writes, the top level last."""
        nest = LAYER_CONFIG if self.publisher is SPECULATORS else NEST
        table = self.config.get(nest)
        if isinstance(table, Mapping):
            yield f"{nest}.", table
        elif table is not None:
            self._refuse_type(nest, table, "a table")
        passed = {nest, "speculators_model_type", "speculators_config"}
        yield "", {name: value for name, value in self.config.items() if name not in passed}

    def _take(self, prefix: str, name: str, value: Any, rule: Any) -> None:
        """A key by its rule; null is as if it were not there."""
        if rule is None:
            self.mistakes.append(
                f"{prefix}{name} = {json.dumps(value)}: dflow does not know this key, which may change what the draft "
                "computes; if it does not, remove it"
            )
        elif isinstance(rule, tuple):
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in rule):
                wanted = "drafts without it" if rule is OFF else " or ".join(map(json.dumps, rule))
                self.refuse(prefix + name, value, wanted)
        elif rule is not IGNORED and value is not None:
            if not _fits(value, rule):
                self._refuse_type(prefix + name, value, WANTED[rule])
            elif self.values.setdefault(name, value) != value:
                self.refuse(prefix + name, value, f"{json.dumps(self.values[name])}, as in another place of the file")

    def _refuse_type(self, name: str, value: Any, wanted: str) -> None:
        self.is_malformed = True
        self.refuse(name, value, wanted)

    def refuse(self, name: str, value: Any, wanted: str) -> None:
        """The one sentence of what cannot be imported."""
        self.mistakes.append(f"{name} = {json.dumps(value)}: dflow reads only {wanted}")

    def get(self, name: str) -> Any:
        """The value, or else the default of the publisher's class, which is assumed. Mistake if it has none."""
        if name in self.values:
            return self.values[name]
        if name not in self.publisher.defaults:
            self.mistakes.append(f"{name}: is missing, and {self.publisher.name}'s class has no default for it")
            return None
        self.assumed[name] = self.publisher.defaults[name]
        return self.assumed[name]

    @property
    def layers_key(self) -> str:
        return AUX_LAYER_IDS if self.publisher is SPECULATORS else LAYERS

    @property
    def layer_ids(self) -> list[int]:
        """The target layers in the order of the file, whose id 0 is the first layer's output, as in `DraftConfig`."""
        ids = self.values.get(self.layers_key) or self.assumed.get(LAYERS) or ()
        return [layer + self.publisher.layers_from for layer in ids]


def _fits(value: Any, kind: Any) -> bool:
    if kind == list[int]:
        return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
    if kind == list[str]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    is_kind = isinstance(value, (int, float) if kind is float else kind)
    return is_kind and (kind in (bool, object) or not isinstance(value, bool))
