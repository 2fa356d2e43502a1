"""What transformers' config classes say of a model type, read from their source: importing them would load torch.

A published config.json may lack whatever its class has as a default: those of Gemma 3 name neither a vocabulary nor
heads, and a tied head is the default of some classes and not of others.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from attrs import field, frozen

# Tables of modeling_auto.py: the types that have a model with a head for the next token.
CAUSAL, IMAGE_TEXT = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"

# In the file of a model: layers by that name, or classes of another model, which may have them.
LAYERS_OR_ANOTHER = re.compile(r"self\.layers\b|^from \.\.\w+\.modeling_|\bAutoModel", re.MULTILINE)


@frozen
class ConfigClass:
    """A config class: the defaults of its fields, other names of them, and the class of its text_config."""

    defaults: Mapping[str, Any] = field(factory=dict)
    aliases: Mapping[str, str] = field(factory=dict)
    text_class: str | None = None


def has_language_model(model_type: Any) -> bool:
    """Whether transformers has a class for this model type that predicts the next token."""
    return any(str(model_type) in _auto_table("modeling_auto", name) for name in (CAUSAL, IMAGE_TEXT))


def is_causal_class(model_type: str) -> bool:
    """Whether AutoModelForCausalLM has a class for this model type, and not only AutoModelForImageTextToText."""
    return model_type in _auto_table("modeling_auto", CAUSAL) or model_type not in _auto_table(
        "modeling_auto", IMAGE_TEXT
    )


def lacks_layers(model_type: Any) -> bool:
    """Whether the class of a language model surely keeps no `layers`, by its file, which takes no model of another."""
    name = str(model_type)
    if name not in _auto_table("modeling_auto", CAUSAL):
        return False
    module = _module(name)
    file = models_folder() / module / f"modeling_{module}.py"
    return file.is_file() and not LAYERS_OR_ANOTHER.search(file.read_text("utf-8"))


def class_of(model_type: Any) -> ConfigClass:
    """The config class of a model type; an empty one where transformers has none."""
    name = str(model_type)
    return class_named(name, _auto_table("auto_mappings", "CONFIG_MAPPING_NAMES").get(name))


@cache
def class_named(model_type: str, name: str | None) -> ConfigClass:
    if name is None:
        return ConfigClass()
    module = _module(model_type)
    file = models_folder() / module / f"configuration_{module}.py"
    if not file.is_file():
        return ConfigClass()
    classes = {node.name: node for node in _parsed(file).body if isinstance(node, ast.ClassDef)}
    fields: dict[str, ast.expr] = {}
    for node in _lineage(name, classes):
        fields |= dict(_assigned(node))
    parts = fields.get("sub_configs")
    named = zip(parts.keys, parts.values, strict=True) if isinstance(parts, ast.Dict) else ()
    text = next((ast.unparse(value) for key, value in named if key and ast.unparse(key) == "'text_config'"), None)
    plain = {name: _value(value) for name, value in fields.items() if _is_plain(value)}
    return ConfigClass(plain, plain.get("attribute_map") or {}, text)


def _module(model_type: str) -> str:
    """The name of a model type's folder and files."""
    named = _auto_table("auto_mappings", "SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type)
    return named or model_type.replace("-", "_")


def _lineage(name: str, classes: Mapping[str, ast.ClassDef]) -> Iterator[ast.ClassDef]:
    """The class and those of its file that it inherits from, the first ancestor first."""
    if name not in classes:
        return
    for base in classes[name].bases:
        yield from _lineage(ast.unparse(base), classes)
    yield classes[name]


def _assigned(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            yield statement.target.id, statement.value
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            yield statement.targets[0].id, statement.value


def _is_plain(value: ast.expr) -> bool:
    try:
        _value(value)
    except ValueError:
        return False
    return True


def _value(value: ast.expr) -> Any:
    """A literal, or the product of two, such as 4096 * 32. Raises ValueError for anything else."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return ast.literal_eval(value.left) * ast.literal_eval(value.right)
    return ast.literal_eval(value)


@cache
def _auto_table(module: str, name: str) -> Mapping[str, str]:
    """A table from model types to names, OrderedDict([(type, name), ...]) in the source; without other entries."""
    file = models_folder() / "auto" / f"{module}.py"
    for node in _parsed(file).body if file.is_file() else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name and isinstance(node.value, ast.Call):
            rows = node.value.args[0]
            pairs = [row.elts for row in rows.elts if isinstance(row, ast.Tuple)] if isinstance(rows, ast.List) else []
            return {ast.literal_eval(key): ast.literal_eval(value) for key, value in pairs if _is_plain(value)}
    return {}


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def models_folder() -> Path:
    """The folder of transformers' models, which is found without importing transformers."""
    found = importlib.util.find_spec("transformers")
    places = (found.submodule_search_locations if found else None) or [""]
    return Path(places[0]) / "models"
