"""Arguments that `dflow serve` gives an engine itself are refused, and what an engine refuses is recognised."""

from __future__ import annotations

import pytest

from dsl.errors import ConfigError
from executor.model_tools.engines import ENGINES

SGLANG_ENGINE, VLLM_ENGINE = ENGINES["sglang"], ENGINES["vllm"]

OWN_OF_SGLANG = (
    *("--port", "--port=8000", "--por", "--host=0.0.0.0", "--model-path", "--model_path=x", "--model", "--mod"),
    *("--speculative-algorithm=EAGLE", "--speculative-algo", "--speculative_draft_model_path"),
    *("--speculative-draft-model", "--speculative-draft-model-path=x"),
)


@pytest.mark.parametrize("argument", OWN_OF_SGLANG)
def test_sglangs_arguments_that_are_dflows_to_give_are_refused(argument):
    with pytest.raises(ConfigError, match=f"arguments after -- that dflow serve sets itself:\n  {argument}: "):
        SGLANG_ENGINE.refuse_own(["--tp-size", "2", argument])


def test_other_arguments_of_sglang_are_not_refused():
    SGLANG_ENGINE.refuse_own(
        ["--tp-size", "2", "--mem-fraction-static=0.8", "--dtype", "float16", "--ports", "--model-impl", "-p", "--"]
    )


OWN_OF_VLLM = (
    *("--port", "--port=8000", "--host=0.0.0.0", "--model", "--model=x", "--uds", "-sc", "-sc=x", "-sc.model"),
    *("--speculative-config", "--speculative_config={}", "--speculative-config.model", "--speculative-c"),
    *("--spec-method", "--spec_model=x", "--spec-tokens"),
)


@pytest.mark.parametrize("argument", OWN_OF_VLLM)
def test_vllms_arguments_that_are_dflows_to_give_are_refused(argument):
    with pytest.raises(ConfigError) as caught:
        VLLM_ENGINE.refuse_own(["--tensor-parallel-size", "2", argument])
    assert f"arguments after -- that dflow serve sets itself:\n  {argument}: " in str(caught.value)


def test_a_key_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        VLLM_ENGINE.refuse_own(["--api-key=secret"])
    assert "--api-key: every user of this machine sees arguments; set the variable VLLM_API_KEY" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_other_arguments_of_vllm_are_not_refused():
    VLLM_ENGINE.refuse_own(
        ["--tensor-parallel-size", "2", "--gpu-memory-utilization=0.8", "--model-impl", "-O3", "--", "-scx"]
    )


def test_a_machine_without_a_device_is_recognised():
    line = "RuntimeError: Failed to infer device type, please set the environment variable"
    assert line == VLLM_ENGINE.refusal(f"INFO loading\n{line}\nmore\n")
    assert VLLM_ENGINE.refusal("RuntimeError: out of luck") is None
