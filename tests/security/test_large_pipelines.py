"""A pipeline of any size or shape is planned, or refused, within seconds and little memory."""

from __future__ import annotations

import random
import resource

import pytest
from toy_ops import Toy

HEAD = '[pipeline]\nname = "large"\nops = ["toy.py"]\n'
MOST_BYTES = 2 << 30


def chain(nodes):
    first = '[node.n0]\nop = "make"\n'
    return HEAD + first + "".join(f'[node.n{i}]\nop = "upper"\ntext = "@n{i - 1}"\n' for i in range(1, nodes))


def knot(nodes, references):
    draw = random.Random(0)
    return HEAD + "".join(
        f'[node.n{i}]\nop = "join"\ntexts = {[f"@n{draw.randrange(nodes)}" for _ in range(references)]}\n'
        for i in range(nodes)
    )


@pytest.fixture
def little_memory():
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (chain(100_000), 0, "n99999  upper  runs  new"),
        (knot(2000, 20), 2, "the nodes form a cycle"),
        (f'{HEAD}[node.{"9" * 100_000}]\nop = "make"\n', 2, "node id"),
        (f"{HEAD}[node.a]\nop = 'make'\ntext = '{'x' * 10_000_000}'\n", 0, "new"),
    ],
    ids=["a long chain", "cycles without end", "a long id", "a long value"],
)
def test_a_pipeline_of_any_size_is_planned_or_refused(text, code, said, little_memory, tmp_path):
    toy = Toy(tmp_path, text)
    result = toy.dflow("plan", str(toy.file))
    assert result.returncode == code, result.stderr[-2000:]
    assert said in result.stdout + result.stderr
    assert len(result.stderr) < 10_000 and "Traceback" not in result.stderr
