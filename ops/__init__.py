"""What the nodes do. OPS names every built-in op in the order the data flows; importing it loads no torch."""

OPS = {
    "ingest": "ops.ingest.op:Ingest",
    "inject_images": "ops.inject_images.op:InjectImages",
    "tokenize_chat": "ops.tokenize_chat.op:TokenizeChat",
    "finetune_vlm": "ops.finetune_vlm.op:FinetuneVlm",
    "load_target": "ops.load_target.op:LoadTarget",
    "load_draft": "ops.load_draft.op:LoadDraft",
    "regenerate_answers": "ops.regenerate_answers.op:RegenerateAnswers",
    "capture_targets": "ops.capture_targets.op:CaptureTargets",
    "shard_sequence": "ops.shard_sequence.op:ShardSequence",
    "train_dflash": "ops.train_dflash.op:TrainDflash",
    "export_draft": "ops.export_draft.op:ExportDraft",
    "evaluate": "ops.evaluate.op:Evaluate",
    "check_export": "ops.check_export.op:CheckExport",
}
