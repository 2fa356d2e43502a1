"""Ops by name: the built-in table, and a user's own files."""

import subprocess
import sys
from pathlib import Path

import pytest

from dsl.errors import PipelineError
from dsl.op_table import all_ops, load_op
from dsl.read_toml import read_graph
from ops import OPS

DOUBLE = """
from attrs import frozen
from dsl.op import field, op
from ops.artifacts import Samples

@op(version=1, run="{module}:{name}")
@frozen(kw_only=True)
class {cls}:
    '''Every sample twice.'''
    samples: Samples
    times: int = field(default=2, help="how often")
    output = Samples

def {name}(config, stage):
    return None
"""


def write_op(file: Path, cls: str = "Double") -> Path:
    file.write_text(DOUBLE.format(module=file.stem, name=cls.lower(), cls=cls))
    return file


def mistakes(*op_files: Path) -> list[str]:
    with pytest.raises(PipelineError) as caught:
        all_ops(op_files)
    return str(caught.value).split("\n")


def test_every_built_in_op_is_loaded_under_its_own_name_and_names_its_run_module() -> None:
    ops = all_ops()
    assert list(ops) == list(OPS)
    assert {name: spec.name for name, spec in ops.items()} == {name: name for name in OPS}
    assert {name: spec.run for name, spec in ops.items()} == {name: f"ops.{name}.run:{name}" for name in OPS}


def test_every_config_field_of_a_built_in_op_has_a_help_text() -> None:
    without = [f"{op.name}.{field.name}" for op in all_ops().values() for field in op.fields.values() if not field.help]
    assert without == []


def test_an_unknown_op_is_reported_with_the_nearest_one_or_with_all() -> None:
    with pytest.raises(PipelineError) as caught:
        load_op("evalute")
    assert str(caught.value) == 'there is no op "evalute" (did you mean "evaluate"?)'
    with pytest.raises(PipelineError) as caught:
        load_op("xyz")
    assert str(caught.value) == f'there is no op "xyz" (ops: {", ".join(OPS)})'


def test_a_users_op_works_like_a_built_in_one_and_its_run_function_can_be_imported(tmp_path: Path) -> None:
    write_op(tmp_path / "doubling_ops.py")
    file = tmp_path / "p.toml"
    file.write_text(
        '[pipeline]\nname = "p"\nops = ["doubling_ops.py"]\n'
        '[node.a]\nop = "ingest"\nsource = "builtin:digits"\n[node.b]\nop = "double"\nsamples = "@a"\ntimes = 3\n'
    )
    graph = read_graph(file)
    assert graph.op_files == (tmp_path / "doubling_ops.py",)
    assert (graph.nodes["b"].op.name, graph.nodes["b"].config.times) == ("double", 3)
    assert list(all_ops(graph.op_files)) == [*OPS, "double"]
    script = (
        "import importlib; from pathlib import Path; from dsl.op_table import load_op\n"
        f"module, name = load_op('double', [Path({str(graph.op_files[0])!r})]).run.split(':')\n"
        "print(getattr(importlib.import_module(module), name).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "double\n"


def test_a_file_is_loaded_once_and_another_of_the_same_name_takes_its_place(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one, two = write_op(tmp_path / "one" / "same_ops.py"), write_op(tmp_path / "two" / "same_ops.py", "Triple")
    first = load_op("double", [one])
    assert load_op("double", [one]) is first
    assert load_op("triple", [two]).name == "triple"
    assert mistakes(one, two) == [f'{two} and {one} would both be the module "same_ops": rename one']


def test_a_file_that_cannot_be_a_module_is_refused(tmp_path: Path) -> None:
    for name in ("random.py", "hypothesis.py", "my-ops.py"):
        write_op(tmp_path / name)
    hypothesis = sys.modules["hypothesis"].__file__
    files = [tmp_path / name for name in ("none_ops.py", "random.py", "hypothesis.py", "my-ops.py")]
    assert mistakes(*files) == [
        f"there is no file {tmp_path}/none_ops.py",
        f"{tmp_path}/random.py would hide Python's own module random: rename it",
        f"{tmp_path}/hypothesis.py would hide the installed module hypothesis ({hypothesis}): rename it",
        f"{tmp_path}/my-ops.py: an op file is a Python module: letters, digits and _ in its name, which ends in .py",
    ]


def test_a_file_that_raises_is_reported_with_the_place_and_can_be_fixed(tmp_path: Path) -> None:
    raising, broken, empty = (tmp_path / name for name in ("raising_ops.py", "broken_ops.py", "empty_ops.py"))
    raising.write_text("def f():\n    return 1 / 0\n\nx = 1 + f()\n")
    broken.write_text("x = (\n")
    empty.write_text("x = 1\n")
    assert mistakes(raising, broken, empty) == [
        f"{raising}:2:12: ZeroDivisionError: division by zero",
        f"{broken}:1:5: SyntaxError: '(' was never closed",
        f"{empty} declares no op (a class with @op above @frozen(kw_only=True))",
    ]
    write_op(raising)
    assert load_op("double", [raising]).name == "double"


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    one, two, three = (write_op(tmp_path / f"taken{k}_ops.py") for k in range(3))
    write_op(three, "Ingest")
    assert mistakes(one, two, three) == [
        f'{two}: the op name "double" is taken by {one} (rename the class Double)',
        f'{three}: the op name "ingest" is taken by the built-in ops (rename the class Ingest)',
    ]


def test_mistakes_in_op_files_stand_at_the_key_ops_beside_all_others(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[pipeline]\nname = "p"\nops = ["gone_ops.py"]\n[node.a]\nop = "double"\n[node.b]\nop = "ingest"\n')
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    assert str(caught.value).split("\n") == [
        f"{file}:3:1: pipeline.ops: there is no file {tmp_path}/gone_ops.py",
        f'{file}:6:7: node.b: the required key "source" is missing (str or list of str)',
    ]


def test_an_op_of_a_python_pipeline_that_stages_could_not_load_is_refused(tmp_path: Path) -> None:
    write_op(tmp_path / "unnamed_ops.py")
    file = tmp_path / "p.py"
    text = (
        "from dsl.pipeline import Pipeline\nfrom ops.ingest.op import Ingest\nfrom unnamed_ops import Double\n\n"
        "def pipeline():\n    p = Pipeline('p')\n"
        "    p.node('b', Double(samples=p.node('a', Ingest(source='builtin:digits'))))\n    return p\n"
    )
    file.write_text(text)
    with pytest.raises(PipelineError) as caught:
        read_graph(file)
    assert str(caught.value) == (
        "node.b: the op double is in no op file"
        " (name the file that declares it in Pipeline(..., op_files=(...)), since stages load ops from there)"
    )
    file.write_text(text.replace("Pipeline('p')", "Pipeline('p', op_files=('unnamed_ops.py',))"))
    assert list(read_graph(file).nodes) == ["a", "b"]
