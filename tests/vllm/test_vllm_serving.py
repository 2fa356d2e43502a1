"""vLLM's engine on a CPU with an exported draft: the target's answers, and dflow's accepted lengths at every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from algorithm_cases import grown
from dflash_cases import BLOCK, NEW_TOKENS, changed, make_case

from ops.artifacts import Draft
from ops.evaluate.statistics import acceptance_length
from ops.export_draft.run import write_speculators
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.speculators_format import Verifier
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WINDOWS = {"layer_types": ["sliding_attention"], "sliding_window": 16, "use_sliding_window": True, "is_causal": True}


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A tiny Qwen3 whose heads are of a size that vLLM's attention takes on a CPU, with drafts of four kinds."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("case")
    made = make_case("qwen3", folder, images=False, head_dim=32)
    made.drafts["windows"] = Draft(changed(made.drafts["trained"], folder / "windows", **WINDOWS), "windows")
    for draft in made.drafts.values():
        config = read_json(draft.path / "config.json")
        write_speculators(draft.path, from_serving(config), config["dtype"], Verifier(None, ("Qwen3ForCausalLM",)))
    return made


@pytest.fixture(scope="module")
def beyond_plain(case, tmp_path_factory):
    """Drafts of the other algorithms on the trained backbone, by name."""
    folder = tmp_path_factory.mktemp("beyond_plain")
    algorithms = {
        "dflash2": Dflash2(taps=2, group=8, rank=8, candidates=8),
        "dspark": Dspark(rank=8, sample_from_anchor=False),
    }
    drafts = {name: grown(case.drafts["trained"].path, folder / name, each) for name, each in algorithms.items()}
    for draft in drafts.values():
        config = read_json(draft / "config.json")
        write_speculators(draft, from_serving(config), config["dtype"], Verifier(None, ("Qwen3ForCausalLM",)))
    return drafts


def served(case, draft: Path, form: str, folder: Path) -> list[dict[str, list[int]]]:
    request = {
        "target": str(case.checkpoint),
        "draft": str(draft / "speculators" if form == "speculators" else draft),
        "algorithm": from_serving(read_json(draft / "config.json")).algorithm.engine,
        "block_size": BLOCK,
        "prompts": [prompt.input_ids[: prompt.prompt_tokens].tolist() for prompt in case.prompts],
        "tokens": NEW_TOKENS + 1,
        "stop": sorted(case.eos),
    }
    (folder / "request.json").write_text(json.dumps(request))
    command = [sys.executable, str(HERE / "decode.py"), str(folder / "request.json"), str(folder / "answer.json")]
    path = f"{os.environ['PYTHONPATH']}:{ROOT}"
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert 0 == result.returncode, result.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text())


def is_served_as_evaluated(case, draft: Path, form: str, folder: Path) -> None:
    answers, expected = served(case, draft, form, folder), case.reference(draft)
    accepted = [one["accepted"] for one in answers]
    print(f"{draft.name}, {form}: tau {acceptance_length(expected, 1, 0).tau:.3f}, steps {accepted}")
    assert [list(answer.tokens) for answer in case.plain] == [one["tokens"] for one in answers]
    assert [list(answer.accepted) for answer in expected] == accepted


SERVED = [(quality, "speculators") for quality in ("trained", "noisy", "random", "windows")]


@pytest.mark.parametrize(("quality", "form"), [*SERVED, ("noisy", "native"), ("windows", "native")])
def test_answers_are_the_targets_own_and_accepted_lengths_are_those_of_dflow(case, quality, form, tmp_path):
    is_served_as_evaluated(case, case.drafts[quality].path, form, tmp_path)


@pytest.mark.parametrize("form", ["native", "speculators"])
@pytest.mark.parametrize("name", ["dflash2", "dspark"])
def test_so_they_are_with_drafts_of_the_other_algorithms(case, beyond_plain, name, form, tmp_path):
    is_served_as_evaluated(case, beyond_plain[name], form, tmp_path)
