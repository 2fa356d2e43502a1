"""SGLang's own DFLASH worker and draft class, in this process, beside dflow's decoding and draft.

What is compared is real on both sides; only what a CPU lacks is patched (cpu_support/dflash_patches.py).
"""

from __future__ import annotations

import importlib

import attrs
import pytest
import torch
from dflash_cases import LAYERS, NEW_TOKENS
from draft_cases import random_weights
from family_checkpoints import HIDDEN, VOCABULARY
from safetensors.torch import save_file
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from dsl.errors import DataError
from ops.evaluate.statistics import acceptance_length
from ops.lib.data.files import write_json
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.sglang.dflash_worker import DflashEngine, DflashRefused, DraftRefused, NoRoom, tokens_of
from ops.lib.sglang.draft_forward import compare_forward, context_lengths
from ops.lib.sglang.runtime import SglangRuntime

QUALITIES = ("trained", "noisy", "random")
CPU = {"device": "cpu", "dtype": "float32"}


def tau(answers):
    return acceptance_length(answers, 1, 0).tau


SERVED = [(name, quality) for name in ("text_case", "vision_case") for quality in QUALITIES]


@pytest.mark.parametrize(("name", "quality"), [*SERVED, ("qwen2_5_vl_case", "noisy")])
def test_served_answers_are_the_targets_own_and_accepted_lengths_are_those_of_evaluate(request, name, quality):
    case = request.getfixturevalue(name)
    draft = case.drafts[quality].path
    expected = case.reference(draft)
    with DflashEngine.start(case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        together = engine.decode(case.prompts, NEW_TOKENS, case.eos)
        alone = [engine.decode([prompt], NEW_TOKENS, case.eos)[0] for prompt in case.prompts]
    print(f"{name}, {quality} draft: tau {tau(expected):.3f} by dflow, {tau(together):.3f} served")
    assert [answer.tokens for answer in case.plain] == [answer.tokens for answer in together]
    assert [answer.accepted for answer in expected] == [answer.accepted for answer in together]
    assert together == alone


def test_the_three_drafts_are_of_three_qualities_and_some_answers_end_inside_a_block(text_case, vision_case):
    for case in (text_case, vision_case):
        answers = {quality: case.reference(case.drafts[quality].path) for quality in QUALITIES}
        measured = {quality: tau(decoded) for quality, decoded in answers.items()}
        print({quality: round(value, 2) for quality, value in measured.items()})
        assert measured["trained"] > 5 > 4 > measured["noisy"] > 1.8 > 1.2 > measured["random"]
        ends = [answer for answer in answers["trained"] if answer.tokens[-1] in case.eos]
        assert any(answer.generated_unclipped > answer.generated for answer in ends)
    assert {"image", "text"} == {prompt.category for prompt in vision_case.prompts}
    assert {0, 1, 2} == {len(prompt.image_grid_thw) for prompt in vision_case.prompts}


def test_prompts_in_several_batches_are_answered_as_in_one(vision_case):
    draft = vision_case.drafts["noisy"].path
    room = 2 * max(tokens_of(prompt, NEW_TOKENS, block_size=6) for prompt in vision_case.prompts)
    with DflashEngine.start(vision_case.checkpoint, draft, **CPU, pool_tokens=room, max_requests=3) as engine:
        groups = [len(group) for group in engine._groups(vision_case.prompts, NEW_TOKENS)]
        answers = engine.decode(vision_case.prompts, NEW_TOKENS, vision_case.eos)
        with pytest.raises(DataError, match=f"sample prompt-0: its prompt of .* started for {room} in total"):
            engine.decode(vision_case.prompts, room, vision_case.eos)
    assert [2, 2, 1] == groups
    assert [answer.accepted for answer in vision_case.reference(draft)] == [answer.accepted for answer in answers]


def test_the_draft_is_given_the_features_that_capture_stores_and_sequential_positions(vision_case):
    with DflashEngine.start(
        vision_case.checkpoint, vision_case.drafts["random"].path, **CPU, pool_tokens=1024
    ) as engine:
        seen = [engine.context_of(prompt) for prompt in vision_case.prompts]
    asked = [attrs.evolve(prompt, input_ids=prompt.input_ids[: prompt.prompt_tokens]) for prompt in vision_case.prompts]
    with SglangRuntime.start(vision_case.checkpoint, **CPU, pool_tokens=1024, context_length=512) as runtime:
        captured = runtime.capture(asked, LAYERS)
    for prompt, context, features in zip(vision_case.prompts, seen, captured, strict=True):
        torch.testing.assert_close(features, context.features_SF, atol=2e-5, rtol=1e-5)
        assert list(range(prompt.prompt_tokens)) == context.positions_S.tolist()


def test_decoding_goes_on_from_the_input_that_a_server_for_decoding_alone_makes(text_case, monkeypatch):
    """Under prefill-decode disaggregation the draft's input is not that of a prefill in the same process."""
    draft = text_case.drafts["noisy"].path
    with DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        forward, made = engine.worker.own.forward_batch_generation, []

        def handed_over(batch):
            prefill = batch.forward_mode.is_extend()
            result = forward(batch)
            if prefill:
                batch.seq_lens = result.new_seq_lens
                made.append(SpeculativeAlgorithm.DFLASH.build_disagg_draft_input(batch, result.next_token_ids, None))
                result.next_draft_input = made[-1]
            return result

        monkeypatch.setattr(engine.worker.own, "forward_batch_generation", handed_over)
        answers = engine.decode(text_case.prompts, NEW_TOKENS, text_case.eos)
    assert [answer.accepted for answer in text_case.reference(draft)] == [answer.accepted for answer in answers]
    assert [True] == [each is not None for each in made]


def test_a_draft_that_sglang_cannot_serve_leaves_the_process_as_it_was(text_case, tmp_path, monkeypatch):
    draft = text_case.drafts["random"].path
    short = tmp_path / "short"
    short.mkdir()
    config = load_draft(draft).config
    write_json(short / "config.json", to_serving(attrs.evolve(config, max_position_embeddings=64)))
    save_file(load_draft(draft).state_dict(), short / "model.safetensors")
    with pytest.raises(
        DraftRefused, match=r"context_length \(4096\) is greater than the derived context_length \(64\)"
    ):
        DflashEngine.start(text_case.checkpoint, short, **CPU, pool_tokens=1024)
    hook = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    with monkeypatch.context() as patch:
        patch.setattr(hook, "current_platform", hook.current_platform.platform)
        with pytest.raises(
            DflashRefused, match=r"SGLang refuses DFLASH on a CPU: .*DFLASH speculative decoding is not"
        ):
            DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024)
    worker = importlib.import_module("ops.lib.sglang.dflash_worker")
    for error in (
        ValueError("Loaded weights leave no GPU memory for the KV cache under mem_fraction_static"),
        RuntimeError("Not enough memory. Please try to increase --mem-fraction-static."),
        torch.OutOfMemoryError("CUDA out of memory"),
    ):
        with monkeypatch.context() as patch, pytest.raises(NoRoom, match="memory"):
            patch.setattr(worker, "_allocate", lambda *_, error=error: (_ for _ in ()).throw(error))
            DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024)
    with DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024) as engine:
        assert [6, list(LAYERS)] == [engine.block_size, engine.layer_ids]
        assert config.mask_token_id == engine.mask_token_id
        with pytest.raises(DataError, match="already in one: leave it first"):
            DflashEngine.start(text_case.checkpoint, draft, **CPU, pool_tokens=1024)


