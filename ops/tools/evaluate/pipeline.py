"""The pipeline that evaluates a draft with its target: what `dflow evaluate` runs instead of a pipeline file.

Its file of prompts is read before anything runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from dsl.compile import compile_pipeline
from dsl.errors import DataError, PipelineError
from dsl.op import is_builtin
from dsl.pipeline import Pipeline
from dsl.tree import overridden_nodes
from ops.check_export.op import CheckExport, unlike_serving
from ops.evaluate.op import Evaluate
from ops.ingest.op import Ingest
from ops.ingest.read import read_samples
from ops.ingest.sample import DroppedSample
from ops.ingest.source import UnknownFormat
from ops.inject_images.op import InjectImages
from ops.lib.data.checkpoint_code import read_settings
from ops.lib.drafts.backbone.config import lookup
from ops.lib.target.token_ids import Vocabulary
from ops.load_draft.op import LoadDraft
from ops.load_target.op import LoadTarget
from ops.load_target.plan import snapshot
from ops.tokenize_chat.op import TokenizeChat

PROMPTS = Path(__file__).with_name("prompts.jsonl")  # mathematics, code and talk
GATE = "check"
CONFIG = "config.json"
SHOWN = 5
OF_FORMAT = "say which: -s ingest.format=json (or csv, parquet, arrow, image-folder)"
FORMS = '{"prompt": "..."}, or "messages" that end with a turn of the user, with or without an answer after it'


def evaluation_pipeline(
    draft: str, target: str, prompts: str | None, max_prompts: int | None, drafts: Sequence[str] = ()
) -> Pipeline:
    """The pipeline that evaluates a draft: the nodes from target and draft to the gate.

    draft, target: see `source_of`. prompts: data for `ingest`, all of which is used; None: sixteen questions without
    images. max_prompts: per category; None: all. drafts: folders of the user's algorithms. Raises PipelineError for an
    invalid folder.
    """
    p = Pipeline("evaluate", drafts=tuple(Path(folder) for folder in drafts))
    checkpoint, revision = source_of(target)
    source, commit = source_of(draft)
    mask = draft_mask(_directory(source, commit), _directory(checkpoint, revision))
    model = p.node("target", LoadTarget(checkpoint=checkpoint, revision=revision, mask_token_id=mask))
    loaded = p.node("draft", LoadDraft(target=model, source=source, revision=commit))
    samples = p.node(
        "ingest",
        Ingest(source=prompts or str(PROMPTS), split="test", require_answers=False, duplicate_ids="number"),
    )
    images = p.node("inject", InjectImages(samples=samples))
    tokens = p.node("tokenize", TokenizeChat(samples=images, target=model, prompts_only=True))
    report = p.node("eval", Evaluate(draft=loaded, target=model, tokens=tokens, max_prompts=max_prompts))
    p.node(GATE, CheckExport(draft=loaded, target=model, tokens=tokens, report=report))
    return p


def draft_mask(draft: Path, target: Path) -> int | None:
    """The mask token id of the draft's training, for a target that names none itself or is not downloaded yet.

    None if the target's tokenizer or family names one, or if either cannot be read; the nodes then report what is
    wrong.
    """
    try:
        vocabulary, config = Vocabulary.of(target), read_settings(draft / CONFIG)
    except DataError:
        return None
    if target.exists() and (vocabulary is None or vocabulary.known_mask_id is not None):
        return None
    found = (lookup(config, name) for name in ("dflash_config.mask_token_id", "mask_token_id"))
    return next((value for is_there, value in found if is_there and type(value) is int), None)


def _directory(source: str, revision: str | None) -> Path:
    """The directory of a source. For a model id it is the commit's in Hugging Face's cache, which may not exist."""
    return Path(source) if revision is None else snapshot(source, revision)


def source_of(text: str) -> tuple[str, str | None]:
    """Split a source: a directory and None, or a model id and its commit, from owner/name@COMMIT."""
    name, at, commit = text.rpartition("@")
    return (name, commit) if at and not Path(text).exists() else (text, None)


def leave_out_gate(pipeline: Pipeline, overrides: Sequence[str]) -> list[str]:
    """Remove the gate if the overrides make an evaluation that it cannot compare with a served draft. Returns why.

    The gate stays if the overrides change it too, which is then a mistake of the pipeline.
    """
    if GATE in overridden_nodes(overrides).values():
        return []
    gate = pipeline.nodes.pop(GATE)
    try:
        evaluated = attrs.asdict(compile_pipeline(pipeline, overrides).nodes["eval"].config, recurse=False)
    except PipelineError:
        return []  # the caller reports the same mistakes
    unlike = unlike_serving(evaluated, None)
    if evaluated["block_size"] is not None:  # that of the training is known once the draft is read
        unlike.append(f"block_size = {evaluated['block_size']}")
    if not unlike:
        pipeline.nodes[GATE] = gate
    return [f"eval.{text}" for text in unlike]


def check_prompts(config: Ingest) -> None:
    """Check that a prompts file can be read, has no broken row, and has a prompt. Raises DataError that
    names the file.
    """
    if is_builtin(str(config.source)):
        return
    reading = config.reading()
    named = ", ".join(map(str, reading.sources))
    dropped: list[DroppedSample] = []
    usable = 0
    try:
        for _, sample in read_samples(reading):
            if not isinstance(sample, DroppedSample):
                usable += 1
            elif len(dropped) < SHOWN:
                dropped.append(sample)
    except UnknownFormat as error:
        raise DataError(error.with_remedy(OF_FORMAT)) from None
    if usable:
        return
    if not dropped:
        raise DataError(f"{named} is empty; write one JSON object per line: {FORMS}")
    raise DataError("\n".join([f"{named} has no usable prompt; write {FORMS}", *map(_line, dropped)]))


def _line(sample: DroppedSample) -> str:
    return f'  sample "{sample.id}": {sample.reason}' + (f" ({sample.detail})" if sample.detail else "")
