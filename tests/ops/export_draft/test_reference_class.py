"""The reference implementation's own class on an export: loaded whole, the same hidden states, the same generation.

Written for the published interface of the package `dflash` 0.1.0 (https://github.com/z-lab/dflash), which asks for
transformers 5.15; where neither is installed this is skipped, and support/reference_draft.py is what an export is
compared with. To run it: pip install --no-deps dflash==0.1.0 transformers==5.15.0, in an environment of its own.
"""

from __future__ import annotations

from itertools import accumulate, takewhile

import pytest
import torch
from class_comparison import assert_equal
from fake_stage import FakeStage
from family_checkpoints import PROSE, make_checkpoint, token_sample
from overfit import overfit, with_answers
from published_drafts import z_lab
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from ops.artifacts import Draft, TargetModel
from ops.lib.data.files import read_json, write_json
from ops.lib.drafts.backbone.load import load_draft, random_draft
from ops.lib.drafts.decoding.decode import Decoded, decode_plain, decode_speculative
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target

dflash = pytest.importorskip("dflash", reason="the reference implementation is not installed: pip install dflash")
decodes = pytest.mark.skipif(
    not hasattr(DynamicCache, "activate_past_recording"), reason="the reference's generation needs transformers 5.15"
)

BLOCK, NEW_TOKENS = 6, 29  # behind the first token of an answer
KINDS = ("trained", "noisy", "random")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny Qwen3 whose every greedy token depends on all before it; it ends the second answer in its middle."""
    folder = tmp_path_factory.mktemp("target")
    make_checkpoint("qwen3", folder / "checkpoint")
    stage = FakeStage(folder)
    load_target(LoadTarget(checkpoint=str(folder / "checkpoint")), stage)
    made = stage.artifact(TargetModel)
    answer = decode_plain(Target.load(made), prompts_of(made)[1], NEW_TOKENS).tokens
    end = next(token for place, token in enumerate(answer) if place > NEW_TOKENS // 2 and token not in answer[:place])
    info = read_json(made.path / "target.json")
    write_json(made.path / "target.json", info | {"eos_token_ids": sorted([*info["eos_token_ids"], end])})
    return made


@pytest.fixture(scope="module")
def loaded(target):
    return Target.load(target)


@pytest.fixture(scope="module")
def prompts(target):
    return prompts_of(target)


def prompts_of(target):
    processor = load_processor(str(target.path / "model"))
    return [token_sample(processor, line, name=f"prompt-{place}") for place, line in enumerate(("How many?", *PROSE))]


@pytest.fixture(scope="module", params=["full_attention", "sliding_attention"])
def drafts(request, target, loaded, prompts, tmp_path_factory):
    """Serving directories: a draft that knows the answers, the same blurred by noise, and one by chance."""
    folder = tmp_path_factory.mktemp("drafts")
    info = {
        "format": 1,
        "mask_token_id": loaded.info["mask_token_id"],
        "image_token_id": None,
        "pad_token_id": 0,
        "eos_token_ids": loaded.info["eos_token_ids"],
        "vocab_size": loaded.info["vocab_size"],
        "patch_dim": 0,
        "merge_size": 1,
        "image_backend": None,
        "pixel_limits": None,
    }
    answers = [decode_plain(loaded, prompt, NEW_TOKENS) for prompt in prompts]
    tokens = with_answers(folder / "tokens", info, prompts, answers)
    sliding = {"sliding_layers": (0,), "sliding_window": 16} if request.param == "sliding_attention" else {}
    shape = {"block_size": BLOCK, "num_anchors": NEW_TOKENS + 1, "num_layers": 2, **sliding}
    trained = overfit(folder, target, tokens, epochs=100, capture={"target_layer_ids": (1, 3, 4)}, **shape).path
    weights, generator = load_file(trained / "model.safetensors"), torch.Generator().manual_seed(0)
    noisy = {
        name: weight + 0.4 * weight.std() * torch.randn(weight.shape, generator=generator)
        if weight.ndim == 2
        else weight
        for name, weight in weights.items()
    }
    by_chance = random_draft(load_draft(trained).config, seed=1).state_dict()
    found = {"trained": trained}
    for kind, tensors in (("noisy", noisy), ("random", by_chance)):
        (folder / kind).mkdir()
        save_file(dict(tensors), folder / kind / "model.safetensors", {"format": "pt"})
        write_json(folder / kind / "config.json", read_json(trained / "config.json"))
        found[kind] = folder / kind
    return found


def reference(directory):
    return dflash.DFlashDraftModel.from_pretrained(directory, dtype=torch.float32).eval()


def test_the_reference_class_loads_an_export_with_nothing_missing_and_nothing_unexpected(drafts):
    model, told = dflash.DFlashDraftModel.from_pretrained(drafts["trained"], output_loading_info=True)
    assert [] == sorted(told["missing_keys"]) == sorted(told["unexpected_keys"]) == sorted(told["mismatched_keys"])
    ours = load_draft(drafts["trained"])
    expected = {"fc.weight": (32, 96), "layers.1.self_attn.k_norm.weight": (16,)}
    assert expected == {name: tuple(model.state_dict()[name].shape) for name in expected}
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, model.state_dict()[name])
    settings = (model.block_size, list(model.target_layer_ids), model.mask_token_id)
    assert (BLOCK, [1, 3, 4], ours.config.mask_token_id) == settings


@pytest.mark.parametrize("context", [3, 40])
def test_the_reference_class_computes_the_same_hidden_states(drafts, context):
    assert_equal(z_lab(drafts["trained"]), Draft(path=drafts["trained"], digest=""), context)


@decodes
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_generates_the_same_tokens(drafts, loaded, prompts, kind):
    draft = load_draft(drafts[kind])
    for prompt in prompts:
        ours = decode_speculative(loaded, draft, prompt, NEW_TOKENS)
        ids = prompt.input_ids[None, : prompt.prompt_tokens]
        output = reference(drafts[kind]).spec_generate(
            loaded.model, ids, max_new_tokens=NEW_TOKENS + 1, stop_token_ids=sorted(loaded.eos_token_ids)
        )
        assert list(ours.tokens) == output[0, ids.shape[1] :].tolist() == list(plain(loaded, prompt).tokens)


@decodes
def test_the_reference_accepts_as_many_tokens_in_every_step(drafts, loaded, prompts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # it takes times, as on a GPU
    tau = {}
    for kind in KINDS:
        draft, ours, theirs = load_draft(drafts[kind]), [], []
        for prompt in prompts:
            answer = decode_speculative(loaded, draft, prompt, NEW_TOKENS)
            stats = dflash.model.dflash_generate(
                reference(drafts[kind]),
                loaded.model,
                prompt.input_ids[None, : prompt.prompt_tokens],
                max_new_tokens=NEW_TOKENS + 1,
                stop_token_ids=sorted(loaded.eos_token_ids),
                return_stats=True,
            )
            ours.append(steps_before_the_end([count + 1 for count in answer.accepted], answer))
            theirs.append(steps_before_the_end(stats.acceptance_lengths, answer))
        assert ours == theirs
        tau[kind] = sum(map(sum, ours)) / sum(map(len, ours))
    print("tokens a step:", {kind: round(value, 2) for kind, value in tau.items()})
    assert tau["trained"] > tau["noisy"] > tau["random"]


def plain(loaded, prompt) -> Decoded:
    return decode_plain(loaded, prompt, NEW_TOKENS)


def steps_before_the_end(lengths, answer):
    """Tokens of the steps that end before the answer's last block: the reference shortens a block at the limit."""
    ends = takewhile(lambda end: end < len(answer.tokens) - BLOCK, accumulate(lengths))
    return list(lengths[: len(list(ends))])
