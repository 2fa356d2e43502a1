"""The JSON schema of pipeline files: real ones fit, and what is wrong by itself does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tomli
from corpus import CORPUS
from jsonschema import Draft7Validator

from dsl.op_table import all_ops
from dsl.read_toml import op_files_of
from dsl.schema import LAUNCH_HELP, pipeline_schema
from dsl.written import LAUNCH_FIELDS

PIPELINES = sorted((Path(__file__).resolve().parents[2] / "pipelines").glob("*.toml"))
# Of the corpus: what a schema can know. It says nothing of 8.0 for an int, of nan, of nodes, files and other fields.
REFUSED = [
    *("float_for_int", "bool_for_int", "text_for_bool", "int_for_bool", "text_for_float", "list_for_int"),
    *("table_for_text", "wrong_member_of_a_list", "wrong_member_of_a_table", "text_for_a_list"),
    *("not_one_of_the_choices", "above_the_range", "below_the_range", "empty_text", "very_long_list"),
    *("unknown_key_near_another", "unknown_key_near_none", "quoted_key_of_unicode", "unknown_op", "op_that_is_no_text"),
    *("node_that_is_no_table", "node_id_with_blanks", "reference_without_at", "one_reference_for_a_list"),
    *("list_for_one_reference", "unknown_launch_key", "launch_that_is_no_table", "machine", "tables", "tags"),
    *("no_pipeline_table", "inline_tables_and_dotted_keys", "tabs_and_unicode_before_a_key"),
]


def wrong(schema: dict[str, Any], file: Path) -> list[str]:
    """Paths of all that the schema refuses in a file."""
    errors = Draft7Validator(schema).iter_errors(tomli.loads(file.read_text(encoding="utf-8-sig")))
    return sorted(".".join(map(str, error.absolute_path)) for error in errors)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(pipeline_schema(all_ops())))
    Draft7Validator.check_schema(made)
    return made


@pytest.fixture(scope="module")
def corpus_schema() -> dict[str, Any]:
    return pipeline_schema(all_ops((CORPUS / "corpus_ops.py",)))


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.name)
def test_every_shipped_pipeline_fits_the_schema(schema: dict[str, Any], file: Path) -> None:
    assert wrong(schema, file) == []


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_by_itself_does_not_fit(corpus_schema: dict[str, Any], case: str) -> None:
    assert wrong(corpus_schema, CORPUS / case / "pipeline.toml") != []


def test_a_wrong_value_is_refused_at_its_own_key(corpus_schema: dict[str, Any]) -> None:
    file = CORPUS / "inline_tables_and_dotted_keys" / "pipeline.toml"
    (maker, joiner) = tomli.loads(file.read_text())["node"]
    expected = {f"node.{joiner}.launch.nproc", f"node.{joiner}.share", f"node.{maker}.seed"}
    assert sorted(expected) == wrong(corpus_schema, file)


def test_a_field_tells_type_range_default_and_help(schema: dict[str, Any]) -> None:
    definitions = schema["definitions"]
    rate = definitions["op.train_dflash"]["properties"]["lr"]
    reference = {"type": "string", "pattern": r"\$\{.+\}"}
    assert rate["anyOf"] == [{"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, reference]
    assert (rate["default"], rate["description"]) == (0.0006, "peak learning rate")
    assert definitions["op.export_draft"]["properties"]["draft"]["pattern"] == r"^@|\$\{.+\}"
    assert definitions["launch"]["properties"]["kind"]["anyOf"][0] == {"enum": ["process", "torchrun"]}
    assert set(LAUNCH_HELP) == set(LAUNCH_FIELDS)


def test_the_ops_of_a_file_are_found_whatever_else_is_wrong_with_it() -> None:
    assert op_files_of(CORPUS / "eight_at_once" / "pipeline.toml") == (CORPUS / "corpus_ops.py",)
