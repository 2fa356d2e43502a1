"""What the user has already, beside the trials: nodes that decode the same val prompts with the target's own MTP head,
and with the EAGLE-3 draft that `eagle3` of `[tune]` names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from dsl.tree import Tree
from dsl.tune import TUNE, Tune
from executor.tune.decision import Ranked, Result, compared
from ops.evaluate.comparison import answers_of
from ops.lib.data.files import read_json
from ops.lib.report_sections import is_known
from ops.train_dflash.answers import Answer

NODES = {"mtp": "tune_mtp", "eagle3": "tune_eagle3"}  # by the field of `evaluate` that says what decodes
OF_EVALUATE = ("dtype", "tie_margin", "batch_size", "launch")  # what the pipeline's own evaluation says of the machine


def put_rivals(tree: Tree, tune: Tune) -> None:
    """Add the nodes that evaluate the rivals of a tuned training, on its val prompts.

    There is none without val prompts, whose lack is a mistake. They take dtype and launch of the pipeline's first
    evaluation.
    """
    node = tune.table.node
    training, op = tree.nodes[node], tree.op(node)
    if op is None or not {"target", "tokens"} <= training.keys() or training.get("eval_prompts") == 0:
        return
    prompts, tokens = (training.get(name, op.fields[name].default) for name in ("eval_prompts", "eval_new_tokens"))
    evaluations = (each for each in tree.nodes.values() if isinstance(each, dict) and each.get("op") == "evaluate")
    given: Mapping[str, Any] = next(evaluations, {name: training[name] for name in ("dtype",) if name in training})
    for rival, value in (("mtp", True), ("eagle3", tune.table.eagle3)):
        name = NODES[rival]
        if value is None:
            continue
        if name in tree.nodes:
            tree.report((TUNE, "node"), f'"{name}" is a node of the file, and names that of a rival here: rename it')
            continue
        tree.values["node"][name] = {
            **{each: given[each] for each in OF_EVALUATE if each in given},
            **{each: training[each] for each in ("target", "tokens")},
            "op": "evaluate",
            rival: value,
            "split": "val",
            "max_prompts": prompts,
            "max_new_tokens": tokens,
        }
        tree.origins["node", name, rival] = ((TUNE, rival), None)


@frozen
class Rival:
    """A rival on the val prompts. ranked: beside the best trial. block_size: as of `evaluate`.

    speedup: over plain decoding; None where its interval leaves it open.
    """

    ranked: Ranked
    block_size: int
    speedup: float | None


def rival_of(folder: Path, seconds: float, best: Result) -> Rival:
    """The results in the artifact of a rival's evaluation, beside the result of the best trial."""
    report = read_json(folder / "report.json")
    answers = tuple(Answer(name, *figures) for name, figures in answers_of(folder).items())
    measurements = folder / "measurements.json"  # not a part of the artifact's content
    measured = read_json(measurements) if measurements.exists() else None
    speedup = None
    if measured is not None and is_known(measured["speedup_low"], measured["speedup_high"]):
        speedup = measured["speedup"]
    return Rival(compared(Result(-1, 0, seconds, answers), best), report["block_size"], speedup)
