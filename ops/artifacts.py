"""The typed artifacts that travel on edges. Each docstring is the layout of the folder; nothing here loads torch.

`required_files` are those that other ops read of every artifact of the type: an output without them is refused.

Every JSON file is UTF-8 with sorted keys; every tensor is in a safetensors file. Splits are "train", "val", "test".
An *image reference* is {"sha256", "pack", "offset", "size"}: the encoded image (PNG, JPEG, ...) is the `size` bytes
at `offset` of the file `pack`, each distinct image stored once.
"""

from __future__ import annotations

from attrs import frozen

from dsl.op import Artifact


@frozen
class Samples(Artifact):
    """Conversations as ingested.

    samples.jsonl       one object a line: {"id", "split", "category": "image" | "text",
                        "conversations": [{"role": "system" | "user" | "assistant",
                        "content": [{"type": "text", "text"} | {"type": "image"}]}],
                        "images": [image reference, ...]}; the i-th image part, over all turns, shows images[i];
                        "label" as well, what a right answer says, where the source tells it apart from the answer;
                        and "topic", the text of the field that `group` names, if any. With tools: "tools" as
                        chat templates take them, "tool_calls" of answers, and turns {"role": "tool", "tool_call_id",
                        "name", "content"}; "documents" as chat templates take them; with either, keys are not
                        sorted. An answer's "reasoning_content" where it has one
    images-00000.bin    packs of encoded images, about 256 MiB each
    summary.json        {"in", "kept", "dropped": {reason: count}, "splits": {split: count}, and where more than a tenth
                        is lost "losses": [{"of": "samples" | "answers", "text", "remedy"}]}
    dropped.csv         id, reason, detail of every sample that was dropped
    source.json         with max_samples: {"image" | "text": {split: count}} of what can be used of the whole source
    """

    required_files = ("samples.jsonl",)


@frozen
class ImageSamples(Artifact):
    """Conversations as chat messages whose images can be decoded and stand where the policy wants them.

    samples.jsonl       {"id", "split", "category", "messages": [{"role", "content": [{"type": "image"} |
                        {"type": "text", "text"}]}], "images": [image reference, ...]}, image parts and the
                        optional "label", "topic" and what belongs to tools as in Samples;
                        where the target answered itself also {"finish_reasons": ["stop" | "length", ...],
                        "answer_tokens": [...]}, one of each per answer; such an answer has the ids that the target
                        generated, "generated_ids", with EOS unless it was cut, and the digest of the tokens that they
                        mean, "tokenizer", except where a server reports none. "learnt": "last" where only the last
                        answer is learnt, of an id "ID@K" for the K-th answer of the "conversation" ID
    images-00000.bin    the packs of the ingested samples (hard links where the file system allows)
    summary.json        as in Samples, and dropped.csv
    answered.json       where a target answered, how it was asked: {"enable_thinking", "history_reasoning"}, and
                        "tools_as" where it is not "given"
    measurements.json   where a server answered: {"requests", "retries", "seconds", "server", ...} (outside the digest)
    """

    required_files = ("samples.jsonl",)


