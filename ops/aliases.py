"""The names of transformers, SpecForge, speculators, verl, ModelOpt, SGLang and vLLM for what dflow can set.

dsl/aliases.py answers unknown keys from this table; docs/coming_from.md shows it by project. A name is in one row only.
"""

from __future__ import annotations

from dsl.aliases import Alias

STEPS = "in optimizer steps"
PADDED = "in padded tokens of one forward pass of a rank, not in samples"
PASSES = "a step is cut into passes of so many padded tokens, however many it takes; their number is no setting"
SHARE = "as a share of all steps, not as a number of steps"
BLOCK = "with the anchor, so one more than the tokens that are drafted"
SERVER_ARG = 'as a key of it, server_args = {{ {} = ... }}, with backend = "sglang"'
DTYPES = ("train_dflash", "finetune_vlm", "capture_targets", "regenerate_answers", "evaluate", "export_draft")


def _both(field: str, remark: str = "") -> dict[str, str]:
    """The field of the two ops that train."""
    return {f"train_dflash.{field}": remark, f"finetune_vlm.{field}": remark}


STEPS_AND_BATCHES = (
    Alias(
        ("num_train_epochs", "num_epochs", "total_epochs", "max_epochs", "n_epochs", "epochs"),
        {"shard_sequence.epochs": "", "finetune_vlm.steps": "in optimizer steps: epochs x samples / batch_size"},
    ),
    Alias(
        (
            "max_steps",
            "steps",
            "num_steps",
            "num_train_steps",
            "max_train_steps",
            "total_training_steps",
        ),
        {
            "train_dflash.max_steps": "it only stops earlier: how many steps there are follows from epochs and "
            "tokens_per_step of shard_sequence",
            "finetune_vlm.steps": "",
        },
    ),
    Alias(
        ("batch_size",),
        {
            "shard_sequence.tokens_per_step": "in padded tokens of one optimizer step over all ranks, not in samples",
            "finetune_vlm.batch_size": "in samples of one optimizer step over all ranks",
            "capture_targets.batch_tokens": PADDED,
            "regenerate_answers.batch_tokens": PADDED,
            "evaluate.batch_size": "in prompts that are decoded at the same time",
        },
    ),
    Alias(
        ("train_batch_size", "global_batch_size", "total_batch_size", "effective_batch_size"),
        {
            "shard_sequence.tokens_per_step": "in padded tokens of one optimizer step over all ranks, not in samples",
            "finetune_vlm.batch_size": "in samples of one optimizer step over all ranks",
        },
    ),
    Alias(
        ("total_seq_len",),
        {"shard_sequence.tokens_per_step": "over all ranks together: total_seq_len x ranks"},
    ),
    Alias(
        (
            "per_device_train_batch_size",
            "micro_batch_size",
            "micro_batch_size_per_gpu",
            "ppo_micro_batch_size_per_gpu",
            "train_micro_batch_size_per_gpu",
        ),
        {
            "train_dflash.micro_batch_tokens": f"{PADDED}; a step over all ranks is tokens_per_step of shard_sequence",
            "finetune_vlm.micro_batch_tokens": f"{PADDED}; a step over all ranks is batch_size",
        },
    ),
    Alias(
        ("max_token_len_per_gpu", "ppo_max_token_len_per_gpu"),
        _both("micro_batch_tokens", "in padded tokens of one forward pass of a rank"),
    ),
    Alias(
        ("gradient_accumulation_steps", "accumulation_steps", "grad_accum_steps", "accumulate_grad_batches"),
        _both("micro_batch_tokens", PASSES),
    ),
    Alias(
        ("per_device_eval_batch_size", "eval_batch_size", "val_batch_size"),
        {"evaluate.batch_size": "in prompts that are decoded at the same time; a training has no such setting for val"},
    ),
)

