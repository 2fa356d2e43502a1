"""The way of verification that a target's cache allows, found on the cache itself."""

from __future__ import annotations

import gc

import pytest
import torch
from cache_cases import CACHES, OWN_CACHES, WINDOW, cache_target

from dsl.errors import DataError
from ops.lib.target import cache_trial, verify
from ops.lib.target.cache_trial import verification_of
from ops.lib.target.verify import Verification

pytestmark = pytest.mark.filterwarnings("ignore:.*fast path is not available")


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_target_verifies_in_the_fastest_way_that_its_cache_allows_in_every_dtype(name, dtype):
    target = cache_target(name, dtype)
    assert CACHES[name][1] is verification_of(target)
    assert getattr(target.model.config, "sliding_window", None) in (None, WINDOW)  # as before the trial


@pytest.mark.parametrize("name", OWN_CACHES)
def test_a_model_with_a_cache_of_its_own_is_refused_by_name(name):
    target = cache_target(name)
    for _ in range(2):
        with pytest.raises(DataError, match=f"a {name} target cannot verify a draft: .* DynamicCache .*Error: "):
            verification_of(target)


def test_a_target_without_windows_and_states_is_not_tried(monkeypatch):
    monkeypatch.setattr(cache_trial, "_token_by_token", None)
    assert Verification.BATCH is verification_of(cache_target("llama"))


def test_a_target_is_tried_once_and_forgotten_with_its_model(monkeypatch):
    target = cache_target("mistral")
    gc.collect()
    before = len(cache_trial._FOUND)
    assert Verification.BATCH is verification_of(target)
    monkeypatch.setattr(cache_trial, "_find", None)
    assert Verification.BATCH is verification_of(target)
    assert before + 1 == len(cache_trial._FOUND)
    del target
    gc.collect()
    assert before == len(cache_trial._FOUND)


@pytest.mark.parametrize("wrong", [WINDOW // 2 - 1, WINDOW // 2 + 1, None])
@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_batches_whose_masks_are_not_the_models_are_not_taken(monkeypatch, name, wrong):
    assert 4 == cache_trial.WINDOW == WINDOW // 2
    right = verify.windows_of

    def other_windows(config):
        return {kind: wrong if window else None for kind, window in right(config).items()}

    monkeypatch.setattr(verify, "windows_of", other_windows)
    assert Verification.BLOCK is verification_of(cache_target(name))


def test_where_a_window_is_not_read_from_the_config_batches_are_not_taken(monkeypatch):
    target = cache_target("mistral")
    monkeypatch.setattr(cache_trial, "WINDOW", WINDOW)
    read_once = WINDOW // 2
    model = target.model.model
    forward = model.forward

    def with_own_window(*args, **kwargs):
        before, model.config.sliding_window = model.config.sliding_window, read_once
        try:
            return forward(*args, **kwargs)
        finally:
            model.config.sliding_window = before

    monkeypatch.setattr(model, "forward", with_own_window)
    assert Verification.BLOCK is verification_of(target)


def test_an_attention_whose_masks_have_another_form_verifies_one_prompt_at_a_time(monkeypatch):
    monkeypatch.setattr(cache_trial, "attention_of", lambda target: "flash_attention_2")
    assert Verification.BLOCK is verification_of(cache_target("llama"))
