"""Arguments that `dflow serve` gives SGLang itself are refused."""

from __future__ import annotations

import pytest

from dsl.errors import ConfigError
from ops.tools.serve.sglang_arguments import refuse_own

OWN_ARGUMENTS = (
    *("--port", "--port=8000", "--por", "--host=0.0.0.0", "--model-path", "--model_path=x", "--model", "--mod"),
    *("--speculative-algorithm=EAGLE", "--speculative-algo", "--speculative_draft_model_path"),
    *("--speculative-draft-model", "--speculative-draft-model-path=x"),
)


@pytest.mark.parametrize("argument", OWN_ARGUMENTS)
def test_sglangs_arguments_that_are_dflows_to_give_are_refused(argument):
    with pytest.raises(ConfigError, match=f"arguments after -- that dflow serve sets itself:\n  {argument}: "):
        refuse_own(["--tp-size", "2", argument])


def test_other_arguments_of_sglang_are_not_refused():
    refuse_own(
        ["--tp-size", "2", "--mem-fraction-static=0.8", "--dtype", "float16", "--ports", "--model-impl", "-p", "--"]
    )
