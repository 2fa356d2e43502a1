"""vLLM's engine on a CPU with an exported draft: the target's answers, and dflow's accepted lengths at every step."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from algorithm_cases import grown
from dflash_cases import BLOCK, NEW_TOKENS, changed, make_case
from own_process import run_script

from ops.artifacts import Draft
from ops.evaluate.statistics import acceptance_length
from ops.export_draft.run import write_speculators
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.config import from_serving
from ops.lib.drafts.backbone.speculators import Verifier
from ops.lib.drafts.dflash2.config import Dflash2
from ops.lib.drafts.dspark.config import Dspark

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


def decode(case, draft: Path, form: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs decode.py, whose answer is in folder/answer.json."""
    request = {
        "target": str(case.checkpoint),
        "model_impl": "auto",
        "draft": str(draft / "speculators" if form == "speculators" else draft),
        "algorithm": from_serving(read_json(draft / "config.json")).algorithm.engine,
        "block_size": BLOCK,
        "prompts": [prompt.input_ids[: prompt.prompt_tokens].tolist() for prompt in case.prompts],
        "tokens": NEW_TOKENS + 1,
        "stop": sorted(case.eos),
    }
    return run_script("decode.py", request, folder)


SERVED = [(quality, "speculators") for quality in ("trained", "noisy", "random", "windows")]


@pytest.mark.parametrize(("quality", "form"), [*SERVED, ("noisy", "native"), ("windows", "native")])
def test_answers_are_the_targets_own_and_accepted_lengths_are_those_of_dflow(case, quality, form, tmp_path):
    draft = case.drafts[quality].path
    expected, result = case.reference(draft), decode(case, draft, form, tmp_path)
    assert 0 == result.returncode, result.stderr[-4000:]
    served = json.loads((tmp_path / "answer.json").read_text())
    accepted = [one["accepted"] for one in served]
    print(f"{quality}, {form}: tau {acceptance_length(expected, 1, 0).tau:.3f}, steps {accepted}")
    assert [list(answer.tokens) for answer in case.plain] == [one["tokens"] for one in served]
    assert [list(answer.accepted) for answer in expected] == accepted


@pytest.mark.parametrize(
    ("algorithm", "refused"),
    [
        (Dflash2(taps=2, group=8, rank=8, candidates=8), "DFlash candidate-head drafts"),
        (Dspark(rank=8, sample_from_anchor=False), "dspark speculative decoding"),
    ],
    ids=["dflash2", "dspark"],
)
def test_its_older_model_runner_refuses_the_other_algorithms_by_name(case, algorithm, refused, tmp_path):
    """The newer one, which vLLM takes by itself on a GPU, serves them. Nothing is served in silence as less."""
    draft = grown(case.drafts["trained"].path, tmp_path / "draft", algorithm)
    result = decode(case, draft, "native", tmp_path)
    assert 0 != result.returncode
    assert f"Model Runner V1 does not support: {refused}" in result.stderr
