"""vLLM's engine on a CPU with an exported draft: the target's answers, and dflow's accepted lengths at every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dflash_cases import BLOCK, NEW_TOKENS, changed, make_case

from ops.artifacts import Draft
from ops.evaluate.statistics import acceptance_length
from ops.export_draft.run import write_speculators
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.speculators_format import Verifier

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


SERVED = [(quality, "speculators") for quality in ("trained", "noisy", "random", "windows")]


@pytest.mark.parametrize(("quality", "form"), [*SERVED, ("noisy", "native"), ("windows", "native")])
def test_answers_are_the_targets_own_and_accepted_lengths_are_those_of_dflow(case, quality, form, tmp_path):
    draft = case.drafts[quality].path
    expected = case.reference(draft)
    request = {
        "target": str(case.checkpoint),
        "draft": str(draft / "speculators" if form == "speculators" else draft),
        "block_size": BLOCK,
        "prompts": [prompt.input_ids[: prompt.prompt_tokens].tolist() for prompt in case.prompts],
        "tokens": NEW_TOKENS + 1,
        "stop": sorted(case.eos),
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    command = [sys.executable, str(HERE / "decode.py"), str(tmp_path / "request.json"), str(tmp_path / "answer.json")]
    path = f"{os.environ['PYTHONPATH']}:{ROOT}"
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600)
    assert 0 == result.returncode, result.stderr[-4000:]
    served = json.loads((tmp_path / "answer.json").read_text())
    accepted = [one["accepted"] for one in served]
    print(f"{quality}, {form}: tau {acceptance_length(expected, 1, 0).tau:.3f}, steps {accepted}")
    assert [list(answer.tokens) for answer in case.plain] == [one["tokens"] for one in served]
    assert [list(answer.accepted) for answer in expected] == accepted
