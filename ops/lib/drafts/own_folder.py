"""What is wrong with the folder of an algorithm of the user's, as far as it can be found without torch.

config.py, options.py and contract.py are imported and used; the other files, which import torch, are only parsed:
own_modules.py imports them. All mistakes are found at once; each names its file.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from dsl.draft_folders import FILES, OPTIONS, own_algorithms
from dsl.errors import ConfigError
from ops.lib.drafts.algorithms import Algorithm, algorithm_class, own_options, part_of, place_in
from ops.lib.drafts.backbone.config import DraftConfig, from_serving, to_serving
from ops.lib.drafts.layout import Layout

# The functions of each file, by the number of their parameters.
FUNCTIONS = {
    "modules.py": {"around_sublayers": 1, "heads": 1},
    "propose.py": {"propose": 5},
    "loss.py": {"block_losses": 4},
    "contract.py": {"shapes": 1},
    "reference.py": {"enter": 3, "leave": 4, "scores": 5, "token_logits": 5, "block_losses": 8},
}
PAIR = {"enter", "leave"}  # both or neither: nothing goes around the sublayers
CONSTANTS = {"contract.py": ("MISSING", "WRONG")}
METHODS = {  # of the config's class, by the number of their arguments
    "layout": 1,
    "metrics": 1,
    "mistakes": 1,
    "to_serving": 1,
    "from_serving": 1,
    "parameters": 1,
    "slot_floats": 1,
    "slot_flops": 1,
}
# What a training logs under train/ and val/ beside the algorithm's metrics.
LOGGED = frozenset(
    {
        "loss",
        "accuracy",
        "expected_tau",
        "tau",
        "lr",
        "grad_norm",
        "anchors",
        "anchors_per_second",
        "tokens_per_second",
        "samples_without_anchor",
        "nonfinite_steps",
        "memory_gigabytes",
        "mfu",
        "wait_share",
        "time_share",
    }
)
LOGGED_OF_SLOTS = ("accuracy_slot_", "loss_slot_")
BLOCK_SIZE = 8  # of the draft that the config is tried with


def folder_mistakes(name: str) -> list[str]:
    """Each as "file: what is wrong"; empty for a folder that can be used. Missing files are reported elsewhere."""
    folder = own_algorithms()[name]
    files = [folder / file for file in (*FILES, OPTIONS)]
    by_file = {file.name: [*_parsed_mistakes(file)] for file in files if file.is_file()}
    mistakes = [mistake for wrong in by_file.values() for mistake in wrong]
    if not by_file.keys() >= {*FILES}:
        return mistakes
    if not by_file["config.py"] + by_file["contract.py"]:
        try:
            mistakes += _config_mistakes(name, algorithm_class(name), folder / "config.py")
        except ConfigError as error:
            mistakes.append(str(error))
    if not by_file.get(OPTIONS):
        try:
            mistakes += _options_mistakes(own_options(name), folder / OPTIONS)
        except ConfigError as error:
            mistakes.append(str(error))
    return mistakes


def draft_config(algorithm: Algorithm, block_size: int = BLOCK_SIZE, layers: int = 2) -> DraftConfig:
    """The config of a draft of usual sizes. Raises ConfigError if the algorithm's sizes do not fit."""
    return DraftConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=6144,
        vocab_size=32000,
        block_size=block_size,
        mask_token_id=0,
        target_layer_ids=(0, 1),
        num_target_layers=4,
        max_position_embeddings=4096,
        algorithm=algorithm,
    )


def _parsed_mistakes(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        yield f"{file}:{error.lineno}: {error.msg}"
        return
    names = _bound(tree)
    for name, count in FUNCTIONS.get(file.name, {}).items():
        found = names.get(name)
        if "*" not in names and name not in names:
            if name not in PAIR or not PAIR.isdisjoint(names):
                yield f"{file} has no function {name}"
        elif isinstance(found, ast.FunctionDef) and not _takes(found.args, count):
            yield f"{file}:{found.lineno}: {name} is called with {count} arguments, which its parameters do not take"
    for name in CONSTANTS.get(file.name, ()):
        if "*" not in names and name not in names:
            yield f"{file} has no table {name}"


def _bound(tree: ast.Module) -> dict[str, ast.stmt]:
    """The names at the top of a module; "*" where it imports all of another one."""
    names: dict[str, ast.stmt] = {}
    for statement in ast.walk(tree):
        if isinstance(statement, ast.FunctionDef | ast.ClassDef) and statement in tree.body:
            names[statement.name] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: statement for alias in statement.names}
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {each.id: statement for each in targets if isinstance(each, ast.Name)}
    return names


def _takes(arguments: ast.arguments, count: int) -> bool:
    """Whether a function can be called with so many arguments by position."""
    most = len(arguments.posonlyargs) + len(arguments.args)
    keywords = [default for default in arguments.kw_defaults if default is None]
    return most - len(arguments.defaults) <= count and (count <= most or arguments.vararg is not None) and not keywords


