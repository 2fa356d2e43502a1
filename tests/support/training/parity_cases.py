"""What the parity of ranks is shown on: inputs, problems, layouts of ranks, and trainings that must be refused.

`write_inputs` makes artifacts on disk; everything else is a small value that every rank knows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import field, frozen
from draft_chain import TEXT, make_features, make_inputs, make_plan, make_target
from fake_stage import folder_digest

from dsl.op import Artifact
from ops.artifacts import BatchPlan, TargetFeatures, TargetModel, TokenShards
from ops.lib.data.batching import padded_length
from ops.lib.data.files import write_json, write_jsonl
from ops.lib.data.token_shards import TokenReader
from ops.lib.drafts.dflash2.config import Dflash2Options
from ops.lib.drafts.dspark.config import DsparkOptions
from ops.lib.drafts.lilicorr.config import LilicorrOptions
from ops.lib.target.feature_shards import FeatureReader

PAD_MULTIPLE, STEPS = 8, 20
TYPES = {"features": TargetFeatures, "target": TargetModel, "batches": BatchPlan}


@frozen
class Layout:
    """A layout of dp x sp ranks, and the exchange of the sp ranks."""

    dp: int
    sp: int
    exchange: str = "auto"

    @property
    def ranks(self) -> int:
        return self.dp * self.sp

    def __str__(self) -> str:
        return f"{self.dp} x {self.sp}"


@frozen(kw_only=True)
class Problem:
    """A training of a few steps. changes: fields of TrainDflash. float32, bfloat16: whether it also runs in
    that dtype.
    """

    name: str
    inputs: str
    layouts: tuple[Layout, ...]
    steps: int = 3
    changes: Mapping[str, Any] = field(factory=dict)
    float32: bool = False
    bfloat16: bool = False


ONE, DATA_2, DATA_4 = Layout(1, 1), Layout(2, 1), Layout(4, 1)
U2, G2, U4, G4 = (Layout(1, sp, name) for sp in (2, 4) for name in ("ulysses", "gather"))
U22, G22 = Layout(2, 2, "ulysses"), Layout(2, 2, "gather")
LAYOUTS = (DATA_2, U2, G2, U4, G4, U22, G22)

# One sample in a micro-batch, so that dp rows differ in how many they have.
SINGLE = {"micro_batch_tokens": 1, "num_layers": 1}
TABLE = tuple(
    Problem(name=name, inputs=name, layouts=LAYOUTS, steps=STEPS, changes=changes, float32=True)
    for name, changes in (("text", SINGLE), ("vlm", SINGLE), ("packed", {}), ("ragged", {}))
)
OPTIONS = (
    Problem(name="anchors in chunks", inputs="packed", layouts=(U22, G2), changes={"anchor_chunk": 4}, bfloat16=True),
    Problem(name="a rank without samples", inputs="lonely", layouts=(DATA_4, U22, G22)),
    Problem(name="steps and samples without anchors", inputs="bare", layouts=(DATA_2, U22, G4), steps=6),
    Problem(
        name="sliding layers",
        inputs="packed",
        layouts=(U22, G4),
        changes={"sliding_layers": (1,), "sliding_window": 24, "anchor_chunk": 5},
    ),
    Problem(
        name="checkpointed layers",
        inputs="packed",
        layouts=(U22, G2),
        changes={"activation_checkpointing": True, "anchor_chunk": 8},
    ),
    Problem(name="divergence from the target", inputs="taught", layouts=(U22, G2), changes={"loss": "kl"}),
    Problem(name="scaled and capped logits", inputs="capped", layouts=(U22, G2), changes={"loss": "kl"}),
    Problem(name="LK, a rank without samples", inputs="taught alone", layouts=(U22,), changes={"loss": "lk"}),
    Problem(
        name="DFlash2",
        inputs="packed",
        layouts=(DATA_2, U2, G2, U22),
        changes={"algorithm": "dflash2", "dflash2": Dflash2Options(rank=8, candidates=4), "anchor_chunk": 4},
    ),
    Problem(
        name="DSpark",
        inputs="taught",
        layouts=(DATA_2, U2, G2, U22),
        changes={"algorithm": "dspark", "dspark": DsparkOptions(rank=8)},
    ),
    Problem(
        name="LiLiCorr",
        inputs="taught",
        layouts=(DATA_2, U2, G2, U22),
        changes={
            "algorithm": "lilicorr",
            "lilicorr": LilicorrOptions(candidates=4, width=8, heads=2, factors=4, conv=True),
            "anchor_chunk": 4,
        },
    ),
    Problem(name="D-PACE", inputs="ragged", layouts=(U22, G2), changes={"loss": "dpace"}),
    Problem(name="focal", inputs="ragged", layouts=(U2, G22), changes={"loss": "focal"}),
)
MUON = Problem(name="muon", inputs="ragged", layouts=(U22,), steps=3, changes={"optimizer": "muon"})
OTHER_ENDS = {"final_logit_softcapping": 3.0, "logit_scale": 0.5, "embedding_multiplier": 2.0}
PROBLEMS = (*TABLE, *OPTIONS, MUON)

# A whole training through train_dflash: stopped, resumed on other ranks, averaged, measured between its steps.
WHOLE = {
    "dtype": "float64",
    "log_every": 1,
    "eval_every": 4,
    "checkpoint_every": 3,
    "ema_decay": 0.9,
    "weight_decay": 0.1,
    "anchor_chunk": 4,
    "micro_batch_tokens": 48,
    "num_layers": 2,
}
STOP_AFTER = 5

# name -> (inputs, sp_degree, fields, what the error says)
REFUSED = {
    "longer than the shortest sample": ("short", 4, {}, "4 ranks cannot share the shortest sample, which has 3 tokens"),
    "padding that it does not divide": ("padded by 6", 4, {}, "4 does not divide pad_multiple = 6"),
    "ulysses without the heads": (
        "ragged",
        4,
        {"num_heads": 2, "num_kv_heads": 1, "sp_exchange": "ulysses"},
        "4 key/value heads (lcm of 1 and 4), which do not divide 2 query heads",
    ),
    "no divisor of the ranks": ("ragged", 3, {}, "4 ranks are fewer than the mesh of dp 2 x sp 3"),
}


def train_values(problem: Problem) -> dict[str, Any]:
    """The fields of TrainDflash for a small draft with grouped heads, which degree 4 must repeat for Ulysses."""
    values = {
        "block_size": 6,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 32,
        "num_anchors": 7,
        "lr": 2e-3,
        "weight_decay": 0.1,
        "dtype": "float64",
    }
    return values | problem.changes


def write_inputs(folder: Path, tokens: TokenShards, target: TargetModel, features: TargetFeatures) -> None:
    """Write all inputs below a folder, listed in inputs.json; tokens, target and features are real ones."""
    kinds = [record["category"] for record in TokenReader(tokens, "train").records]
    images, texts = ([i for i, kind in enumerate(kinds) if kind == wanted] for wanted in ("image", "text"))
    mixed = [sample for pair in zip(images, texts, strict=False) for sample in pair]
    made: dict[str, dict[str, Artifact]] = {}

    def add(name: str, steps: Iterable[Sequence[int]], **of: Artifact) -> None:
        made[name] = of | {"batches": write_plan(folder / name / "plan", of["features"], steps)}

    real = {"features": features, "target": target}
    add("text", dealt(texts, 3), **real)
    add("vlm", dealt(images, 3), **real)
    add("packed", dealt(mixed, 3), **real)

    synthetic = make_target(folder / "target")

    def captured(name: str, target: TargetModel = synthetic, **options: Any) -> dict[str, Artifact]:
        return {"features": make_features(folder / name / "features", target, **options), "target": target}

    ragged = captured("ragged")
    add("ragged", dealt(range(24), 5), **ragged)
    add("lonely", dealt(range(24), 1), **ragged)
    # Of these, samples of up to 16 tokens have no anchor: the first five of every twelve.
    bare = ([0, 1], [5, 6, 7], [2, 8, 3], [4, 12], [9], [10, 13, 11, 18])
    add("bare", bare, **captured("bare", prompt=15))
    taught = captured("taught", final_hidden=True)
    other = make_target(folder / "other", TEXT | OTHER_ENDS)
    add("capped", dealt(range(24), 5), **captured("capped", other, final_hidden=True))
    add("taught", dealt(range(24), 5), **taught)
    add("taught alone", dealt(range(24), 1), **taught)
    short = captured("short", first_length=3, prompt=0)
    made["short"] = short | {"batches": make_plan(folder / "short" / "plan", short["features"])}
    made["padded by 6"] = ragged | {"batches": make_plan(folder / "six", ragged["features"], pad_multiple=6)}
    made["whole"] = make_inputs(folder / "whole")
    listed = {
        name: {key: [str(artifact.path), artifact.digest] for key, artifact in of.items()} for name, of in made.items()
    }
    write_json(folder / "inputs.json", listed)


def read_inputs(folder: Path, name: str) -> dict[str, Artifact]:
    """The inputs of that name, written by `write_inputs`."""
    listed = json.loads((folder / "inputs.json").read_text())[name]
    return {key: TYPES[key](path=Path(path), digest=digest) for key, (path, digest) in listed.items()}


def dealt(samples: Sequence[int], size: int) -> list[list[int]]:
    """Deal samples, over and over, to STEPS lists of `size` each."""
    return [[samples[(step * size + place) % len(samples)] for place in range(size)] for step in range(STEPS)]


def write_plan(folder: Path, features: TargetFeatures, steps: Iterable[Sequence[int]]) -> BatchPlan:
    """Write a BatchPlan of exactly these steps."""
    lengths = FeatureReader(features, "train").lengths
    rows = [
        {
            "step": number,
            "epoch": number,
            "samples": list(samples),
            "tokens": sum(padded_length(lengths[sample], PAD_MULTIPLE) for sample in samples),
        }
        for number, samples in enumerate(steps)
    ]
    folder.mkdir(parents=True)
    plan = {"format": 1, "steps": len(rows), "samples": len(lengths), "pad_multiple": PAD_MULTIPLE, "split": "train"}
    write_json(folder / "plan.json", plan)
    write_jsonl(folder / "steps.jsonl", rows)
    return BatchPlan(path=folder, digest=folder_digest(folder))
