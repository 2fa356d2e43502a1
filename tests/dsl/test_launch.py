"""How a stage runs, the machine, tags and notes: what is accepted, what is refused, and that records keep them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsl.compile import override_graph
from dsl.convert import structure
from dsl.errors import ConfigError, PipelineError
from dsl.graph import graph_from_json, graph_to_json
from dsl.launch import memory_bytes
from dsl.pipeline import Launch, Machine, Pipeline
from dsl.read_toml import read_graph
from dsl.shown import POWERS_OF_TWO, parsed_bytes, shown_bytes
from ops.ingest.op import Ingest

NODE = '[node.n]\nop = "measure"\n'
MEASURE = """
from attrs import frozen
from dsl.op import op
from ops.artifacts import Samples

@op(version=1, run="launched_ops:measure", sequence_parallel=True)
@frozen(kw_only=True)
class Measure:
    output = Samples
"""


def write(folder: Path, text: str) -> Path:
    (folder / "launched_ops.py").write_text(MEASURE)
    file = folder / "p.toml"
    file.write_text(text)
    return file


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        read_graph(write(folder, 'pipeline = { name = "p", ops = ["launched_ops.py"] }\n' + text))
    return str(caught.value).replace(f"{folder}/p.toml:", "").split("\n")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24 GiB", 24 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        ("512MB", 512_000_000),
        (" 3 kib ", 3072),
        ("1000", 1000),
        ("0.1 KB", 100),
    ],
)
def test_an_amount_of_bytes_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parsed_bytes(text) == size


@given(st.integers(1, 10**6), st.sampled_from(sorted(POWERS_OF_TWO)))
def test_whole_binary_amounts_are_exact(count: int, unit: str) -> None:
    assert parsed_bytes(f"{count} {unit}") == count * POWERS_OF_TWO[unit]


@pytest.mark.parametrize("text", ["", "GiB", "24 Gi", "-1 GB", "1e3", "24 GiB each", "0", "0.1 B", "nan GB", "٣ GB"])
def test_what_is_no_amount_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="byte"):
        parsed_bytes(text)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        ("hosts = 0", "hosts: must be >= 1, got 0"),
        ("hosts = 2", 'hosts: hosts > 1 needs kind = "ray"'),
        (
            'shard_workers = 2, kind = "ranks", nproc = 2',
            "shard_workers: workers that share shards are processes of one rank each; leave nproc and hosts out, "
            "or shard_workers",
        ),
        ("gpus = -1", "gpus: must be >= 0, got -1"),
        ("gpus = 1.0", "gpus: expected int or none, got 1.0 (float)"),
        ('gpus = 1, device = "cpu"', 'gpus: device = "cpu" does not use GPUs; leave gpus out, or set device = "auto"'),
        ("cpus = 0", "cpus: must be >= 1, got 0"),
        ("memory = 24", "memory: expected str or none, got 24 (int)"),
        (
            'memory = "24 gigs"',
            'memory: expected a number of bytes such as "24 GiB" or "24 GB", got "24 gigs"',
        ),
        ("retries = -1", "retries: must be >= 0, got -1"),
        ("retry_wait = -0.5", "retry_wait: expected seconds, 0 or more, got -0.5"),
        ("retry_wait = nan", "retry_wait: expected seconds, 0 or more, got nan"),
        ("timeout = inf", "timeout: expected seconds, 0 or more, got inf"),
        ('timeout = "1h"', 'timeout: expected float, got "1h"'),
        ("retriess = 1", 'retriess: unknown key (did you mean "retries"?)'),
    ],
)
def test_a_wrong_launch_is_told_with_field_and_value(tmp_path: Path, launch: str, expected: str) -> None:
    assert mistakes(tmp_path, NODE + f"launch = {{ {launch} }}\n") == [f"4:12: node.n.launch.{expected}"]


@pytest.mark.parametrize(
    ("launch", "field"),
    [
        ('kind = "ranks", nnodes = 2', "nnodes"),
        ('kind = "ranks", nnodes = 2, rendezvous = "host:29500"', "nnodes"),
        ('kind = "ranks", rendezvous = "host:29500"', "rendezvous"),
    ],
)
def test_ranks_of_torchrun_on_several_machines_are_one_mistake_that_names_ray(
    tmp_path: Path, launch: str, field: str
) -> None:
    [mistake] = mistakes(tmp_path, NODE + f"launch = {{ {launch} }}\n")
    assert f"node.n.launch.{field}: ranks on several machines are started by Ray, not by torchrun" in mistake
    assert 'set kind = "ray" and hosts = 2 instead' in mistake


@pytest.mark.parametrize("address", ["local", "host:6379", "10.0.0.1:1", "[fe80::1]:29500", "node-1.cluster:65535"])
def test_a_cluster_is_dflows_own_or_the_address_of_a_head(address: str) -> None:
    assert Machine(ray=address).ray == address


@pytest.mark.parametrize(
    "address", ["auto", "", "host", "host:", ":29500", "host:0", "host:65536", "a b:1", "ray://h:1"]
)
def test_another_text_than_an_address_names_no_cluster(tmp_path: Path, address: str) -> None:
    [mistake] = mistakes(tmp_path, f'[machine]\nray = "{address}"\n' + NODE)
    assert mistake.startswith("3:1: machine.ray: ")
    assert '"local" (a cluster of dflow\'s own on this machine) or "HOST:PORT"' in mistake
    assert ("would join whatever cluster is found" in mistake) == (address == "auto")


def test_a_stage_may_run_on_several_hosts() -> None:
    launch = Launch(kind="ray", nproc=8, hosts=2, sp_degree=4)
    assert (launch.world_size, launch.parts, launch.processes_of_part) == (16, 2, 8)
    assert Launch(kind="ray", shard_workers=3).parts == 3
    assert Launch(shard_workers=3).processes_of_part == 3


def test_mistakes_in_machine_and_mlflow_are_told_together(tmp_path: Path) -> None:
    text = (
        '[machine]\ncpus = 0\ngpus = "two"\nmemory = "lots"\ndisk = 1\n'
        "[mlflow]\ntags = { team = 1 }\nnotes = 2\n" + NODE
    )
    assert mistakes(tmp_path, text) == [
        "3:1: machine.cpus: must be >= 1, got 0",
        '4:1: machine.gpus: expected int or none, got "two"',
        '5:1: machine.memory: expected a number of bytes such as "24 GiB" or "24 GB", got "lots"',
        "6:1: machine.disk: unknown key (keys: cpus, gpus, memory, ray, ray_without_authentication)",
        "8:1: mlflow.tags: team: expected str, got 1 (int)",
        "9:1: mlflow.notes: expected str, got 2 (int)",
    ]


def test_a_node_that_asks_for_more_than_the_machine_may_give_is_refused(tmp_path: Path) -> None:
    machine = '[machine]\ncpus = 4\ngpus = 1\nmemory = "2 GiB"\n'
    assert mistakes(tmp_path, machine + NODE + 'launch = { cpus = 5, gpus = 2, memory = "2.2 GB" }\n') == [
        "8:12: node.n.launch.cpus: more than the 4 of [machine] cpus",
        "8:22: node.n.launch.gpus: more than the 1 of [machine] gpus",
        "8:32: node.n.launch.memory: more than the 2 GiB of [machine] memory",
    ]


def test_a_tag_that_dflow_or_mlflow_writes_is_refused(tmp_path: Path) -> None:
    told = [
        mistakes(tmp_path, f"[mlflow.tags]\n{tag} = 'x'\n" + NODE) for tag in ('"dflow.node"', '"mlflow.note"', '" "')
    ]
    assert told == [
        ['2:9: mlflow.tags: the tag "dflow.node": names that begin with dflow. or mlflow. are reserved'],
        ['2:9: mlflow.tags: the tag "mlflow.note": names that begin with dflow. or mlflow. are reserved'],
        ["2:9: mlflow.tags: a tag needs a name"],
    ]
    with pytest.raises(ConfigError, match="are reserved"):
        Pipeline("p", tags={"dflow.node": "x"})


def test_tags_notes_machine_and_launch_are_in_the_graph_and_survive_records_and_overrides(tmp_path: Path) -> None:
    text = """