OPTIMIZER = (
    Alias(("learning_rate", "base_lr", "max_lr", "peak_lr"), _both("lr")),
    Alias(("muon_lr",), {"train_dflash.lr": "one learning rate for Muon and AdamW"}),
    Alias(("vision_lr", "vision_tower_lr", "mm_vision_tower_lr"), {"finetune_vlm.lr_vision": ""}),
    Alias(("projector_lr", "mm_projector_lr", "merger_lr"), {"finetune_vlm.lr_projector": ""}),
    Alias(("min_lr", "min_learning_rate", "eta_min"), {"train_dflash.min_lr_ratio": "as a share of lr"}),
    Alias(
        ("lr_scheduler_type", "lr_scheduler", "scheduler_type", "scheduler", "lr_decay_style", "warmup_style"),
        {"train_dflash.schedule": '"cosine" or "wsd"; that of finetune_vlm is fixed'},
    ),
    Alias(
        ("total_steps", "scheduler_total_steps", "scheduler_num_cosine_cycles", "num_cycles", "lr_scheduler_kwargs"),
        none="the schedule spans all steps; their number follows from epochs and tokens_per_step of shard_sequence",
    ),
    Alias(
        ("warmup_steps", "num_warmup_steps", "lr_warmup_steps", "scheduler_warmup_steps"), _both("warmup_ratio", SHARE)
    ),
    Alias(("lr_warmup_steps_ratio", "scheduler_warmup_ratio", "lr_warmup_ratio"), _both("warmup_ratio")),
    Alias(
        ("decay_steps", "num_decay_steps", "lr_decay_steps"),
        {"train_dflash.decay_ratio": f'{SHARE}, with schedule = "wsd"'},
    ),
    Alias(("optim", "optimizer_type", "optimizer_name"), {"train_dflash.optimizer": '"adamw" or "muon"'}),
    Alias(
        ("adam_beta1", "adam_beta2", "adam_epsilon", "betas", "beta1", "beta2", "muon_momentum", "muon_ns_steps"),
        none="the constants of AdamW and Muon are fixed; there are lr, weight_decay and grad_clip",
    ),
    Alias(("muon_weight_decay", "adam_weight_decay"), _both("weight_decay", "of all matrices")),
    Alias(
        ("max_grad_norm", "clip_grad", "clip_grad_norm", "grad_clip_norm", "gradient_clipping", "gradient_clip_val"),
        _both("grad_clip"),
    ),
    Alias(
        ("label_smoothing_factor", "neftune_noise_alpha", "noise_std"),
        none="neither labels nor features are made noisy",
    ),
)

PRECISION = (
    Alias(("bf16",), {f"{op}.dtype": 'for bf16 = true write dtype = "bfloat16"' for op in DTYPES}),
    Alias(
        ("fp16",),
        {
            "capture_targets.dtype": 'for fp16 = true write dtype = "float16"',
            "regenerate_answers.dtype": 'for fp16 = true write dtype = "float16"',
            "evaluate.dtype": 'for fp16 = true write dtype = "float16"',
            "export_draft.dtype": 'for fp16 = true write dtype = "float16"',
            **_both("dtype", '"bfloat16" or "float32": no op trains in float16'),
        },
    ),
    Alias(
        ("torch_dtype", "model_dtype", "mixed_precision", "precision", "autocast_dtype"),
        {f"{op}.dtype": '"float32" or "bfloat16"' for op in DTYPES},
    ),
    Alias(
        ("hidden_states_dtype", "feature_dtype"),
        {
            "capture_targets.dtype": "of the target's forward pass and of the stored features",
            "train_dflash.capture_dtype": 'with capture = "online"; stored features have the dtype of capture_targets',
        },
    ),
    Alias(("tf32",), none="torch's default is kept"),
)

