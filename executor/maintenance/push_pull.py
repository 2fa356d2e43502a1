"""`dflow push` and `dflow pull`: artifacts with their manifests and index lines, to and from a shared remote.

A push sends files first and the manifest last. A pull holds the lease of the key, as a stage does, fetches into the
work folder, compares with the manifest, and commits by a rename. Both continue where they were interrupted.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
from attrs import frozen

from dsl.artifact_digest import MANIFEST
from dsl.errors import PipelineError, StoreError, known_nodes
from dsl.files import clear_errors, new_file, parse_json, parsed_object, read_plain, sync
from dsl.finding import Finding
from dsl.pipeline import Copy, selected_by
from executor.maintenance.gc import ACCEPTED, read_index
from executor.maintenance.remote import NotAsExpected, Remote, pulled_manifest
from executor.planning.code_trust import TRUST, code_in
from executor.planning.planner import Planner
from executor.records.graph_file import recorded_nodes
from executor.records.run_record import Record
from executor.store.artifact_store import Store
from executor.store.digests import FileEntry, artifact_digest, seal_artifact_files
from executor.store.integrity import check
from executor.store.manifest import PULLED, IndexLine, Manifest, committed_files
from executor.system.crash_points import fail_point
from executor.system.output import shown_digest
from executor.system.symlinks import links_in

FILES_AT_ONCE = 8
PART = ".pulling-"  # prefix of the names of incomplete files
MEMBER = re.compile(r"\W")  # what ends the name of a field in that of its member, such as source[0]

Progress = Callable[[int], None]


class HasCode(StoreError):
    """An error: an artifact of a remote contains code that no config trusts."""


@frozen
class Wanted:
    """An artifact to send or fetch: a node's artifact for its key, and its index line.

    op: the node's; None where the record does not have it. trusts_code: whether its config trusts a checkpoint's code.
    """

    node: str
    key: str
    line: IndexLine
    op: str | None = None
    trusts_code: bool = False

    @property
    def digest(self) -> str:
        return self.line.digest


def recorded(store: Store, record: Record, node: str | None) -> list[Wanted]:
    """The artifacts of a run's finished nodes, with their lines in this store's index.

    node: only this node's, or those of its copies. Raises PipelineError where the run has no such node.
    """
    copies = {node_id: each.copy for node_id, each in recorded_nodes(record.folder).items()}
    chosen = required_nodes({node_id: copies.get(node_id) for node_id in record.state.nodes}, node)
    ops = record.op_names()
    wanted = []
    for node_id, state in record.state.nodes.items():
        if state.digest is None or node_id not in chosen:
            continue
        manifest = store.manifest(state.digest)
        key = state.key or (None if manifest is None else manifest.key)
        if key is None:
            continue
        lines = [line for line in store.index(key) if line.digest == state.digest]
        line = lines[-1] if lines else IndexLine(state.digest, record.run, time.time())
        wanted.append(Wanted(node_id, key, line, ops.get(node_id)))
    return wanted


def accepted(store: Store, wanted: Sequence[Wanted]) -> list[Wanted]:
    """Further keys for which a user accepted one of these artifacts, as entries of their own."""
    by_digest = {each.digest: each for each in reversed(wanted)}
    keys = {each.key for each in wanted}
    newest_lines = {key: lines[-1] for key, lines in read_index(store).items() if lines and key not in keys}
    return [
        attrs.evolve(by_digest[line.digest], key=key, line=line)
        for key, line in newest_lines.items()
        if line.acceptance == ACCEPTED and line.digest in by_digest
    ]


def required_nodes(nodes: Mapping[str, Copy | None], node: str | None) -> tuple[str, ...]:
    """The ids of `node` or of its copies; all ids for None. Raises PipelineError for an unknown node."""
    if node is None:
        return tuple(nodes)
    if chosen := selected_by(node, nodes):
        return chosen
    raise PipelineError([Finding(f'--node: there is no node "{node}"', advice=known_nodes(node, nodes))])


def push(store: Store, remote: Remote, wanted: Wanted, progress: Progress) -> bool:
    """Send one artifact; False where the remote already has it. Raises StoreError where the local copy is damaged."""
    damages = check(store, [wanted.digest])
    if damages:
        raise StoreError(
            f'the artifact of node "{wanted.node}" is damaged, so it is not sent: {damages[wanted.digest][0]}; '
            "see `dflow doctor --verify`"
        )
    folder = store.object_path(wanted.digest)
    sent_sizes = remote.sizes(wanted.digest)
    files = {name: entry.size for name, entry in (committed_files(folder) or {}).items()}
    missing = [name for name, size in files.items() if sent_sizes.get(name) != size]

    def send(name: str) -> None:
        remote.put(folder / name, f"objects/{wanted.digest}/{name}")
        progress(files[name])
        fail_point("push:file")

    _in_parallel(send, missing)
    sent = bool(missing) or MANIFEST not in sent_sizes
    if sent:
        remote.put_text(f"objects/{wanted.digest}/{MANIFEST}", _manifest_to_send(folder / MANIFEST))
    fail_point("push:manifest")
    push_key(remote, wanted)
    return sent


def _manifest_to_send(file: Path) -> str:
    """The manifest to send, without the folders of external files, which would reveal the user and this machine."""
    text = read_plain(file).decode()
    manifest = Manifest.read(file)
    if manifest is None:
        return text
    external = {MEMBER.split(name)[0] for name in manifest.key_parts.external}
    config = {name: _without_folder(value) if name in external else value for name, value in manifest.config.items()}
    data = parse_json(text)
    return text if config == manifest.config else json.dumps(data | {"config": config}, indent=1) + "\n"


def _without_folder(value: Any) -> Any:
    """The value with absolute paths reduced to their names."""
    if isinstance(value, (list, tuple)):
        return [_without_folder(each) for each in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def push_key(remote: Remote, wanted: Wanted) -> bool:
    """Write the index line of the key at the remote; False where it exists."""
    entry = f"index/{wanted.key}/{wanted.digest}"
    if remote.has(entry):
        return False
    remote.put_text(entry, json.dumps(wanted.line.to_json(), ensure_ascii=False) + "\n")
    return True


def offered(planner: Planner, remote: Remote) -> Iterator[Wanted | str]:
    """For each node missing in the store, its artifact at the remote, or the node's id if the remote lacks it.

    Keys of nodes below need no download, since the digest is in the remote's index.
    """
    digests: dict[str, str] = {}
    for node_id in planner.graph.nodes:
        decision = planner.decide(node_id, digests)
        if decision.cache == "hit" and decision.digest is not None:
            digests[node_id] = decision.digest
            continue
        found = None if decision.key is None else newest(remote, decision.key)
        if found is None or decision.key is None:
            yield node_id
            continue
        digests[node_id] = found.digest
        node = planner.graph.nodes[node_id]
        yield Wanted(node_id, decision.key, found, node.op.name, node_id in planner.trusting)


def everything(remote: Remote, node: str | None) -> list[Wanted]:
    """The newest artifact of every key at the remote. node: only those that this node made.

    Raises PipelineError where the remote has no artifact of `node`.
    """
    found = []
    for key in remote.index_keys():
        line = newest(remote, key)
        manifest = (
            None if line is None else Manifest.from_json(parsed_object(remote.manifest(line.digest) or b"") or {})
        )
        if line is not None:  # a damaged manifest has no node; the pull refuses it
            found.append(Wanted(shown_digest(line.digest) if manifest is None else manifest.node, key, line))
    chosen = required_nodes(dict.fromkeys(each.node for each in found), node)
    return [each for each in found if each.node in chosen]


def newest(remote: Remote, key: str) -> IndexLine | None:
    """The newest index line of a key at the remote; None where there is none, or its artifact is missing there."""
    found = next(reversed(remote.lines(key)), None)
    return found if found is not None and remote.manifest(found.digest) is not None else None


def missing_bytes(remote: Remote, wanted: Iterable[Wanted]) -> int:
    """The number of bytes to fetch."""
    return sum(size for each in wanted for size in remote.sizes(each.digest).values())


def pull(store: Store, remote: Remote, wanted: Wanted, progress: Progress, report: Callable[[str], None]) -> bool:
    """Fetch one artifact; False where the store already has it. Raises StoreError if it is damaged at the remote."""
    with store.lease(wanted.key, f"dflow pull {remote.url}") as lease:
        lease.acquire(lambda holder: report(f"{wanted.node}: waiting, {holder}"))
        lease.wait_for_ranks()
        store.finish_commit(lease, wanted.key)
        entry = _entry(wanted.line, remote)
        if store.has(wanted.digest):
            newest_here = store.newest(wanted.key)
            if newest_here is None or newest_here.digest != wanted.digest:
                store.accept(wanted.key, entry)
            lease.remove()
            return False
        fresh = lease.folder / f"pulled-{wanted.digest[:16]}"
        manifest, files = _manifest(remote, wanted)
        with clear_errors(fresh):
            for link in links_in(fresh):
                link.unlink()
            fresh.mkdir(exist_ok=True)
            _check_sizes(remote, wanted, files)
            _fetch(remote, wanted.digest, files, fresh, progress)
            fail_point("pull:fetched")
            _seal(remote, wanted, files, fresh)
            _write_manifest(fresh / MANIFEST, manifest)
        fail_point("pull:sealed")
        lease.check()
        store.place(fresh, wanted.key, entry)
        lease.remove()
    return True


def _entry(line: IndexLine, remote: Remote) -> IndexLine:
    """The index line to write to this store for a pulled artifact; an acceptance keeps its user, time and reason."""
    if line.acceptance == ACCEPTED:
        return attrs.evolve(line, source=remote.url)
    return attrs.evolve(line, time=time.time(), acceptance=PULLED, source=remote.url)


def _manifest(remote: Remote, wanted: Wanted) -> tuple[bytes, Mapping[str, FileEntry]]:
    """An artifact's manifest at the remote, as bytes and as files. Raises StoreError if it does not match
    the digest.
    """
    data = remote.manifest(wanted.digest)
    if data is None:
        raise _damaged(remote, wanted, [f"{MANIFEST} is missing"])
    try:
        manifest = pulled_manifest(data, wanted.op)
    except NotAsExpected as error:
        raise _damaged(remote, wanted, [f"{MANIFEST} cannot be used: {error}"]) from None
    if not artifact_digest(manifest.files) == manifest.digest == wanted.digest:
        raise _damaged(remote, wanted, [f"{MANIFEST} belongs to another artifact"])
    code = [] if wanted.trusts_code else code_in(manifest.files)
    if code:
        raise HasCode(
            f'{remote.url}: the artifact of node "{wanted.node}" has code in it ({", ".join(code[:3])}), which could '
            f"run here; read it there, and set {TRUST} = true for the node if you trust it, or let the node run"
        )
    return data, manifest.files


def _check_sizes(remote: Remote, wanted: Wanted, files: Mapping[str, FileEntry]) -> None:
    """Check before a download that no file at the remote is larger than its entry says. Raises StoreError."""
    there = remote.sizes(wanted.digest)
    wrong = [
        f"{name} has {there[name]} bytes instead of {entry.size}"
        for name, entry in files.items()
        if there.get(name, 0) > entry.size
    ]
    if wrong:
        raise _damaged(remote, wanted, wrong)


def _fetch(remote: Remote, digest: str, files: Mapping[str, FileEntry], fresh: Path, progress: Progress) -> None:
    """Fetch an artifact's missing files; a file gets its name only when complete."""

    def get(name: str) -> None:
        target = fresh / name
        if not target.is_file() or target.stat().st_size != files[name].size:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_name(f"{PART}{hashlib.sha256(name.encode()).hexdigest()[:16]}")
            remote.get(f"objects/{digest}/{name}", part, files[name].size)
            part.replace(target)
            fail_point("pull:file")
        progress(files[name].size)

    for path in sorted(fresh.rglob(f"{PART}*")):
        path.unlink()  # of a pull that was killed
    _in_parallel(get, files)


