"""The Python twin of vlm_dflash.toml: the same graph, the same keys."""

from __future__ import annotations

from dsl.pipeline import Pipeline
from ops.capture_targets.op import CaptureTargets
from ops.check_export.op import CheckExport
from ops.evaluate.op import Evaluate
from ops.export_draft.op import ExportDraft
from ops.finetune_vlm.op import FinetuneVlm
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.regenerate_answers.op import RegenerateAnswers
from ops.shard_sequence.op import ShardSequence
from ops.tokenize_chat.op import TokenizeChat
from ops.train_dflash.op import TrainDflash


def pipeline() -> Pipeline:
    p = Pipeline("vlm-dflash", seed=0, experiment="vlm-dflash")
    samples = p.node("ingest", Ingest(source="builtin:digits"))
    images = p.node("inject", InjectImages(samples=samples))
    tokens = p.node("tokenize", TokenizeChat(samples=images, processor="builtin", contexts="served"))
    digit = {"metric": "pattern", "pattern": "the digit ([0-9])"}
    target = p.node("target", FinetuneVlm(tokens=tokens, optimizer="muon", lr=4e-3, steps=260, batch_size=16, **digit))
    answered = p.node("regenerate", RegenerateAnswers(samples=images, target=target, max_new_tokens=160))
    own = p.node("retokenize", TokenizeChat(samples=answered, target=target, contexts="served"))
    features = p.node("capture", CaptureTargets(tokens=own, target=target, num_layers=5))
    batches = p.node("shard", ShardSequence(features=features, tokens_per_step=2048, epochs=2))
    trained = p.node(
        "train",
        TrainDflash(
            features=features,
            batches=batches,
            target=target,
            tokens=own,
            block_size=16,
            num_layers=3,
            num_anchors=16,
            optimizer="muon",
            lr=3e-3,
            eval_every=50,
            select="tau",
        ),
    )
    draft = p.node("export", ExportDraft(draft=trained, target=target))
    evaluation = Evaluate(draft=draft, target=target, tokens=tokens, max_prompts=40, max_new_tokens=80, batch_size=1)
    report = p.node("eval", evaluation)
    p.node("check", CheckExport(draft=draft, target=target, tokens=tokens, report=report))
    return p
