"""vLLM's log-probabilities of answers are those of the target as dflow loads it, images included.

Both sides get the conversation: vLLM makes ids and pixels of it by itself, and the target gets tokenize_chat's.
"""

from __future__ import annotations

import json

import attrs
import pytest
import torch
from chat_requests import chat_of, image_settings, tokenized
from family_checkpoints import make_checkpoint
from own_process import run_script
from preprocessing_cases import CASES, TEXTS

from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.model import Target

# vLLM's attention takes heads of this size on a CPU.
HEADS = {"head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
TARGETS = {
    "qwen3": (HEADS, TEXTS),
    "qwen3_vl": ({**HEADS, "rope_parameters": ROPE}, CASES),
}
TOLERANCE = 1e-4  # float32: transformers' own differ by 1e-5 from float64's


@pytest.mark.parametrize("name", TARGETS)
def test_vllm_holds_an_answer_as_probable_as_we_do(name, tmp_path):
    sizes, cases = TARGETS[name]
    checkpoint = make_checkpoint(name, tmp_path / "checkpoint", **sizes)
    samples, target = tokenized(tmp_path, checkpoint, cases=cases), Target.from_directory(checkpoint, {})
    request = {
        "target": str(checkpoint),
        "mm_processor_kwargs": image_settings("pillow") if name == "qwen3_vl" else {},
        "chats": [chat_of(*case) for case in cases.values()],
    }
    result = run_script("score.py", request, tmp_path)
    assert 0 == result.returncode, result.stderr[-4000:]
    scored = dict(zip(cases, json.loads((tmp_path / "answer.json").read_text()), strict=True))
    for case, sample in samples.items():
        assert sample.input_ids.tolist() == scored[case]["ids"]
        ours, theirs = token_log_probs(target, target.inputs([sample]))[0], torch.tensor(scored[case]["log_probs"])
        learnt = sample.loss_mask[1:]
        difference = largest(ours[learnt], theirs[learnt])
        shifted = largest(ours[1:][learnt[1:]], theirs[:-1][learnt[1:]])
        print(
            f"{name}, {case}: log-probabilities differ by {difference:.1e}; those of the tokens before by {shifted:.1f}"
        )
        assert difference < TOLERANCE
        assert shifted > 1000 * TOLERANCE
        if sample.image_grid_thw.numel():
            negative = attrs.evolve(sample, pixel_values=-sample.pixel_values)
            other = token_log_probs(target, target.inputs([negative]))[0]
            assert largest(other[learnt], theirs[learnt]) > 1000 * TOLERANCE


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