VARIANTS = {
    "two layers, grouped heads": {},
    "five layers, one key/value head, blocks of 2": {
        "num_hidden_layers": 5,
        "num_key_value_heads": 1,
        "block_size": 2,
    },
    "heads of 64, blocks of 16": {
        "head_dim": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "block_size": 16,
    },
    "three heads, blocks of 3": {"num_attention_heads": 3, "num_key_value_heads": 3, "block_size": 3},
    "rope_theta of 1e6": {"rope_theta": 1e6},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    "linear scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3 scaling": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "half of each head turned": {"partial_rotary_factor": 0.5},
    "biases": {"attention_bias": True},
    "a sliding and a full layer": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    "windows shorter than a block": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 3},
    "a window longer than a block": {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 32},
}
MISREAD = {
    "rope_theta of 1e6": {"rope_theta": 1e4},
    "yarn": {"rope_scaling": None},
    "linear scaling": {"rope_scaling": None},
    "llama3 scaling": {"rope_scaling": None},
    "half of each head turned": {"partial_rotary_factor": 1.0},
    "a sliding and a full layer": {"sliding_window": 9},
    "windows shorter than a block": {"sliding_window": 4},
    "a window longer than a block": {"layer_types": ("full_attention",) * 2},
}


def variant(folder, **changes):
    """A serving directory of random weights that all matter, for the text target."""
    values = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
        "block_size": 5,
        "mask_token_id": 7,
        "target_layer_ids": (0, 2, 5),
        "num_target_layers": 8,
        "max_position_embeddings": 4096,
    }
    config = DraftConfig(**values | changes)
    weights = random_weights(config, torch.Generator().manual_seed(3))
    folder.mkdir()
    save_file({name: weight.float() for name, weight in weights.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", to_serving(config))
    return folder


@pytest.mark.parametrize("name", VARIANTS)
def test_sglangs_draft_class_gives_the_forward_pass_of_dflows(text_case, tmp_path, name):
    directory = variant(tmp_path / "draft", **VARIANTS[name])
    draft = load_draft(directory)
    lengths = context_lengths(draft.config, longest=200)
    assert len(lengths) > 3
    with DflashEngine.start(text_case.checkpoint, directory, **CPU, pool_tokens=1024) as engine:
        found = compare_forward(engine, draft, lengths)
        largest = max(one.difference for one in found)
        assert [0.0] * len(found) == [one.rounding for one in found]
        misread = None
        if name in MISREAD:
            other = load_draft(variant(tmp_path / "misread", **VARIANTS[name] | MISREAD[name]))
            misread = max(one.difference for one in compare_forward(engine, other, lengths))
    print(f"{name}: {largest:.1e} over contexts of {lengths}, misread {misread}")
    assert largest < 1e-5
    assert misread is None or misread > 1e-2