[pipeline]
name = "p"
[mlflow]
tags = { team = "a", "with space" = "b" }
notes = \"\"\"two
lines\"\"\"
[machine]
cpus = 8
gpus = 1
memory = "24 GiB"
[node.n]
op = "ingest"
source = "builtin"
launch = { gpus = 1, cpus = 2, memory = "1.5 GB", retries = 0, retry_wait = 1, timeout = 60.5 }
"""
    graph = read_graph(write(tmp_path, text))
    assert dict(graph.tags) == {"team": "a", "with space": "b"}
    assert graph.notes == "two\nlines"
    assert graph.machine == Machine(cpus=8, gpus=1, memory="24 GiB")
    assert memory_bytes(graph.machine) == 24 * 2**30
    launch = graph.nodes["n"].launch
    assert launch == Launch(gpus=1, cpus=2, memory="1.5 GB", retries=0, retry_wait=1, timeout=60.5)
    assert memory_bytes(launch) == 1_500_000_000
    recorded = graph_from_json(json.loads(json.dumps(graph_to_json(graph))))
    assert recorded == graph
    changed = override_graph(recorded, ["n.max_samples=3"])
    assert (changed.tags, changed.notes, changed.machine) == (graph.tags, graph.notes, graph.machine)


def test_a_record_of_before_there_were_tags_and_machines_is_read(tmp_path: Path) -> None:
    text = '[pipeline]\nname = "p"\n[node.n]\nop = "ingest"\nsource = "builtin"\n'
    graph = read_graph(write(tmp_path, text))
    record = graph_to_json(graph)
    for name in ("tags", "notes", "machine"):
        del record[name]
    record["nodes"][0]["launch"] = {"kind": "process", "nproc": 1, "device": "auto", "threads": 0}
    assert graph_from_json(record) == graph


def test_a_pipeline_in_python_takes_the_same(tmp_path: Path) -> None:
    file = tmp_path / "p.py"
    file.write_text("""
from dsl.pipeline import Launch, Machine, Pipeline
from ops.ingest.op import Ingest

def pipeline() -> Pipeline:
    p = Pipeline("p", tags={"team": "a"}, notes="n", machine=Machine(memory="1 TB"))
    p.node("n", Ingest(source="builtin"), launch=Launch(cpus=2))
    return p
""")
    graph = read_graph(file)
    assert (graph.tags, graph.notes, graph.machine) == ({"team": "a"}, "n", Machine(memory="1 TB"))
    assert graph.nodes["n"].launch.cpus == 2
    assert graph.nodes["n"].config == Ingest(source="builtin", seed=0)


def test_few_bytes_are_shown_as_such():
    assert [shown_bytes(size) for size in (1, 99_999, 1e5, 2.7e6)] == ["1 bytes", "99,999 bytes", "0.1 MB", "2.7 MB"]


def test_the_old_word_for_ranks_is_still_accepted() -> None:
    assert structure(Launch, {"kind": "torchrun", "nproc": 2}) == Launch(kind="ranks", nproc=2)
