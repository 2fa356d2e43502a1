"""`dflow init`: survey a user's data, and write a pipeline file for it."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
from pathlib import Path

from dsl.errors import DataError
from dsl.files import clear_errors, free_bytes
from dsl.op_table import all_ops
from dsl.schema import pipeline_schema
from executor.commands.arguments import add_store
from executor.keys.external_inputs import look_at
from executor.store.artifact_store import store_path
from executor.system.hardware import may_have_gpu
from executor.system.output import OK, name_store, print_lines
from executor.system.progress import Activity
from ops.tools.init.advice import Precision, advise
from ops.tools.init.columns import named_columns
from ops.tools.init.rendering import measure
from ops.tools.init.survey import Counter, survey
from ops.tools.init.target import Measured, Target, measured, read_target, with_unseen_mask
from ops.tools.init.text import PLACEHOLDER, enable_thinking, pipeline_text, summary, tools_as

DEFAULT_OUTPUT = Path("pipeline.toml")
SCHEMA = "dflow.schema.json"
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data", type=Path, nargs="+", metavar="DATA", help="data files or folders; docs/data.md lists the formats"
    )
    parser.add_argument(
        "--target",
        metavar="CHECKPOINT",
        help="the checkpoint directory of the target model, or a model id that dflow has a pipeline for",
    )
    parser.add_argument(
        "-o", dest="output", type=Path, default=DEFAULT_OUTPUT, metavar="FILE", help=f"default: {DEFAULT_OUTPUT}"
    )
    parser.add_argument(
        "--image-root",
        metavar="DIR",
        action="append",
        help="the folder that image paths are relative to; default: the data's own. Given several times: of each DATA",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the forward passes; default: the target's own, or float32 where this machine has no GPU",
    )
    parser.add_argument(
        "--column",
        metavar="KEY=NAME",
        action="append",
        default=[],
        help="the column of the data that holds what KEY is, such as answer=caption; default: proposed by its name and "
        "values. Repeatable",
    )
    parser.add_argument("--allow-outside", action="store_true", help="also use images outside that folder")
    parser.add_argument("--force", action="store_true", help=f"overwrite FILE and {SCHEMA} where they exist")
    add_store(parser)


def main(options: argparse.Namespace) -> int:
    """Run `dflow init`. Raises DataError for unusable data, data that `plan` cannot read, and an existing file, all at
    once.
    """
    output: Path = options.output
    mistakes = _output_mistakes(output, options.force)
    target: Target | None = None
    about = Measured([])
    try:
        if options.target is not None:
            target = read_target(options.target)
            if not mistakes:  # what would be refused at the end is not measured, which takes long
                with Activity() as activity:
                    about = measured(target, activity.status, activity.detail)
    except DataError as error:
        mistakes.append(str(error))
    try:
        named = named_columns(options.column)
        found = survey(tuple(options.data), Counter.of(target), _image_root(options), options.allow_outside, named)
        if target is not None:
            target = with_unseen_mask(target, found.token_ids, len(found.lengths))
            with Activity() as activity:
                activity.status(f"counting tokens of {len(found.drawn):,} samples by the target's chat template")
                measure(found, target, enable_thinking(found, target), tools_as(found))
        for data in options.data:
            look_at(data)
        store = store_path(options.store, output)
        name_store(store, store_path(None, output))
        precision = Precision.choose(target, options.dtype, has_gpu=may_have_gpu())
        advice = advise(found, target, free_bytes(store), precision)
    except DataError as error:
        raise DataError("\n".join([*mistakes, str(error)])) from error
    if mistakes:
        raise DataError("\n".join(mistakes))
    name = _pipeline_name(output, options.data[0])
    sources = [_data_path(output, data) for data in options.data]
    text = pipeline_text(name, sources, f"./{SCHEMA}", found, target, advice, about.is_verified)
    with clear_errors(output):
        _write(output, text)
        about_schema = _write_schema(output.with_name(SCHEMA), options.force)
    print_lines("\n".join([*about.lines, *summary(found, target, advice)]))
    print_lines(f"\nwrote {output}{about_schema}")
    if target is None:
        print_lines(f'replace "{PLACEHOLDER}" by the directory of your target, then:')
    else:
        print_lines("next:")
    file = shlex.quote(str(output))
    print_lines(
        f"    dflow plan {file}          # what it needs, without running anything\n    dflow run {file} --smoke 16"
    )
    return OK


def _image_root(options: argparse.Namespace) -> str | tuple[str, ...] | None:
    """The value of image_root for ingest. Raises DataError for several that do not match the data arguments
    one to one.
    """
    roots = [str(Path(root).resolve()) for root in options.image_root or ()]
    if len(roots) > 1 and len(roots) != len(options.data):
        raise DataError(
            f"--image-root is given {len(roots)} times for {len(options.data)} of DATA: give one, or one for each"
        )
    return tuple(roots) if len(roots) > 1 else next(iter(roots), None)


def _output_mistakes(output: Path, force: bool) -> list[str]:
    if output.suffix != ".toml":
        return [f"-o {output}: the name of a pipeline file must end in .toml"]
    if not output.parent.is_dir():
        return [f"-o {output}: no such folder: {output.parent}"]
    if os.path.lexists(output) and not force:
        return [f"{output} exists; give another file with -o, or overwrite it with --force"]
    return []


def _pipeline_name(output: Path, data: Path) -> str:
    """A name for the new pipeline: the output file's if the user chose one, else the data's, so that MLflow tells them
    apart.
    """
    source = Path(os.path.abspath(data))  # noqa: PTH100  "." has no name
    chosen = source.name if source.is_dir() else source.stem
    if output.name != DEFAULT_OUTPUT.name:
        chosen = output.stem
    return re.sub(r"[^\w.-]+", "-", chosen).strip("-.") or DEFAULT_OUTPUT.stem


def _data_path(output: Path, data: Path) -> str:
    """The path of the data for the pipeline file: relative if the data lies in the file's folder, so that both can
    move.
    """
    here, there = output.absolute().parent, Path(os.path.abspath(data))  # noqa: PTH100  links stay as they are
    return there.relative_to(here).as_posix() if there.is_relative_to(here) else str(there)


def _write_schema(path: Path, force: bool) -> str:
    """Write the JSON schema for editors. Returns what to say of it: nothing where the same one is there.

    An existing schema may include the user's own ops, so only `force` overwrites it.
    """
    schema = json.dumps(pipeline_schema(all_ops()), indent=1, ensure_ascii=False) + "\n"
    if os.path.lexists(path) and not force:
        if path.is_file() and path.read_text(encoding="utf-8", errors="replace") == schema:
            return ""
        return f"\nnote: the existing {SCHEMA} differs and is kept; --force overwrites it"
    _write(path, schema)
    return f", and {path}, which lets an editor complete and check it"


def _write(path: Path, text: str) -> None:
    """Write a new file in the place of an old one; a link there is replaced, not followed."""
    path.unlink(missing_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