@frozen
class TokenShards(Artifact):
    """Tokenised samples and the processor that made them.

    tokens.json                 {"format": 1, "mask_token_id", "image_token_id" or null, "pad_token_id",
                                "eos_token_ids", "vocab_size", "patch_dim", "merge_size",
                                "image_backend": "pillow" | "torchvision", null without an image processor,
                                "pixel_limits": {"min_pixels", "max_pixels"} of an image, null likewise,
                                "images_of": the model type by whose own processor images were read, absent for Qwen's,
                                "enable_thinking": as the chat template got it, null where it was not told,
                                "tools_as": absent for "given", "tools_unlike": {engine: [what it does, ...]} where
                                samples have tools that an engine's server would show otherwise,
                                "reasoning_key": the key under which prompts show the reasoning of earlier answers,
                                absent where they show none, or each engine's server gives it,
                                "shards": [{"file", "split", "samples", "tokens"}]}
    samples.jsonl               one object per sample, in shard order; with contexts = "served", a conversation may have
                                several, of the ids "ID@K": K is the number of the first answer that is learnt in it
                                {"id", "split", "category", "shard", "row", "tokens", "prompt_tokens", "loss_tokens",
                                "label": that of the row, or else the text of the last answer}, and "topic" of the row;
                                with contexts = "served" also "answers": [[first token, answers before it], ...] of each
                                answer that the sample can be asked for, the last one's at prompt_tokens
    train-00000.safetensors     per shard, samples concatenated (N samples, T tokens, R pixel rows, I images):
                                input_ids int32 [T]; loss_mask uint8 [T] (1 on answers and their EOS);
                                token_offsets int64 [N + 1]; pixel_values float32 [R, patch_dim];
                                pixel_offsets int64 [N + 1]; image_grid_thw int64 [I, 3]; image_offsets int64 [N + 1].
                                Text-only samples own zero rows; every tensor is there in every shard. With "images_of"
                                also "seen.NAME", what the processor made for all samples, flat and joined, and
                                "shape.NAME" int64 [N, dimensions], zeros without images; "image_tokens" counts tokens.
                                With contexts = "served" and answers, kinds uint8 [T]: 0 where nothing is learnt, 1
                                reasoning, 2 text, 3 call, 4 the EOS of an answer
    processor/                  tokenizer.json, tokenizer_config.json, chat_template.jinja and, for images,
                                preprocessor_config.json: loadable by transformers
    preview.html                samples of the train split, of every source and form: tokens coloured by mask and kind
    summary.json                as in Samples, and dropped.csv; "in" and "kept" count conversations, "splits" samples
    """

    required_files = ("tokens.json", "samples.jsonl")


@frozen
class TargetModel(Artifact):
    """A frozen target with its processor: a Hugging Face checkpoint directory.

    model/          config.json, model*.safetensors and the processor's files
    target.json     {"model_type", "vision": bool, "vocab_size", "hidden_size", "num_layers", "mask_token_id",
                    "eos_token_ids", "embed_key", "lm_head_key", "tied": bool,
                    "trust_remote_code": bool}; "model_id" and "revision" as well, where it came by a model id, and
                    "fails": [check], where a check of a model that is not Qwen's fails
    metrics.json    what was measured while it was made, e.g. {"accuracy": 0.95}; may be {}
    measurements.json  {"probes": [{"on", "checks", "seconds"}]}, what holds of it, with all words and differences
                    (outside the digest)
    """

    required_files = ("model/config.json", "target.json")


@frozen
class TargetFeatures(Artifact):
    """Hidden states of the chosen target layers, for the samples of each captured split in the order of the tokens.

    features.json               {"format": 1, "target": digest, "tokens": digest, "target_layer_ids", "dtype",
                                perhaps "feature_dtype": "float8", "hidden_size", "num_target_layers", "positions":
                                "sequential", "backend": "huggingface" or "sglang", then with "backend_version" and,
                                where it was given any, "server_args": {name: value},
                                "final_hidden": bool, "mask_token_id", "image_backend" and "pixel_limits", and perhaps
                                "tools_as", "tools_unlike" and "reasoning_key": as in tokens.json,
                                "shards": [{"file", "split", "samples", "tokens", and for float8 "float8_errors": the
                                relative error at each layer, then of final_hidden}]}
    train-00000.safetensors     features dtype [T, len(target_layer_ids) * hidden_size], layers in the order of the ids;
                                input_ids int32 [T]; loss_mask uint8 [T]; token_offsets int64 [N + 1]; where
                                final_hidden is true, final_hidden dtype [T, hidden_size]: states behind the final norm;
                                for float8 both float8_e4m3fn, with features_scales float32 [T, layers] and
                                final_hidden_scales float32 [T, 1] (ops/lib/target/float8.py), and float8_errors float32
    """

    required_files = ("features.json",)