def _seal(remote: Remote, wanted: Wanted, files: Mapping[str, FileEntry], fresh: Path) -> None:
    """Sync the fetched files to disk and verify them. Wrong files are removed, so that they are fetched again."""
    (fresh / MANIFEST).unlink(missing_ok=True)
    found = seal_artifact_files(fresh)
    wrong = sorted(name for name in {*files, *found} if files.get(name) != found.get(name))
    for name in wrong:
        (fresh / name).unlink(missing_ok=True)
    if wrong:
        raise _damaged(remote, wanted, [f"{name} has other content" for name in wrong])


def _write_manifest(path: Path, data: bytes) -> None:
    """Write a pulled artifact's manifest in place, as a killed pull must not leave a file of another name."""
    with new_file(path) as file:
        file.write(data)
    sync(path)
    path.chmod(0o444)
    sync(path.parent)


def _damaged(remote: Remote, wanted: Wanted, what: list[str]) -> StoreError:
    return StoreError(
        f'{remote.url}: the artifact of node "{wanted.node}" is damaged there: {"; ".join(what[:3])}; remove '
        f"objects/{wanted.digest} there and push it again"
    )


def _in_parallel(do: Callable[[str], None], names: Iterable[str]) -> None:
    """Call a function for each name in several threads; the first error cancels calls not yet started."""
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        done = [pool.submit(do, name) for name in names]
        try:
            for each in done:
                each.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
