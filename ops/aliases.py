"""The names that people who come from other projects type most, and where dflow has what they mean.

They are those of transformers, SpecForge, speculators, verl, SGLang and vLLM; docs/coming_from.md has more of them.
dsl/aliases.py answers unknown keys from this table.

A name's answer: "op.field" (or "launch.field", "mlflow.field", ...) -> in what the value differs, empty where it does
not. On a node whose op has none of them the first place counts that the pipeline has a node for. A text in place of the
table: why there is no such setting, and what there is instead.
"""

from __future__ import annotations

from collections.abc import Mapping

STEPS = "in optimizer steps"
PADDED = "in padded tokens of one forward pass of a rank, not in samples"
PASSES = "a step is cut into passes of so many padded tokens, however many it takes; their number is no setting"
BLOCK = "with the anchor, so one more than the tokens that are drafted"
STEP_SIZE = {
    "shard_sequence.tokens_per_step": "in padded tokens of one optimizer step over all ranks, not in samples",
    "finetune_vlm.batch_size": "in samples of one optimizer step over all ranks",
}
DTYPES = ("train_dflash", "finetune_vlm", "capture_targets", "regenerate_answers", "evaluate", "export_draft")


def _both(field: str, remark: str = "") -> dict[str, str]:
    """The names of a field in both ops that train, each with the remark."""
    return {f"train_dflash.{field}": remark, f"finetune_vlm.{field}": remark}


