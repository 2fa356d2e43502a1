"""The pipeline that evaluates a draft with its target: what `dflow evaluate` runs instead of a pipeline file."""

from __future__ import annotations

from pathlib import Path

from dsl.pipeline import Pipeline
from ops.check_export.op import CheckExport
from ops.evaluate.op import Evaluate
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.load_draft.op import LoadDraft
from ops.load_target.op import LoadTarget
from ops.tokenize_chat.op import TokenizeChat

NOT_ASKED = Path(__file__).with_name("not_asked.jsonl")  # of the other splits: tokenize_chat refuses an empty train
PROMPTS = Path(__file__).with_name("prompts.jsonl")  # mathematics, code and talk; only the questions are used
HELD_OUT = 0.999  # of prompts without a split of their own


def evaluation_pipeline(draft: str, target: str, prompts: str | None, max_prompts: int) -> Pipeline:
    """The nodes from target and draft to the gate.

    draft, target: a directory, or a model id with its commit as owner/name@COMMIT. prompts: what `ingest` reads; None:
    sixteen questions without images. max_prompts: of each category.
    """
    p = Pipeline("evaluate")
    checkpoint, revision = named(target)
    model = p.node("target", LoadTarget(checkpoint=checkpoint, revision=revision))
    source, revision = named(draft)
    loaded = p.node("draft", LoadDraft(target=model, source=source, revision=revision))
    sources = (str(NOT_ASKED), prompts or str(PROMPTS))
    samples = p.node("ingest", Ingest(source=sources, val_fraction=0.0, test_fraction=HELD_OUT))
    images = p.node("inject", InjectImages(samples=samples))
    tokens = p.node("tokenize", TokenizeChat(samples=images, target=model, min_loss_tokens=1))
    report = p.node("eval", Evaluate(draft=loaded, target=model, tokens=tokens, max_prompts=max_prompts))
    p.node("check", CheckExport(draft=loaded, target=model, tokens=tokens, report=report))
    return p


def named(text: str) -> tuple[str, str | None]:
    """A path, or a model id and its commit."""
    name, at, commit = text.rpartition("@")
    return (name, commit) if at and len(commit) == 40 else (text, None)
