"""vLLM's log-probabilities of answers are those of the target as dflow loads it, images included.

Both sides get the conversation: vLLM makes ids and pixels of it by itself, and the target gets tokenize_chat's.
"""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
import torch
from attrs import frozen
from chat_requests import chat_of, image_settings, tokenized
from family_checkpoints import make_checkpoint
from own_process import run_script
from preprocessing_cases import CASES, TEXTS

from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.target.model import Target

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
INTERLEAVED = {**ROPE, "mrope_interleaved": True}
DIFFERENT = 0.5  # at least so much differ log-probabilities of other tokens or pixels


@frozen
class Row:
    """What differs by family. sizes: heads of 32 numbers, which vLLM's attention takes on a CPU. tolerance: of a
    log-probability; float32's rounding, from that of transformers against float64.
    """

    sizes: dict[str, Any]
    has_vision: bool = True
    tolerance: float = 1e-4


TARGETS = {
    "qwen3": Row({"head_dim": 32}, has_vision=False),
    "qwen3_moe": Row({"head_dim": 32}, has_vision=False),
    "qwen2_5_vl": Row({"hidden_size": 64, "rope_parameters": ROPE}, tolerance=1e-3),
    "qwen3_vl": Row({"head_dim": 32, "rope_parameters": INTERLEAVED}),
    # transformers always normalises and writes no such field; vLLM does not load a model without it.
    "qwen3_vl_moe": Row({"head_dim": 32, "rope_parameters": INTERLEAVED, "norm_topk_prob": True}),
}


@pytest.mark.parametrize("name", TARGETS)
def test_vllm_holds_an_answer_as_probable_as_we_do(name, tmp_path):
    row = TARGETS[name]
    cases = CASES if row.has_vision else TEXTS
    checkpoint = make_checkpoint(name, tmp_path / "checkpoint", **row.sizes)
    samples, target = tokenized(tmp_path, checkpoint, cases=cases), Target.from_directory(checkpoint, {})
    request = {
        "target": str(checkpoint),
        "mm_processor_kwargs": image_settings("pillow") if row.has_vision else {},
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
        assert difference < row.tolerance
        assert shifted > DIFFERENT
        if sample.image_grid_thw.numel():
            negative = attrs.evolve(sample, pixel_values=-sample.pixel_values)
            other = token_log_probs(target, target.inputs([negative]))[0]
            assert largest(other[learnt], theirs[learnt]) > DIFFERENT


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())
