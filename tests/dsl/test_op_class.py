"""What a config class has beside its fields: checked when it is declared, found when needed, listed in the docs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from attrs import frozen

from dsl.errors import ConfigError, PipelineError
from dsl.op import Artifact, field, op, op_of
from dsl.op_class import ATTRIBUTES, HOOK_FILES, METHODS, OpClass, hook, method
from dsl.op_table import load_op
from dsl.stage import Stage

PAGE = Path(__file__).parents[2] / "docs" / "ops.md"


@frozen
class Text(Artifact):
    """text.txt"""


def declared(**members: Any) -> Any:
    """The declaration of an op whose class has these members beside a field."""
    namespace = {"__annotations__": {"count": int}, "count": field(default=1), "output": Text, **members}
    return op_of(op(version=1, run="work:work")(frozen(kw_only=True)(type("Work", (), namespace))))


def test_class_attributes_say_what_an_op_is_beyond_the_arguments_of_op() -> None:
    plain = declared()
    assert ((), False, "", "") == (plain.transient, plain.shows_results, plain.judged_by, plain.main_figures)
    given = {
        "transient": ("TimeoutError",),
        "shows_results": True,
        "judged_by": "-eval/loss",
        "main_figures": "eval/.*",
    }
    spec = declared(**given)
    assert given == {name: getattr(spec, name) for name in given}


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"transient": "TimeoutError"}, 'Work.transient: expected list of str, got "TimeoutError"'),
        ({"transient": (TimeoutError,)}, "Work.transient: member 1: expected str, got"),
        ({"shows_results": 1}, "Work.shows_results: expected bool, got 1"),
        ({"judged_by": None}, "Work.judged_by: expected str, got"),
        (
            {"external_files": lambda self, root: {}},
            "Work.external_files: expected def external_files(self) -> Mapping[str, Path | None], got (self, root)",
        ),
        ({"chosen_libraries": ("sglang",)}, "Work.chosen_libraries: expected def chosen_libraries(self) -> tuple"),
        (
            {"missing_here": property(lambda self: {})},
            "Work.missing_here: expected def missing_here(self) -> Mapping[str, str]",
        ),
        (
            {"launch_mistakes": lambda self, values, launch: {}},
            "Work.launch_mistakes: expected @staticmethod def launch_mistakes(values: Mapping[str, Any], ",
        ),
        ({"report": lambda self, folder: []}, "Work.report: expected @staticmethod def report(folder: Path)"),
        ({"smoke": lambda self: {}}, "Work.smoke: expected def smoke(self, samples: int) -> Mapping"),
    ],
)  # fmt: skip
def test_a_wrong_or_misspelled_member_is_reported_at_once(members: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        declared(**members)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("judged_bye", "judged_by"),
        ("show_results", "shows_results"),
        ("outputs", "output"),
        ("external_file", "external_files"),
        ("choosen_code", "chosen_code"),
        ("reports", "report"),
    ],
)
def test_a_name_that_is_nearly_a_known_one_is_reported(name: str, meant: str) -> None:
    with pytest.raises(
        ConfigError, match=rf'^Work.{name}: no such member of an op \(did you mean "{meant}"\? Rename it'
    ):
        declared(**{name: "eval/tau"})


def test_all_wrong_members_are_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        declared(shows_results=1, transient=2)
    assert {"Work.shows_results", "Work.transient"} == {
        line.partition(":")[0] for line in str(caught.value).splitlines()
    }


def test_members_of_ones_own_and_those_that_begin_with_an_underscore_are_left_alone() -> None:
    declared(LIMIT=3, total=lambda self: 3, prompt=property(lambda self: ""), _reports=1, _external_file=2)


@pytest.mark.parametrize("name", METHODS)
def test_a_field_may_be_named_like_a_method_or_a_hook_and_is_none(name: str) -> None:
    spec = declared(__annotations__={name: str, "count": int}, **{name: field(default="")})
    assert {name, "count"} == {*spec.fields}
    assert method(spec, name) is None
    assert name not in HOOK_FILES or hook(spec, name) is None


def test_the_error_names_the_place_in_the_users_file(tmp_path: Path) -> None:
    file = tmp_path / "misspelled_ops.py"
    file.write_text(
        "from attrs import frozen\nfrom dsl.op import Artifact, op\n\n\nclass Text(Artifact):\n    pass\n\n\n"
        '@op(version=1, run="misspelled_ops:work")\n@frozen(kw_only=True)\nclass Work:\n    output = Text\n'
        '    judge_by = "eval/tau"\n'
    )
    with pytest.raises(PipelineError) as caught:
        load_op("work", [file])
    assert f'{file}:9:2: Work.judge_by: no such member of an op (did you mean "judged_by"?' in str(caught.value)


@pytest.mark.parametrize("names", ["a.txt", ["a.txt"], (1,)])
def test_the_required_files_of_an_artifact_type_are_a_tuple_of_names(names: object) -> None:
    wrong = type("Wrong", (Artifact,), {"required_files": names})
    with pytest.raises(TypeError, match=r"Wrong\.required_files: expected a tuple of names of files, got "):
        declared(output=wrong)
    assert declared(output=type("Right", (Artifact,), {"required_files": ("a.txt",)})).output.required_files


def test_a_method_of_the_class_is_the_hook_and_its_self_is_the_config() -> None:
    spec = declared(
        missing_here=lambda self: {"count": f"{self.count} are too few"},
        report=staticmethod(lambda folder: [folder.name]),
    )
    missing_here, report = hook(spec, "missing_here"), hook(spec, "report")
    assert missing_here is not None and report is not None
    assert {"count": "3 are too few"} == missing_here(spec.config_class(count=3))
    assert ["made"] == report(Path("made"))
    assert hook(spec, "smoke") is None


def test_a_function_in_the_file_beside_op_py_is_the_hook_of_a_built_in_op() -> None:
    found = hook(load_op("check_export"), "report")  # which has an edge of that name
    assert found is not None
    assert ("ops.check_export.show", "report") == (found.__module__, found.__name__)
    assert hook(load_op("load_target"), "smoke") is None  # the file is there, the function is not
    assert hook(load_op("inject_images"), "missing_here") is None  # there is no such file


def test_a_module_beside_a_users_file_is_no_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = ModuleType("report")
    beside.report = lambda folder: []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "report", beside)
    assert hook(declared(__module__="op"), "report") is None


def test_looking_for_hooks_loads_neither_torch_nor_what_a_stage_runs() -> None:
    code = (
        "import sys\nfrom dsl.op_class import HOOK_FILES, hook\nfrom dsl.op_table import all_ops\n"
        "found = [hook(spec, name) for spec in all_ops().values() for name in HOOK_FILES]\n"
        "loaded = {'torch', 'transformers', 'mlflow'} & sys.modules.keys()\n"
        "runs = [name for name in sys.modules if name.startswith('ops.') and name.endswith('.run')]\n"
        "print(len([each for each in found if each]) > 30, sorted(loaded), runs)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "True [] []\n" == shown


def rows_of(page: str, head: str) -> dict[str, list[str]]:
    """The cells of each row of the table below a header, by the name in the first one."""
    lines = page[page.index(head) :].splitlines()[2:]
    table = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return {re.match(r"`(\w+)", cells[0])[1]: cells for cells in table}  # type: ignore[index]


def test_the_guide_has_every_argument_of_op_with_its_default() -> None:
    rows = rows_of(PAGE.read_text(encoding="utf-8"), "| argument |")
    written = {
        name: "required" if argument.default is argument.empty else f"`{argument.default}`"
        for name, argument in inspect.signature(op).parameters.items()
    }
    assert written == {name: row[1] for name, row in rows.items()}


def test_the_guide_names_every_member_of_a_stage() -> None:
    page = PAGE.read_text(encoding="utf-8")
    sentence = page[page.index("access to the outside is `stage`:") :].partition(". With")[0]
    listed = re.findall(r"`(\w+)(?:\(\))?`", sentence.partition(":")[2])
    assert sorted(name for name in vars(Stage) if not name.startswith("_")) == sorted(listed)


def test_the_tables_of_the_guide_have_every_member_with_its_default_and_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    attributes = rows_of(page, "| attribute |")
    assert ["output", *ATTRIBUTES] == list(attributes)
    written = {bool: str, str: lambda value: f'"{value}"', tuple: str}
    defaults: dict[str, Any] = {name: getattr(OpClass, name) for name in ATTRIBUTES}
    show: Callable[[Any], str] = lambda value: f"`{written[type(value)](value)}`"  # noqa: E731
    assert {name: show(value) for name, value in defaults.items()} == {name: attributes[name][1] for name in ATTRIBUTES}
    methods, hooks = rows_of(page, "| method |"), rows_of(page, "| hook |")
    assert METHODS.keys() == {*methods, *hooks}
    assert {name: f"`{file}.py`" for name, file in HOOK_FILES.items()} == {name: row[1] for name, row in hooks.items()}
    for name, signature in METHODS.items():
        is_static = "self" not in signature.parameters
        cell = f"`{name}({', '.join(signature.parameters)})`{', static' if is_static else ''}"
        assert cell == {**methods, **hooks}[name][0]
