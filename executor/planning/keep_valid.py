"""Keeping an artifact valid over a change of code that the user declares harmless."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice

from attrs import frozen

from dsl.errors import ConfigError, StoreError
from executor.keys.differences import CODE, Difference, code_differences, difference_text, differences
from executor.keys.node_key import Inputs, Sources, node_inputs, node_parts
from executor.planning.explanation import accepted_text, maker_of
from executor.planning.planner import Planner
from executor.records.events import Accepted, Event
from executor.records.run_record import Record, load_begun, newest_records, plan_of
from executor.store.artifact_store import Store
from executor.store.integrity import check
from executor.store.manifest import IndexLine, Manifest
from executor.system.output import shown_digest
from executor.system.user_cache import user_name

RECORDS_SEARCHED = 200


@frozen
class Offer:
    """A finished artifact that differs only by code from what a node would make now.

    line: the index line of old_key, under which the artifact is stored.
    """

    node: str
    key: str
    old_key: str
    line: IndexLine
    without_code: str
    changes: tuple[Difference, ...]


def offers(store: Store, planner: Planner) -> list[Offer]:
    """The artifacts that could be kept valid despite changed code, in the order of the nodes.

    An offered artifact counts as the input of nodes below it. Raises ConfigError where there is none, and StoreError
    where artifacts are damaged.
    """
    digests: dict[str, str] = {}
    found = []
    for node_id in planner.graph.nodes:
        decision = planner.decide(node_id, digests)
        if decision.digest is None and decision.key is not None:
            offer = _offer(store, planner, node_id, decision.key, digests)
            found += [offer] if offer is not None else []
        digest = decision.digest or next((each.line.digest for each in found if each.node == node_id), None)
        digests |= {node_id: digest} if digest is not None else {}
    if not found:
        raise ConfigError("no node has a finished artifact from which it differs by its code only")
    _check(store, found)
    return found


def offer_of(store: Store, planner: Planner, node_id: str) -> Offer:
    """The artifact that may be kept valid for a node.

    Raises ConfigError that says why there is none, and StoreError where it is damaged.
    """
    decisions = planner.plan()
    decision = decisions[node_id]
    if decision.cache == "hit":
        raise ConfigError(f'node "{node_id}" is cached as {shown_digest(decision.digest)}: there is nothing to accept')
    node = planner.graph.nodes[node_id]
    digests = {name: digest for name, other in decisions.items() if (digest := other.digest) is not None}
    waiting = [parent for parent in node.parents if parent not in digests]
    if decision.key is None or waiting:
        raise ConfigError(
            f'node "{node_id}" reads from {", ".join(waiting)}, which will run, so its inputs are not known yet; '
            f"accept or run {', '.join(waiting)} first"
        )
    offer = _offer(store, planner, node_id, decision.key, digests)
    if offer is None:
        raise ConfigError(_why_nothing(planner, node_id, node_inputs(node, digests.__getitem__)))
    _check(store, [offer])
    return offer


def _offer(store: Store, planner: Planner, node_id: str, key: str, digests: Mapping[str, str]) -> Offer | None:
    node, parts = planner.graph.nodes[node_id], planner.parts[node_id]
    without_code = parts.key_without_code(node_inputs(node, digests.__getitem__))
    found = _newest_finished(store, node.op.name, without_code)
    if found is None:
        return None
    old_key, line, code = found
    return Offer(node_id, key, old_key, line, without_code, tuple(code_differences(code, parts.code)))


def _check(store: Store, found: Sequence[Offer]) -> None:
    """Check that no offered artifact is damaged. Raises StoreError."""
    for offer in found:
        damages = check(store, [offer.line.digest])
        if damages:
            listed = "; ".join(map(str, damages[offer.line.digest]))
            raise StoreError(f'the artifact of node "{offer.node}" is damaged ({listed}); it has to run again')


def keep_valid(store: Store, planner: Planner, offer: Offer, reason: str) -> tuple[Record | None, str]:
    """Declare the offered artifact valid for the node's new key.

    The index gets a line, and the record of the run that computed the artifact an event. Returns that record, if it
    still exists, and the event as text. Raises ConfigError where the code was edited since the offer was made.
    """
    now = node_parts(planner.graph, offer.node, Sources.now(store.external_memo))
    if now != planner.parts[offer.node]:
        raise ConfigError(f'the code or the data of node "{offer.node}" changed just now; check it, and accept again')
    user, at = user_name(), time.time()
    line = IndexLine(
        digest=offer.line.digest,
        run=offer.line.run,
        time=at,
        neutral=offer.line.neutral,
        acceptance="accepted",
        without_code=offer.without_code,
        accepted_key=offer.old_key,
        reason=reason,
        user=user,
    )
    store.accept(offer.key, line)
    return _note_in_record(store, offer, line), accepted_text(user, at, reason)


def _note_in_record(store: Store, offer: Offer, line: IndexLine) -> Record | None:
    record = load_begun(store.records / line.run)
    if record is None:
        return None
    node = maker_of(record, offer.line, offer.old_key) or offer.node
    accepted = Accepted(key=offer.key, digest=line.digest, reason=line.reason, user=line.user)
    record.write_events([Event(line.time, node, 1, accepted)])
    return record


def _newest_finished(store: Store, op: str, without_code: str) -> tuple[str, IndexLine, Mapping[str, str]] | None:
    """The key, index line and code digests of the newest artifact with this key without code; None without one."""
    seen: set[str] = set()
    for record in islice(newest_records(store.records), RECORDS_SEARCHED):
        for node in record.state.nodes.values():
            if node.key is None or node.digest is None or node.key in seen:
                continue
            seen.add(node.key)
            line = store.newest(node.key)
            manifest = store.manifest(line.digest) if line is not None else None
            if line is None or manifest is None or manifest.op != op:
                continue
            if line.without_code == without_code:
                return node.key, line, _code(store, node.key, manifest)
    return None


def _code(store: Store, key: str, manifest: Manifest) -> Mapping[str, str]:
    """The code digests that belong to a key, from the artifact's manifest.

    Where another key made the same content first, they are in the plan of the run that used this key.
    """
    code = manifest.key_parts.code
    line = store.newest(key)
    if manifest.key == key or line is None:
        return code
    rows = plan_of(store.records / line.run).values()
    return next((row.parts.code for row in rows if row.key == key and row.parts is not None), code)


def _why_nothing(planner: Planner, node_id: str, inputs: Inputs) -> str:
    previous = planner.previous.get(node_id)
    if previous is None or previous.digest is None:
        return f'node "{node_id}" was never finished: there is no artifact to accept'
    found = differences(previous.parts, planner.parts[node_id])
    others = [difference_text(node_id, each) for each in found if each.kind not in CODE]
    others += [
        f"input changed: {parent}"
        for parent, digest in previous.input_digests.items()
        if digest not in _digests(inputs)
    ]
    if not others:
        return f'no finished artifact of node "{node_id}" differs by code only: it was removed, or its inputs differ'
    return f'node "{node_id}" differs by more than its code, so it cannot be accepted: {"; ".join(others)}'


def _digests(inputs: Inputs) -> set[str]:
    many = [digest for value in inputs.values() if isinstance(value, tuple) for digest in value]
    return {*many, *(value for value in inputs.values() if isinstance(value, str))}
