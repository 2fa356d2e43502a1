"""What the tests of fine-tuning share: a small config, one call of the op, and tokens with something changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import Factory, frozen
from fake_stage import FakeStage
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from dsl.op import Ref
from ops.artifacts import TokenShards
from ops.finetune_vlm.measuring import greedy_answers
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.run import finetune_vlm
from ops.lib.data.files import read_json, read_jsonl, write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.model import Target


@frozen
class RankCase:
    """A training on two ranks: changes of the config, and the ranks that share a sequence."""

    changes: dict[str, Any] = Factory(dict)
    sp_degree: int = 1


# Three samples a step leave a rank without one in some pass, and without an image in most.
STEPS = {"steps": 4, "batch_size": 3, "log_every": 1, "lr": 1e-4, "micro_batch_tokens": 150}
MEASURED = {"metric": "exact_match", "max_new_tokens": 4, "eval_samples": None, "eval_every": 2}
RANK_CASES = {
    "two rows": RankCase({**STEPS, **MEASURED}),
    "shared sequences": RankCase({**STEPS, **MEASURED}, sp_degree=2),
    "shared sequences recomputed": RankCase({**STEPS, "gradient_checkpointing": True}, sp_degree=2),
    "one process, then two rows": RankCase(STEPS),
    "bfloat16": RankCase({**STEPS, "dtype": "bfloat16"}),
    "muon": RankCase({**STEPS, "optimizer": "muon"}, sp_degree=2),
    "frozen": RankCase({**STEPS, "freeze": ("vision", "embeddings")}),
    "degree that does not fit": RankCase(STEPS, sp_degree=3),
}


def config(**changes: Any) -> FinetuneVlm:
    """The config of the `target` fixture, with changes."""
    return FinetuneVlm(tokens=Ref("tokenize"), **{"steps": 2, "batch_size": 8, "eval_samples": 2, "seed": 0, **changes})


def train(
    folder: Path | FakeStage, tokens: TokenShards | None = None, stop_after: int | None = None, **changes: Any
) -> FakeStage:
    """Fine-tune in a folder, or on a given stage; returns the stage."""
    stage = folder
    if not isinstance(stage, FakeStage):
        stage = FakeStage(stage, {"tokens": tokens}, stop_after=stop_after)
    finetune_vlm(config(**changes), stage)
    return stage


def write_inputs(folder: Path, tokens: TokenShards, init: str = "") -> None:
    """Write inputs.json for finetune_worker.py."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"tokens": str(tokens.path), "digest": tokens.digest, "init": init}
    (folder / "inputs.json").write_text(json.dumps(content), encoding="utf-8")


def poisoned(
    tokens: TokenShards,
    folder: Path,
    split: str = "",
    change: Callable[[dict[str, Any]], Any] | None = None,
    *,
    keep: Callable[[dict[str, Any]], bool] = lambda _record: True,
) -> TokenShards:
    """A changed copy of tokens: `change` alters the tensors of a split's shards; `keep` chooses samples of all
    splits.
    """
    shutil.copytree(tokens.path, folder)
    for file in folder.glob(f"{split}-*.safetensors") if change else ():
        tensors = load_file(file)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    records = [record for record in read_jsonl(folder / "samples.jsonl") if keep(record)]
    write_jsonl(folder / "samples.jsonl", records)
    info, splits = read_json(folder / "tokens.json"), {record["split"] for record in records}
    kept = [shard for shard in info["shards"] if shard["split"] in splits]
    write_json(folder / "tokens.json", info | {"shards": kept})
    return TokenShards(folder, f"changed {folder.name}")


def relabelled(tokens: TokenShards, folder: Path, split: str, label: Callable[[int], str]) -> TokenShards:
    """A copy in which the samples of a split, counted from 0, have other labels."""
    copy = poisoned(tokens, folder)
    records = list(read_jsonl(folder / "samples.jsonl"))
    for number, record in enumerate(record for record in records if record["split"] == split):
        record["label"] = label(number)
    write_jsonl(folder / "samples.jsonl", records)
    return copy


def answers_of(
    checkpoint: Path, tokens: TokenShards, split: str, count: int, dtype: torch.dtype = torch.float32
) -> list[str]:
    """The first `count` tokens of a checkpoint's greedy answer to each sample of a split, as text."""
    reader = TokenReader(tokens, split)
    tokenizer = AutoTokenizer.from_pretrained(tokens.path / "processor")
    target = Target.from_directory(checkpoint, {"eos_token_ids": reader.info["eos_token_ids"]}, dtype=dtype)
    ids = [greedy_answers(target, [reader.sample(index)], count)[0] for index in range(len(reader))]
    return [tokenizer.decode(answer, skip_special_tokens=True) for answer in ids]