def _config_mistakes(name: str, cls: type[Algorithm], file: Path) -> list[str]:
    place = f"{file}: {cls.__name__}"
    mistakes = [f"{place}.{what}" for what in (*_constant_mistakes(name, cls), *_method_mistakes(cls))]
    if mistakes:
        return mistakes
    own, wrong = _called(f"{place}()", cls)
    if wrong:
        return [f"{wrong}; every field needs a default"]
    for with_teacher in (True, False):
        metrics, wrong = _called(f"{place}.metrics({with_teacher})", own.metrics, with_teacher)
        mistakes += [wrong] if wrong else [f"{place}.{what}" for what in _metric_mistakes(metrics)]
    if mistakes:
        return [*dict.fromkeys(mistakes)]
    layout, wrong = _called(f"{place}.layout({BLOCK_SIZE})", own.layout, BLOCK_SIZE)
    if wrong:
        return [wrong]
    if not isinstance(layout, Layout):
        return [f"{place}.layout({BLOCK_SIZE}) returned {layout!r}; expected a Layout (ops/lib/drafts/layout.py)"]
    if layout.proposals != BLOCK_SIZE - 1:
        return [
            f"{place}.layout({BLOCK_SIZE}) has {layout.proposals} slots that predict; expected {BLOCK_SIZE - 1}: a "
            "block's tokens without the anchor"
        ]
    config, wrong = _called(f"{place}.mistakes", draft_config, own)
    if wrong:
        return [wrong]
    return [*_contract_mistakes(place, config), *_size_mistakes(place, config)]


def _constant_mistakes(name: str, cls: type[Algorithm]) -> Iterator[str]:
    found = {each: getattr(cls, each, None) for each in ("name", "architecture", "engine", "source")}
    for each, value in found.items():
        if not isinstance(value, str):
            yield f"{each}: expected a string as a class variable"
    if isinstance(found["name"], str) and found["name"] != name:
        yield f'name: it is "{found["name"]}"; expected the name of the folder, "{name}"'


def _metric_mistakes(metrics: object) -> Iterator[str]:
    if not isinstance(metrics, tuple) or not all(isinstance(metric, str) for metric in metrics):
        yield f"metrics returned {metrics!r}; expected a tuple of strings"
        return
    for metric in metrics:
        if metric in LOGGED or metric.startswith(LOGGED_OF_SLOTS):
            yield f'metrics: "{metric}" is a metric of every training: rename it'
    if len(set(metrics)) < len(metrics):
        yield "metrics: a name stands there twice"


def _method_mistakes(cls: type[Algorithm]) -> Iterator[str]:
    for name, count in METHODS.items():
        method = getattr(cls, name, None)
        if not callable(method):
            yield f"{name}: this method is missing"
            continue
        given: Sequence[None] = [None] * (count + (not inspect.ismethod(method)))  # a classmethod has its class
        try:
            inspect.signature(method).bind(*given)
        except TypeError as error:
            yield f"{name}: it is called with {count} argument: {error}"


def _contract_mistakes(place: str, config: DraftConfig) -> Iterator[str]:
    """config.json holds the algorithm, and gives it back."""
    serving, wrong = _called(f"{place}.to_serving", to_serving, config)
    if wrong:
        yield wrong
        return
    read, wrong = _called(f"{place}.from_serving", from_serving, serving)
    if wrong:
        yield wrong
    elif read != config:
        yield f"{place}.from_serving makes {read.algorithm} of what to_serving wrote of {config.algorithm}"
    shapes, wrong = _called("contract.py: shapes", lambda: part_of(config.algorithm, "contract:shapes")(serving))
    if wrong:
        yield wrong
    elif not isinstance(shapes, dict):
        yield f"contract.py: shapes returned {shapes!r}; expected a dict of tuples by the names of tensors"


def _size_mistakes(place: str, config: DraftConfig) -> Iterator[str]:
    for name in ("parameters", "slot_floats", "slot_flops"):
        value, wrong = _called(f"{place}.{name}", getattr(config.algorithm, name), config)
        if wrong:
            yield wrong
        elif not isinstance(value, int | float):
            yield f"{place}.{name} returned {value!r}; expected a number"


def _options_mistakes(cls: type | None, file: Path) -> Iterator[str]:
    if cls is None:
        return
    fields = {each.name for each in attrs.fields(cls)}
    for name in ("base", "needs_teacher", "sizes"):
        if name not in fields and not hasattr(cls, name):
            yield f"{file}: {cls.__name__} has no {name} (docs/drafts.md)"


def _called(what: str, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    """What the user's code returns, or what it raised."""
    try:
        return function(*arguments), ""
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return None, f"{place_in(error)}{what}: {type(error).__name__}: {error}"
