"""What is read from an answer of an engine's server, and how its accepted length is shown."""

from __future__ import annotations

import json

import pytest

from dsl.errors import ServerError
from ops.tools.serve.chat import VLLM, Answer, read_answer, tau_text


def test_tau_leaves_the_first_token_out_and_sglangs_figure_does_not():
    response = {
        "choices": [{"message": {"content": "It is."}, "meta_info": {"spec_verify_ct": 3, "spec_accept_length": 4.0}}],
        "usage": {"completion_tokens": 12},
    }
    answer = read_answer(response)

    assert Answer("It is.", 12, 3, 4.0) == answer
    assert 11 / 3 == answer.tau
    assert (
        "tau: 3.67 (11 tokens after the first in 3 verification steps); "
        "SGLang's spec_accept_length, which also counts the first token: 4"
    ) == tau_text(answer)


def test_vllm_has_its_figures_beside_the_choices():
    response = {
        "choices": [{"message": {"content": "It is."}}],
        "usage": {"completion_tokens": 12},
        "metrics": {"speculative_decoding": {"num_spec_steps": 3, "mean_acceptance_length": 4.0}},
    }
    answer = read_answer(response, VLLM)

    assert Answer("It is.", 12, 3, 4.0) == answer
    assert tau_text(answer, VLLM).endswith(
        "vLLM's mean_acceptance_length, which also counts what follows the end of the answer: 4"
    )
    for without in (None, {"speculative_decoding": None}):
        assert 0 == read_answer(response | {"metrics": without}, VLLM).steps


def test_a_server_that_reports_no_figure_of_its_own_is_no_error():
    answer = Answer("It is.", 12, 3, None)

    assert tau_text(answer).endswith("in 3 verification steps); the server reports no spec_accept_length")


@pytest.mark.parametrize(
    "response",
    [
        {"error": {"message": "no such model"}},
        {"choices": []},
        {"choices": [{"message": None}], "usage": {"completion_tokens": 2}},
        {"choices": [{"message": {"content": "x"}}], "usage": None},
        {"choices": "no list", "usage": {"completion_tokens": 2}},
    ],
)
def test_a_response_of_another_kind_is_shown_as_it_is(response):
    with pytest.raises(ServerError, match="the server's response is no chat completion of SGLang") as error:
        read_answer(response)
    assert json.dumps(response) in str(error.value)