CHECKPOINTS_AND_LOGS = (
    Alias(
        ("save_steps", "save_interval", "save_freq", "save_every", "checkpoint_interval", "checkpoint_steps"),
        _both("checkpoint_every", STEPS),
    ),
    Alias(("checkpoint_freq",), _both("checkpoint_every", "in optimizer steps, not in epochs")),
    Alias(("save_strategy",), _both("checkpoint_every", "a checkpoint is written every so many optimizer steps")),
    Alias(
        ("save_total_limit", "max_checkpoints", "max_ckpt_to_keep", "max_actor_ckpt_to_keep"),
        _both("keep_checkpoints", "at least 1"),
    ),
    Alias(
        ("eval_steps", "eval_interval", "eval_freq", "test_freq", "val_check_interval", "validation_steps"),
        _both("eval_every", STEPS),
    ),
    Alias(
        ("eval_strategy", "evaluation_strategy"),
        _both("eval_every", "val is measured every so many optimizer steps; without it, only at the end"),
    ),
    Alias(
        ("logging_steps", "log_interval", "log_freq", "log_steps", "log_every_n_steps", "logging_interval"),
        _both("log_every", STEPS),
    ),
    Alias(
        ("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "save_best"),
        {"train_dflash.select": '"tau" or "loss" exports the best of the steps that eval_every measures'},
    ),
    Alias(
        ("early_stopping_patience", "early_stopping"),
        none="a training goes to its last step; select of train_dflash chooses the step that is exported",
    ),
    Alias(
        ("output_dir", "save_path", "save_dir", "checkpoint_dir", "ckpt_dir", "default_local_dir", "default_hdfs_dir"),
        none="all that nodes write is in the store: dflow run FILE --store DIR",
    ),
    Alias(
        ("cache_dir", "hidden_states_path", "offline_data_path", "logging_dir", "log_dir"),
        none="features, logs and all else that nodes write is in the store: dflow run FILE --store DIR",
    ),
    Alias(
        (
            "resume_from_checkpoint",
            "no_resume_from_checkpoint",
            "resume_from",
            "resume_from_path",
            "resume_mode",
            "resume",
        ),
        none="a killed node continues from its last checkpoint by itself: dflow resume, or run the file again",
    ),
    Alias(
        ("push_to_hub", "hub_model_id"),
        none="export_draft writes a directory in the format of the hub; upload that",
    ),
)

MODELS = (
    Alias(
        (
            "model_name_or_path",
            "pretrained_model_name_or_path",
            "target_model_name_or_path",
            "verifier_name_or_path",
            "target_model_path",
            "model_path",
            "model_name",
            "model_id",
            "model",
            "base_model",
            "target_model",
            "verifier",
            "partial_pretrain",
        ),
        {"load_target.checkpoint": "of the target", "finetune_vlm.init": "of the target that is trained"},
    ),
    Alias(
        ("model_revision", "hf_revision"),
        {"load_target.revision": "a commit of 40 hex digits", "finetune_vlm.revision": "a commit of 40 hex digits"},
    ),
    Alias(
        (
            "tokenizer",
            "tokenizer_path",
            "tokenizer_name",
            "tokenizer_name_or_path",
            "processing_class",
            "vlm_processor",
        ),
        {
            "tokenize_chat.processor": "leave it out with a target, whose own processor is used",
            "regenerate_answers.processor": "for a server whose target is not a node",
        },
    ),
    Alias(
        ("chat_template", "custom_chat_template"),
        {
            "load_target.chat_template": "a file, in place of the checkpoint's own template, in all later nodes and in "
            "serving",
            "tokenize_chat.chat_template": "a file, without a target: that brings its own",
            "regenerate_answers.chat_template": "the file of the server, with a processor",
        },
    ),
    Alias(
        ("chat_template_kwargs", "apply_chat_template_kwargs"),
        {
            "tokenize_chat.enable_thinking": "the only argument that a chat template is given",
            "regenerate_answers.enable_thinking": "the only argument that a chat template is given",
        },
    ),
    Alias(("mask_token_id", "dflash_mask_token_id"), {"train_dflash.mask_token_id": ""}),
    Alias(("embedding_key", "embed_tokens_key"), {"load_target.embed_key": ""}),
    Alias(
        ("from_pretrained", "draft_checkpoint_path", "draft_model_path", "draft_model_name_or_path"),
        {
            "train_dflash.warm_start": 'a reference, "@node", to a node that gives a Draft of the same shape',
            "load_target.checkpoint": "",
            "finetune_vlm.init": "",
        },
    ),
    Alias(
        ("draft_config", "draft_model_config", "dflash_architecture_config"),
        none="the draft's shape is num_layers, num_heads, num_kv_heads, head_dim and intermediate_size of train_dflash",
    ),
    Alias(
        ("num_hidden_layers", "draft_num_hidden_layers", "num_draft_layers", "draft_layers"),
        {"train_dflash.num_layers": "layers of the draft; num_layers of capture_targets are layers of the target"},
    ),
    Alias(("num_attention_heads",), {"train_dflash.num_heads": ""}),
    Alias(("num_key_value_heads",), {"train_dflash.num_kv_heads": ""}),
    Alias(
        ("full_attention_indices",),
        {"train_dflash.sliding_layers": "the other way round: the layers that have a window"},
    ),
    Alias(
        ("draft_vocab_size", "vocab_mapping_path", "token_freq_path", "d2t_path", "t2d_path", "draft_vocab_cache"),
        none="the draft has the whole vocabulary of the target, whose embedding and head it uses",
    ),
    Alias(
        ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids", "aux_layers", "layer_ids"),
        {
            "capture_targets.target_layer_ids": "layers of the target, counted from 0",
            "train_dflash.target_layer_ids": 'with capture = "online"; else that of capture_targets',
        },
    ),
    Alias(
        ("lora_rank", "lora_alpha", "lora_r", "use_lora", "use_peft", "peft_config", "target_modules"),
        none="no op trains adapters; freeze of finetune_vlm keeps parts of the target as they are",
    ),
    Alias(
        ("freeze_vision_tower", "freeze_vit", "freeze_vision", "freeze_llm", "freeze_multi_modal_projector"),
        {"finetune_vlm.freeze": 'a list of "vision", "projector", "text", "embeddings"'},
    ),
)

DRAFTING = (
    Alias(
        ("num_speculative_tokens",),
        {"train_dflash.block_size": BLOCK, "evaluate.block_size": BLOCK},
    ),
    Alias(
        (
            "draft_block_size",
            "dflash_block_size",
            "speculative_dflash_block_size",
            "speculative_num_draft_tokens",
            "num_draft_tokens",
        ),
        {"train_dflash.block_size": "", "evaluate.block_size": ""},
    ),
    Alias(
        ("speculative_num_steps", "num_speculative_steps", "ttt_steps", "ttt_length", "num_depths"),
        none="a DFlash draft proposes a whole block in one pass: block_size of train_dflash",
    ),
    Alias(
        ("speculative_eagle_topk", "eagle_topk"),
        none="a DFlash draft proposes one block, not a tree: block_size of train_dflash",
    ),
    Alias(
        ("speculative_algorithm", "speculative_draft_model_path", "speculative_config", "speculator_type"),
        none="dflow serve starts SGLang with the algorithm DFLASH and the run's draft",
    ),
    Alias(("max_anchors", "dflash_num_anchors"), {"train_dflash.num_anchors": "at most, of one sequence"}),
    Alias(
        ("loss_decay_gamma", "dflash_decay_gamma", "dflash_loss_decay_factor", "decay_gamma"),
        {"train_dflash.gamma": ""},
    ),
    Alias(
        ("loss_type", "loss_fn", "loss_function", "per_position_loss_weight"),
        {"train_dflash.loss": '"dflash", "dpace", "focal", "kl", "l1", "lk" or "nla"'},
    ),
    Alias(
        ("dflash_self_logit_distillation", "self_logit_distillation"),
        {"train_dflash.loss": 'loss = "kl", with final_hidden of capture_targets set'},
    ),
)

DATA = (
    Alias(
        (
            "dataset",
            "dataset_name",
            "dataset_path",
            "data_path",
            "data_files",
            "train_data_path",
            "train_dataset",
            "train_file",
            "train_files",
            "prompts_path",
        ),
        {"ingest.source": "a file or a folder"},
    ),
    Alias(
        ("eval_data_path", "eval_dataset", "val_files", "validation_file"),
        {"ingest.val_fraction": "a share of the samples; a sample whose row has a key `split` is in that one"},
    ),
    Alias(
        ("train_data_ratio",),
        {"ingest.val_fraction": "the share of val, not of train"},
    ),
    Alias(
        ("validation_split", "validation_split_percentage", "val_size", "val_ratio", "eval_ratio", "test_size"),
        {"ingest.val_fraction": "a share between 0 and 1; that of the split test is test_fraction"},
    ),
    Alias(("image_folder", "image_dir", "vlm_img_dir", "media_dir"), {"ingest.image_root": ""}),
    Alias(
        ("max_train_samples", "train_max_samples", "max_samples", "num_samples", "sample_size"),
        {"ingest.max_samples": "of each category, over all splits", "evaluate.max_prompts": "of each category"},
    ),
    Alias(
        (
            "max_length",
            "max_seq_length",
            "max_seq_len",
            "model_max_length",
            "training_seq_len",
            "seq_length",
            "sequence_length",
            "cutoff_len",
        ),
        {"tokenize_chat.max_length": "longer samples are dropped, never cut"},
    ),
    Alias(
        ("max_model_len", "context_length"),
        {
            "tokenize_chat.max_length": "longer samples are dropped, never cut",
            "regenerate_answers.max_prompt_tokens": "of the prompt; its answer has max_new_tokens",
        },
    ),
    Alias(("max_prompt_length", "prompt_length"), {"regenerate_answers.max_prompt_tokens": "longer ones are dropped"}),
    Alias(("truncation",), none="samples longer than max_length of tokenize_chat are dropped, never cut"),
    Alias(
        ("packing", "sequence_packing", "sample_packing", "padding_free", "use_remove_padding"),
        none="train_dflash always packs the samples of a pass, without padding and without attention between them",
    ),
    Alias(("train_only_last_turn",), {"tokenize_chat.train_on": 'train_on = "last"'}),
    Alias(
        ("answer_only_loss", "assistant_only_loss", "completion_only_loss", "train_on_responses_only", "mask_prompt"),
        {"tokenize_chat.train_on": '"assistant" is the default'},
    ),
    Alias(
        ("build_dataset_num_proc", "dataset_num_proc", "preprocessing_num_workers", "num_proc"),
        {"tokenize_chat.workers": "", "inject_images.workers": ""},
    ),
    Alias(
        ("num_workers",),
        {
            "train_dflash.buffer_batches": "micro-batches that are prepared ahead",
            "tokenize_chat.workers": "",
            "inject_images.workers": "",
        },
    ),
    Alias(
        ("dataloader_num_workers", "dataloader_prefetch_factor", "prefetch_factor"),
        {"train_dflash.buffer_batches": "micro-batches that are prepared ahead"},
    ),
)

GENERATION = (
    Alias(
        ("max_new_tokens", "max_tokens", "max_completion_tokens", "max_response_length", "response_length"),
        {
            "regenerate_answers.max_new_tokens": "",
            "evaluate.max_new_tokens": "",
            "finetune_vlm.max_new_tokens": "of the answers that metric compares",
            "train_dflash.eval_new_tokens": "of the answers that measure tau",
        },
    ),
    Alias(
        ("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        {"regenerate_answers.extra_body": 'as a key of it, extra_body = { top_k = 20 }, with backend = "endpoint"'},
    ),
    Alias(("top_p",), {"regenerate_answers.top_p": "evaluate samples from the target's whole distribution"}),
    Alias(("do_sample",), {"regenerate_answers.temperature": "0 is greedy", "evaluate.temperature": "0 is greedy"}),
    Alias(
        (
            "base_url",
            "api_base",
            "openai_api_base",
            "server_url",
            "server_urls",
            "vllm_endpoint",
            "streaming_server_url",
        ),
        {"regenerate_answers.endpoint": 'with backend = "endpoint"'},
    ),
    Alias(("api_key",), {"regenerate_answers.api_key_env": "the name of the environment variable that holds it"}),
    Alias(("request_timeout",), {"regenerate_answers.timeout_s": ""}),
    Alias(("max_retries",), {"regenerate_answers.retries": ""}),
    Alias(
        ("max_num_seqs", "max_running_requests", "max_concurrency"),
        {"regenerate_answers.concurrency": "requests at the same time", "evaluate.batch_size": ""},
    ),
)

PROCESSES = (
    Alias(
        ("nproc_per_node", "n_gpus_per_node", "gpus_per_node", "num_processes", "num_gpus", "world_size", "nproc"),
        {"launch.nproc": 'ranks on each host, with kind = "ranks" or "ray"', "machine.gpus": ""},
    ),
    Alias(("nnodes", "num_nodes"), {"launch.hosts": 'with kind = "ray": docs/cluster.md'}),
    Alias(
        ("node_rank", "master_addr", "master_port", "rendezvous", "rdzv_endpoint"),
        none='ranks on several hosts are started by Ray: launch = { kind = "ray", hosts = 2 }, docs/cluster.md',
    ),
    Alias(
        (
            "sp_ulysses_size",
            "sp_ring_size",
            "sp_size",
            "ulysses_sequence_parallel_size",
            "sequence_parallel_size",
            "context_parallel_size",
            "cp_size",
        ),
        {"launch.sp_degree": "ranks that share every sequence"},
    ),
    Alias(
        ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size"),
        {"capture_targets.tp_degree": 'ranks that share the target, with backend = "sglang"'},
    ),
    Alias(
        ("mem_fraction_static", "sglang_mem_fraction_static", "gpu_memory_utilization"),
        {"capture_targets.server_args": SERVER_ARG.format("mem_fraction_static")},
    ),
    Alias(("kv_cache_dtype",), {"capture_targets.server_args": SERVER_ARG.format("kv_cache_dtype")}),
    Alias(("quantization",), {"capture_targets.server_args": SERVER_ARG.format("quantization")}),
    Alias(
        ("attention_backend", "sglang_attention_backend"),
        {"capture_targets.server_args": f"{SERVER_ARG.format('attention_backend')}; other ops take no kernel"},
    ),
    Alias(
        (
            "attn_implementation",
            "draft_attn_impl",
            "flash_attention",
            "use_liger_kernel",
            "use_liger",
            "use_fused_kernels",
        ),
        none="kernels are chosen by the device",
    ),
    Alias(("use_cpu", "no_cuda"), {"launch.device": 'launch.device = "cpu"'}),
    Alias(("device_map",), {"launch.device": '"auto", "cpu" or "cuda"'}),
    Alias(
        ("fsdp", "fsdp_config", "fsdp_sharding", "fsdp_shard", "fsdp_size", "deepspeed", "ddp_backend"),
        none='several ranks shard what they train by themselves: launch = { kind = "ranks", nproc = 4 }',
    ),
    Alias(
        ("activation_checkpointing", "gradient_checkpointing", "enable_gradient_checkpointing"),
        {"train_dflash.activation_checkpointing": "", "finetune_vlm.gradient_checkpointing": ""},
    ),
    Alias(("torch_compile", "use_torch_compile", "enable_torch_compile"), {"train_dflash.compile": ""}),
)

TRACKING = (
    Alias(("report_to", "logger", "log_with"), {"mlflow.tracking": "runs are sent to MLflow only"}),
    Alias(
        ("wandb_project", "swanlab_project", "project_name", "experiment_name", "mlflow_experiment_name"),
        {"mlflow.experiment": ""},
    ),
    Alias(
        ("run_name", "wandb_name", "swanlab_name", "mlflow_run_name", "run_id"),
        {"pipeline.name": "every run of it gets a name of its own besides"},
    ),
    Alias(("tracking_uri", "mlflow_tracking_uri"), {"mlflow.tracking_uri": ""}),
    Alias(("data_seed", "prompt_seed"), {"shard_sequence.seed": "of the order of the samples"}),
    Alias(("random_seed", "manual_seed"), {"pipeline.seed": "of all nodes that give no seed of their own"}),
)

ALIASES = (
    *STEPS_AND_BATCHES,
    *OPTIMIZER,
    *PRECISION,
    *CHECKPOINTS_AND_LOGS,
    *MODELS,
    *DRAFTING,
    *DATA,
    *GENERATION,
    *PROCESSES,
    *TRACKING,
)
