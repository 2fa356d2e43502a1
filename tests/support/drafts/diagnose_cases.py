"""A draft that knows a target's answers by heart, with all that a diagnosis looks at, and ways to spoil it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from overfit import overfit, with_answers
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops.artifacts import Draft, DraftCheckpoint, TargetFeatures, TargetModel, TokenShards
from ops.lib.data.files import read_json, write_json
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.decoding.decode import decode_plain
from ops.lib.target.model import Target
from ops.tools.diagnose.chain import Chain
from ops.tools.diagnose.judgement import CAUSE
from ops.tools.diagnose.run import diagnose

BLOCK = 6
NEW_TOKENS = 23  # behind the first token of an answer
PROMPTS = 6
LAYER = 3  # the only one that is captured: with several a draft that knows the answers by heart misses none of them
AGAIN = "dflow resume RUN --from export"
FLAT = [(step, 0.5 + 0.01 * (step % 2)) for step in range(1, 101)]  # a loss that falls no more


def make_chain(folder: Path, target: TargetModel, tokens: TokenShards) -> Chain:
    """Make a chain whose splits all hold the training's samples, so that there is no gap between them."""
    reader = TokenReader(tokens, "train")
    samples = [reader.sample(index) for index in range(len(reader))]
    prompts = [
        sample
        for category in ("image", "text")
        for sample in [one for one in samples if one.category == category][: PROMPTS // 2]
    ]
    loaded = Target.load(target)
    answers = [decode_plain(loaded, sample, NEW_TOKENS) for sample in prompts]
    folder.mkdir(parents=True)
    own = with_answers(folder / "tokens", reader.info, prompts, answers, splits=("train", "val", "test"))
    draft = overfit(
        folder, target, own, capture={"target_layer_ids": (LAYER,)}, block_size=BLOCK, num_anchors=NEW_TOKENS + 1
    )
    return Chain(
        node="export",
        draft=draft,
        target=target,
        judged=own,
        training=DraftCheckpoint(folder / "train" / "out", "training"),
        features=TargetFeatures(folder / "capture" / "out", "features"),
        learnt=own,
        is_online=False,
        regenerated_at=None,
        kept_by=None,
        losses=(),
        evaluation=None,
        answered=None,
        asks_each=False,
        split="test",
        other_splits=("val",),
        max_new_tokens=NEW_TOKENS,
        dtype="float32",
        batch_size=PROMPTS,
        device="cpu",
    )


def with_config(chain: Chain, folder: Path, **fields: Any) -> Chain:
    """The chain with other values in the export's config.json; a table's members are changed one by one."""
    shutil.copytree(chain.draft.path, folder)
    config = read_json(folder / "config.json")
    for name, value in fields.items():
        config[name] = config[name] | value if isinstance(value, dict) else value
    write_json(folder / "config.json", config)
    return evolve(chain, draft=Draft(folder, "spoilt"))


def diagnosed(chain: Chain, **options: Any) -> Mapping[str, Any]:
    given = {"prompts": PROMPTS, "curve": FLAT, "again": AGAIN, "report": lambda _text: None, "budget": 1e9}
    return diagnose(chain, **{**given, **options})


def causes(result: Mapping[str, Any]) -> list[str]:
    return [finding["code"] for finding in result["findings"] if finding["level"] == CAUSE]


def finding(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return next(found for found in result["findings"] if found["code"] == name)


def with_weights(chain: Chain, folder: Path, change: Callable[[Tensor], Tensor]) -> Chain:
    """The chain with changed matrices in the export."""
    spoilt = with_config(chain, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    save_file(
        {name: change(weight) if weight.ndim == 2 else weight for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return spoilt
