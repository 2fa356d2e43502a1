"""Speculative decoding of every family and cache, with rejections all over a block, against greedy decoding."""

from __future__ import annotations

import attrs
import pytest
import torch
from cache_cases import CACHES, cache_case
from fake_stage import FakeStage
from family_checkpoints import HIDDEN, LAYERS, VOCABULARY, make_checkpoint, picture, token_sample

from ops.artifacts import TargetModel
from ops.lib.drafts.backbone.config import DraftConfig
from ops.lib.drafts.backbone.load import random_draft
from ops.lib.drafts.decoding import decode
from ops.lib.drafts.decoding.decode import decode_plain, decode_speculative
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target

BLOCK = 5
pytestmark = pytest.mark.filterwarnings("ignore:.*fast path is not available")
# Windows below and above a block of 5, and one that the prompts of about 20 tokens do not fill.
SLIDING = {"use_sliding_window": True, "max_window_layers": 3}
CASES = {
    "qwen3": {},
    "qwen3 with a window of 64": {**SLIDING, "sliding_window": 64},
    "qwen3 with a window of 8": {**SLIDING, "sliding_window": 8},
    "qwen3 with a window of 4": {**SLIDING, "sliding_window": 4},
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "qwen3_5": {},
}
WRONG_AT = (2, 0, BLOCK, 1, 3, BLOCK, 0, 0, 2)


@pytest.fixture(scope="module", params=[*CASES, *CACHES])
def loaded(request, tmp_path_factory):
    """A target that does not stop at EOS, and prompts with no, one and two images (a text target: without)."""
    if request.param in CACHES:
        target, samples = cache_case(request.param)
        return target, samples[2:]
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(request.param.split()[0], folder, **CASES[request.param])
    stage = FakeStage(tmp_path_factory.mktemp("target"))
    load_target(LoadTarget(checkpoint=str(folder)), stage)
    target = Target.load(stage.artifact(TargetModel))
    processor = load_processor(str(folder))
    samples = [token_sample(processor, "What is it? Describe it.")]
    if target.family.has_vision:
        pictures = [picture(24, 16), picture(16, 32, seed=1)]
        samples += [token_sample(processor, "And these?", images=pictures[:count]) for count in (1, 2)]
    return attrs.evolve(target, info={**target.info, "eos_token_ids": []}), samples


def without_cache(target: Target, sample, answer: list[int]):
    """Logits and features of prompt and answer in one forward pass from position 0."""
    ids = torch.cat([sample.input_ids[: sample.prompt_tokens], torch.tensor(answer, dtype=torch.int64)])
    whole = attrs.evolve(sample, input_ids=ids, loss_mask=torch.zeros(len(ids), dtype=torch.bool))
    with torch.no_grad(), target.capture_inputs((0, 2, 4)) as captured:
        logits = target.forward(target.inputs([whole]), use_cache=False).logits[0]
    return logits, captured.features()[0]


def test_answers_are_those_of_greedy_decoding_token_by_token_wherever_a_block_is_rejected(loaded, monkeypatch):
    target, samples = loaded
    draft = random_draft(
        DraftConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            vocab_size=VOCABULARY,
            block_size=BLOCK,
            mask_token_id=7,
            target_layer_ids=(0, 2, 4),
            num_target_layers=LAYERS,
            max_position_embeddings=512,
        ),
        0,
    )
    length = sum(min(place, BLOCK - 1) + 1 for place in WRONG_AT)
    for sample in samples:
        answer = list(decode_plain(target, sample, length + BLOCK).tokens)
        logits, features = without_cache(target, sample, answer)
        assert answer == logits[sample.prompt_tokens - 1 : -1].argmax(-1).tolist()
        assert len(set(answer)) > 8  # an answer that repeats itself would hide a wrong state
        slow = draft.context_kv(features.float(), torch.arange(len(features)))
        steps = iter(WRONG_AT)

        def almost_right(_target, _draft, context, anchor, _use, answer=answer, steps=steps, slow=slow, sample=sample):
            done = context.length - sample.prompt_tokens
            assert answer[done] == anchor
            for (k, v), (slow_k, slow_v) in zip(context.kv, slow, strict=True):
                torch.testing.assert_close(k, slow_k[..., : context.length, :], atol=2e-3, rtol=1e-3)
                torch.testing.assert_close(v, slow_v[..., : context.length, :], atol=2e-3, rtol=1e-3)
            proposal, wrong = answer[done + 1 : done + BLOCK], next(steps)
            if wrong < BLOCK - 1:
                proposal[wrong] = (proposal[wrong] + 1) % VOCABULARY
            return proposal

        with monkeypatch.context() as patch:
            patch.setattr(decode, "propose", almost_right)
            decoded = decode_speculative(target, draft, sample, length)
        assert answer[: length + 1] == list(decoded.tokens)
        assert tuple(min(place, BLOCK - 1) for place in WRONG_AT) == decoded.accepted
