"""Arguments that `dflow serve --engine vllm` gives vLLM itself are refused."""

from __future__ import annotations

import pytest

from dsl.errors import ConfigError
from ops.tools.serve.vllm_arguments import refusal, refuse_own

OWN_ARGUMENTS = (
    *("--port", "--port=8000", "--host=0.0.0.0", "--model", "--model=x", "--uds", "-sc", "-sc=x", "-sc.model"),
    *("--speculative-config", "--speculative_config={}", "--speculative-config.model", "--speculative-c"),
    *("--spec-method", "--spec_model=x", "--spec-tokens"),
)


@pytest.mark.parametrize("argument", OWN_ARGUMENTS)
def test_vllms_arguments_that_are_dflows_to_give_are_refused(argument):
    with pytest.raises(ConfigError) as caught:
        refuse_own(["--tensor-parallel-size", "2", argument])
    assert f"arguments after -- that dflow serve sets itself:\n  {argument}: " in str(caught.value)


def test_a_key_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        refuse_own(["--api-key=secret"])
    assert "--api-key: every user of this machine sees arguments; set the variable VLLM_API_KEY" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_other_arguments_of_vllm_are_not_refused():
    refuse_own(["--tensor-parallel-size", "2", "--gpu-memory-utilization=0.8", "--model-impl", "-O3", "--", "-scx"])


def test_a_machine_without_a_device_is_recognised():
    line = "RuntimeError: Failed to infer device type, please set the environment variable"
    assert line == refusal(f"INFO loading\n{line}\nmore\n")
    assert refusal("RuntimeError: out of luck") is None