@frozen
class BatchPlan(Artifact):
    """Which samples each global training step takes; knows no ranks and copies no features.

    plan.json       {"format": 1, "steps", "epochs", "samples", "tokens_per_step", "pad_multiple", "seed", "split"}
    steps.jsonl     one object a step: {"step", "epoch", "samples": [index into the split's samples], "tokens"}
    """

    required_files = ("plan.json", "steps.jsonl")


@frozen
class DraftCheckpoint(Artifact):
    """A trained draft: what export_draft turns into a serving directory.

    config.json         the draft's config (the fields of DraftConfig)
    model.safetensors   weights under the names of the serving contract, float32
    training.json       {"steps", "final_loss": of the last "final_steps", "recipe": the fields of train_dflash
                        in its key, "samples" of the train split, "samples_seen" in its steps, "captured": what
                        features.json says but for its shards, "measured": [{"step", "loss", "tau": {"all" |
                        category: {"tau", "low", "high", ...}}, ...}] on the split val, "selected_step": whose weights
                        these are, "val_metrics" of that step, ...}
    measurements.json   {"seconds", "measuring_seconds": of these on the split val, "measuring_share", "step_seconds":
                        the median of a step, ...} (outside the digest)
    state/              with pause_after: what a node with continues goes on from (ops/train_dflash/pause.py)
    val_answers.jsonl   with pause_after: the answer to each val prompt at the last step (ops/train_dflash/answers.py)
    """

    required_files = ("config.json", "model.safetensors", "training.json")


@frozen
class Draft(Artifact):
    """The serving directory of a draft: what stands in it is the DFlash contract, and nothing else does.

    config.json         the contract's fields; under "dflow" what the draft was trained with, which the gate compares,
                        and of an imported draft "imported": {"publisher", "assumed": {field: value}, "notes": [...]},
                        with "source" and "revision" where it came by a model id, "trained_for" where its record names
                        another target's digest; "formats" where there are several
    model.safetensors   the contract's tensors
    README.md           the model card
    speculators/        where export_draft was asked for it, the same draft in that format: config.json and
                        model.safetensors, as speculators and vLLM read them
    """

    required_files = ("config.json", "model.safetensors")


@frozen
class Report(Artifact):
    """What the evaluation measured.

    report.json         tau in total, by category, by position in the answer, context, turn, group, temperature and
                        block size, with bootstrap intervals, and the mean of prompts' taus; acceptance by slot and
                        accepted lengths; the same of a random draft; losslessness, null where answers were sampled;
                        what was asked (split or benchmark, turns, temperature, block sizes, ...), and "unasked";
                        "inputs": digests of draft, target and tokens; "imported" of a draft that was trained
                        elsewhere: {"publisher", "trained_for"} as its config.json has them; "mtp": true where the
                        target's own MTP head took the place of a draft; "eagle3": the name of the folder where an
                        EAGLE-3 draft took it
    prompts.jsonl       one object per prompt: {"id", "category", "prompt_tokens", "tokens": the target's plain answer,
                        "speculative": the speculative one, null where it is the same, "accepted": how many draft
                        tokens per verification step, "tau", "accepted_random", "identical"}
    prompts.html        prompts and answers as a person reads them, with every accepted run in its colour
    measurements.json   wall-clock figures, those of every batch under "times", and with several batch or block sizes
                        the curve under "load" (ops/evaluate/load.py); by how much margins were rounded; where there is
                        a confidence head, under "confidence" how well it is calibrated (outside the digest)
    """

    required_files = ("report.json", "prompts.jsonl")


@frozen
class CheckedDraft(Artifact):
    """A draft that passed the gate, as it is shipped.

    draft/          the serving directory; its model card holds the measured tau
    check.json      {"static": "passed", "live": {"status": "passed" | "skipped", ...}, "tau": {"evaluate", "served"},
                    "warnings": [...]}
    served.jsonl    where SGLang decoded: {"id", "category", "tokens", "accepted", "accepted_evaluate"} per prompt
    """

    required_files = ("draft/config.json", "draft/model.safetensors", "check.json")