BY_NAMES: Mapping[str, Mapping[str, str] | str] = {
    "num_train_epochs num_epochs total_epochs epochs": {
        "shard_sequence.epochs": "",
        "finetune_vlm.steps": "in optimizer steps: epochs x samples / batch_size",
    },
    "max_steps steps max_train_steps": {
        "train_dflash.max_steps": "it only stops earlier: how many steps there are follows from epochs and "
        "tokens_per_step of shard_sequence",
        "finetune_vlm.steps": "",
    },
    "batch_size": STEP_SIZE
    | {
        "capture_targets.batch_tokens": PADDED,
        "regenerate_answers.batch_tokens": PADDED,
        "evaluate.batch_size": "in prompts that are decoded at the same time",
    },
    "train_batch_size global_batch_size": STEP_SIZE,
    "per_device_train_batch_size micro_batch_size micro_batch_size_per_gpu": _both("micro_batch_tokens", PADDED),
    "gradient_accumulation_steps accumulation_steps": _both("micro_batch_tokens", PASSES),
    "learning_rate": _both("lr"),
    "min_lr": {"train_dflash.min_lr_ratio": "as a share of lr"},
    "lr_scheduler_type lr_scheduler": {
        "train_dflash.schedule": '"cosine" or "wsd"; that of finetune_vlm is fixed',
    },
    "warmup_steps num_warmup_steps": _both("warmup_ratio", "as a share of all steps, not as a number of steps"),
    "optim": {"train_dflash.optimizer": '"adamw" or "muon"'},
    "adam_beta1 adam_beta2 adam_epsilon betas": (
        "the constants of AdamW and Muon are fixed; there are lr, weight_decay and grad_clip"
    ),
    "max_grad_norm clip_grad": _both("grad_clip"),
    "bf16": {f"{op}.dtype": 'for bf16 = true write dtype = "bfloat16"' for op in DTYPES},
    "torch_dtype precision": {f"{op}.dtype": '"float32" or "bfloat16"' for op in DTYPES},
    "save_steps save_interval save_freq": _both("checkpoint_every", STEPS),
    "save_total_limit": _both("keep_checkpoints", "at least 1"),
    "eval_steps eval_interval test_freq": _both("eval_every", STEPS),
    "logging_steps log_interval": _both("log_every", STEPS),
    "load_best_model_at_end metric_for_best_model": {
        "train_dflash.select": '"tau" or "loss" exports the best of the steps that eval_every measures'
    },
    "output_dir save_path cache_dir": "all that nodes write is in the store: dflow run FILE --store DIR",
    "resume_from_checkpoint": (
        "a killed node continues from its last checkpoint by itself: dflow resume, or run the file again"
    ),
    "model_name_or_path target_model_path model_path model": {
        "load_target.checkpoint": "of the target",
        "finetune_vlm.init": "of the target that is trained",
    },
    "tokenizer": {
        "tokenize_chat.processor": "leave it out with a target, whose own processor is used",
        "regenerate_answers.processor": "for a server whose target is not a node",
    },
    "chat_template": {
        "load_target.chat_template": "a file, in place of the checkpoint's own template, in all later nodes and in "
        "serving",
        "tokenize_chat.chat_template": "a file, without a target: that brings its own",
        "regenerate_answers.chat_template": "the file of the server, with a processor",
    },
    "mask_token_id": {"train_dflash.mask_token_id": ""},
    "num_hidden_layers num_draft_layers": {
        "train_dflash.num_layers": "layers of the draft; num_layers of capture_targets are layers of the target"
    },
    "draft_vocab_size": "the draft has the whole vocabulary of the target, whose embedding and head it uses",
    "aux_hidden_state_layer_ids": {
        "capture_targets.target_layer_ids": "layers of the target, counted from 0",
        "train_dflash.target_layer_ids": 'with capture = "online"; else that of capture_targets',
    },
    "lora_rank": "no op trains adapters; freeze of finetune_vlm keeps parts of the target as they are",
    "num_speculative_tokens": {"train_dflash.block_size": BLOCK, "evaluate.block_size": BLOCK},
    "speculative_num_draft_tokens draft_block_size": {"train_dflash.block_size": "", "evaluate.block_size": ""},
    "speculative_num_steps speculative_eagle_topk ttt_steps": (
        "a DFlash draft proposes a whole block in one pass: block_size of train_dflash"
    ),
    "max_anchors": {"train_dflash.num_anchors": "at most, of one sequence"},
    "loss_decay_gamma": {"train_dflash.gamma": ""},
    "dataset data_path train_data_path train_files": {"ingest.source": "a file or a folder"},
    "image_column caption_column prompt_key messages_key input_key output_key": {
        "ingest.columns": 'a table, such as { image = "file_name", answer = "caption" }'
    },
    "max_samples": {
        "ingest.max_samples": "of each category, over all splits",
        "evaluate.max_prompts": "of each category",
    },
    "max_length max_seq_length max_seq_len max_model_len": {
        "tokenize_chat.max_length": "longer samples are dropped, never cut inside an answer"
    },
    "packing": "train_dflash always packs the samples of a pass, without padding and without attention between them",
    "num_proc": {"tokenize_chat.workers": "", "inject_images.workers": ""},
    "dataloader_num_workers": {"train_dflash.buffer_batches": "micro-batches that are prepared ahead"},
    "max_new_tokens max_tokens": {
        "regenerate_answers.max_new_tokens": "",
        "evaluate.max_new_tokens": "",
        "finetune_vlm.max_new_tokens": "of the answers that metric compares",
        "train_dflash.eval_new_tokens": "of the answers that measure tau",
    },
    "top_k": {
        "regenerate_answers.extra_body": 'as a key of it, extra_body = { top_k = 20 }, with backend = "endpoint"; '
        'sampling = "checkpoint" takes it from generation_config.json'
    },
    "base_url": {"regenerate_answers.endpoint": 'with backend = "endpoint"'},
    "nproc_per_node num_gpus n_gpus_per_node world_size": {
        "launch.nproc": 'ranks on each host, with kind = "ranks" or "ray"',
        "machine.gpus": "",
    },
    "nnodes": {"launch.hosts": 'with kind = "ray": docs/cluster.md'},
    "capture_ranks": {
        "launch.pool": 'workers beside the ranks, which all train: launch = { kind = "ranks", nproc = 6, '
        "pool = { workers = 2 } }"
    },
    "ulysses_sequence_parallel_size sp_ulysses_size": {"launch.sp_degree": "ranks that share every sequence"},
    "tensor_parallel_size tp_size": {
        "capture_targets.tp_degree": 'ranks that share the target, with backend = "sglang"'
    },
    "mem_fraction_static": {
        "capture_targets.server_args": 'server_args = { mem_fraction_static = ... }, with backend = "sglang"'
    },
    "fsdp deepspeed": 'several ranks shard what they train by themselves: launch = { kind = "ranks", nproc = 4 }',
    "gradient_checkpointing activation_checkpointing": {
        "train_dflash.activation_checkpointing": "",
        "finetune_vlm.gradient_checkpointing": "",
    },
    "torch_compile": {"train_dflash.compile": ""},
    "report_to": {"mlflow.tracking": "runs are sent to MLflow only"},
    "wandb_project experiment_name": {"mlflow.experiment": ""},
    "run_name run_id": "a run is named where it is started: dflow run FILE --name TEXT; its id is made by dflow",
}
ALIASES = {name: answer for names, answer in BY_NAMES.items() for name in names.split()}
