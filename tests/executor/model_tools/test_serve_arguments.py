"""The arguments of `dflow serve`: those that it gives SGLang itself are refused, and places where nobody can listen."""

from __future__ import annotations

import pytest

from dsl.errors import ConfigError, DflowError
from executor.system.server import require_free_port
from ops.tools.serve.sglang_arguments import refuse_own

OWN_ARGUMENTS = (
    *("--port", "--port=8000", "--por", "--host=0.0.0.0", "--model-path", "--model_path=x", "--model", "--mod"),
    *("--speculative-algorithm=EAGLE", "--speculative-algo", "--speculative_draft_model_path"),
    *("--speculative-draft-model", "--speculative-draft-model-path=x"),
)


@pytest.mark.parametrize("argument", OWN_ARGUMENTS)
def test_sglangs_arguments_that_are_dflows_to_give_are_refused(argument):
    with pytest.raises(ConfigError, match=f"arguments that dflow serve gives itself:\n  {argument}: "):
        refuse_own(["--tp-size", "2", argument])


def test_other_arguments_of_sglang_are_not_refused():
    refuse_own(
        ["--tp-size", "2", "--mem-fraction-static=0.8", "--dtype", "float16", "--ports", "--model-impl", "-p", "--"]
    )


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("127.0.0.1", 99999, "--port 99999: ports are 1 to 65535"),
        ("127.0.0.1", 0, "--port 0: ports are 1 to 65535"),
        ("no..host", 30000, "--host no..host: no IPv4 address is known for it"),
        ("nosuch.invalid", 30000, "--host nosuch.invalid: no IPv4 address is known for it"),
        (
            "192.0.2.1",
            30000,
            "192.0.2.1:30000: Cannot assign requested address; give --host an address of this machine",
        ),
    ],
)
def test_what_is_no_place_to_listen_is_told_with_what_to_change(host, port, problem):
    with pytest.raises(DflowError) as error:
        require_free_port(host, port)
    assert str(error.value).startswith(problem)
