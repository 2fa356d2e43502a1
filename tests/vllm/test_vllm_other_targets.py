"""Targets beyond Qwen in vLLM's engine on a CPU: the states that a draft is given, its answers, and the docs' table."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
from dflash_cases import BLOCK, NEW_TOKENS, NOISE, Case, make_case
from family_checkpoints import token_sample
from own_process import run_script
from vllm_targets import ROWS, model_impl, vllm_checkpoint

from dsl.imports import PROJECT
from ops.capture_targets.backend import forward_batch
from ops.evaluate.statistics import acceptance_length
from ops.lib.data.files import read_json
from ops.lib.drafts.backbone.contract import embedding_warnings
from ops.lib.target.head_settings import SCALED_IN_VLLM
from ops.lib.target.model import Target, describe_target
from ops.lib.vision import config_classes
from ops.lib.vision.processor import load_processor
from ops.lib.vllm.serve_command import BY_TRANSFORMERS

LAYER_IDS = (0, 1, 3)
TEXTS = {"a short text": ("What is it?", "It is red."), "a long text": ("And now, what can one see there?", "A dog.")}
SERVED = ("llama", "mistral", "ministral3", *SCALED_IN_VLLM)
NO_INTERFACE = "Model does not support EAGLE3 interface"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """By model type, the class that vLLM ran, and the states of each prompt [S, layer, hidden]: vLLM's and
    those of transformers. One process runs all.
    """
    folder, expected, requests = tmp_path_factory.mktemp("states"), {}, []
    for kind, row in ROWS.items():
        checkpoint = vllm_checkpoint(kind, folder / kind)
        processor = load_processor(str(checkpoint))
        samples = [token_sample(processor, *text, name=name) for name, text in TEXTS.items()]
        ours = Target.from_directory(checkpoint, describe_target(checkpoint, 5, (2,)))
        features = [forward_batch(ours, [sample], LAYER_IDS)[0][0] for sample in samples]
        expected[kind] = [states.view(len(states), len(LAYER_IDS), -1) for states in features]
        requests.append(
            {
                "target": str(checkpoint),
                "model_impl": model_impl(kind),
                "latent": row.is_latent,
                "layers": [layer_id + 1 for layer_id in LAYER_IDS],
                "prompts": [sample.input_ids.tolist() for sample in samples],
            }
        )
    result = run_script("states.py", requests, folder)
    assert 0 == result.returncode, result.stderr[-4000:]
    answers = dict(zip(ROWS, json.loads((folder / "answer.json").read_text()), strict=True))
    return {
        kind: (
            answer["class"],
            [torch.tensor(states).transpose(0, 1) for states in answer["states"]],
            expected[kind],
        )
        for kind, answer in answers.items()
    }


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The largest distance of a token's state from the other, relative to its norm; [layer]."""
    return ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).amax(dim=0)


@pytest.mark.parametrize("kind", ROWS)
def test_the_states_that_a_draft_is_given_are_those_of_transformers(compared, kind, capsys):
    name, given, expected = compared[kind]
    pairs = list(zip(given, expected, strict=True))
    difference = max(float(distance(one, each).max()) for one, each in pairs)
    before = min(float(distance(one[:, 1:], each[:, :-1]).min()) for one, each in pairs)
    with capsys.disabled():
        print(f"\n{kind}, {name}: {difference:.1e}; the layer before {before:.2f}", end="")
    assert difference <= ROWS[kind].tolerance
    assert before > 0.5


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """By model type, a tiny target with drafts of three qualities; each is made once."""
    made: dict[str, Case] = {}

    def case(kind: str) -> Case:
        noise = 0.4 if kind.startswith("gemma") else NOISE
        if kind not in made:
            torch.set_num_threads(1)
            made[kind] = make_case(kind, tmp_path_factory.mktemp(kind), images=False, make=vllm_checkpoint, noise=noise)
        return made[kind]

    return case


def decode(case: Case, impl: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs decode.py with the noisy draft, whose answer is in folder/answer.json."""
    request = {
        "target": str(case.checkpoint),
        "model_impl": impl,
        "draft": str(case.drafts["noisy"].path),
        "algorithm": "DFLASH",
        "block_size": BLOCK,
        "prompts": [prompt.input_ids[: prompt.prompt_tokens].tolist() for prompt in case.prompts],
        "tokens": NEW_TOKENS + 1,
        "stop": sorted(case.eos),
    }
    return run_script("decode.py", request, folder)


def answers_of(case: Case, impl: str, folder: Path) -> tuple[list[list[int]], list[list[int]]]:
    """The answers' tokens, and the accepted lengths of their steps, by vLLM with the noisy draft."""
    result = decode(case, impl, folder)
    assert 0 == result.returncode, result.stderr[-4000:]
    served = json.loads((folder / "answer.json").read_text())
    return [one["tokens"] for one in served], [one["accepted"] for one in served]


@pytest.mark.parametrize("kind", SERVED)
def test_answers_are_the_targets_own_and_accepted_lengths_are_those_of_evaluate(cases, kind, tmp_path):
    case = cases(kind)
    expected = case.reference(case.drafts["noisy"].path)
    tokens, accepted = answers_of(case, model_impl(kind), tmp_path)
    print(f"{kind}: tau {acceptance_length(expected, 1, 0).tau:.3f}, steps {accepted}")
    assert [list(answer.tokens) for answer in case.plain] == tokens
    assert [list(answer.accepted) for answer in expected] == accepted
    configs = [read_json(path / "config.json") for path in (case.drafts["noisy"].path, case.checkpoint)]
    assert "vLLM" not in embedding_warnings(*configs)


def test_vllms_own_gemma_4_gives_a_draft_rows_of_the_embedding_without_their_scale(cases, tmp_path):
    case = cases("gemma4_text")
    tokens, accepted = answers_of(case, "vllm", tmp_path)
    assert [list(answer.tokens) for answer in case.plain] == tokens
    assert [list(answer.accepted) for answer in case.reference(case.drafts["noisy"].path)] != accepted


def test_vllms_own_gemma_3_refuses_a_draft_by_name(cases, tmp_path):
    result = decode(cases("gemma3_text"), "vllm", tmp_path)
    assert 0 != result.returncode
    assert NO_INTERFACE in result.stderr


def kept_by(kind: str) -> str:
    """Who keeps the states of a type's layers in vLLM, as dflow starts it: its own class, transformers' model, none."""
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.transformers.base import Base

    name = config_classes._auto_table("modeling_auto", config_classes.CAUSAL).get(kind)
    name = name or config_classes._auto_table("modeling_auto", config_classes.IMAGE_TEXT)[kind]
    found = ModelRegistry._try_load_model_cls(name)
    if kind in BY_TRANSFORMERS:
        assert kind in SCALED_IN_VLLM or not supports_eagle3(found)
        return "transformers"
    if issubclass(found, Base):
        return "transformers"
    return "own" if supports_eagle3(found) else "none"


def test_the_table_in_the_docs_is_that_of_the_installed_classes():
    text = (PROJECT / "docs" / "targets.md").read_text().split("## Which targets vLLM serves")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| [^|]*? \| `(\w+)` \| (own|transformers|none)", text, re.MULTILINE))
    assert rows.keys() >= ROWS.keys()
    assert {"own", "transformers", "none"} == set(rows.values())
    assert rows == {kind: kept_by(kind) for kind in rows}
