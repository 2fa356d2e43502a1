"""Where a server cannot listen is an error with what to change, before it is started."""

from __future__ import annotations

import pytest

from dsl.errors import DflowError
from executor.system.server import require_free_port


@pytest.mark.parametrize(
    ("host", "port", "problem"),
    [
        ("127.0.0.1", 99999, "--port 99999: must be from 1 to 65535"),
        ("127.0.0.1", 0, "--port 0: must be from 1 to 65535"),
        ("no..host", 30000, "--host no..host: it has no IPv4 address"),
        ("nosuch.invalid", 30000, "--host nosuch.invalid: it has no IPv4 address"),
        (
            "192.0.2.1",
            30000,
            "192.0.2.1:30000: Cannot assign requested address; set --host to an address of this machine",
        ),
    ],
)
def test_an_address_where_nobody_can_listen_is_refused_with_what_to_change(host, port, problem):
    with pytest.raises(DflowError) as error:
        require_free_port(host, port)
    assert str(error.value).startswith(problem)
