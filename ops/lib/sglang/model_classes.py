"""What SGLang's model classes keep of their layers, read from their source: importing them would load torch and CUDA.

A class keeps the inputs of layers by a method for DFLASH, or by one for EAGLE-3 that dflow can use in its place. The
installed version decides, so no list of architectures is kept here.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

from ops.lib.sglang.version import installed_version
from ops.lib.target.quantised import has_fp8_blocks
from ops.lib.vision.family_config import is_qwen

SETTER, EAGLE_SETTER = "set_dflash_layers_to_capture", "set_eagle3_layers_to_capture"
Way = Literal["hook", "patch", "none"]
PACKAGE = "sglang.srt.models"
# What loses the scales of FP8 blocks: a parameter of this name exists only where one scale is for a whole weight.
OF_SCALES, RENAMED = "name.endswith('.weight_scale_inv')", "name.replace('.weight_scale_inv', '.weight_scale')"


@frozen
class ModelClass:
    """The class with which the installed SGLang loads a target, and how it keeps the inputs of its layers.

    name: "" where SGLang has no class of its own for the target. way: "hook" by its own method for DFLASH, "patch" by a
    method that dflow adds, "none" not at all. loses_scales: whether it loads no scales of FP8 blocks.
    """

    name: str
    way: Way
    loses_scales: bool = False

    @property
    def sentence(self) -> str:
        """A sentence on whether the installed SGLang serves a draft for this target."""
        engine = f"SGLang {installed_version()}"
        if not self.name:
            return f"{engine} has no model class of its own for it, and serves no draft for it"
        return {
            "hook": f"{engine} captures and serves it as its {self.name}, by its own hook",
            "patch": f"{engine} captures and serves it as its {self.name}, by a method that dflow adds",
            "none": f"{engine} keeps no hidden states of layers in its {self.name}, so it serves no draft for it",
        }[self.way]


def served_class(config: Mapping[str, Any]) -> ModelClass | None:
    """The class for a checkpoint's config.json; None without SGLang.

    Of `architectures`, SGLang takes the first that it has a class for.
    """
    folder = models_folder()
    if folder is None:
        return None
    for architecture in config.get("architectures") or ():
        file = _registered(folder).get(architecture)
        if file is not None:
            found = _Class.of(file, architecture)
            if found is None:
                return ModelClass(architecture, "none")
            loses = found.loses_scales() or (found.delegates_loading() and _text_loses_scales(folder, config))
            return ModelClass(architecture, found.way(), loses)
    return ModelClass("", "none")


def _text_loses_scales(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether the class of a wrapper's language model loses the scales of FP8 blocks: by the architectures of its
    text_config, else by its model_type, as in LlamaForCausalLM.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    wanted = [str(name).lower() for name in text.get("architectures") or ()]
    wanted = wanted or [f"{str(text.get('model_type')).replace('_', '')}forcausallm"]
    classes = (_Class.of(file, name) for name, file in _registered(folder).items() if name.lower() in wanted)
    return any(found.loses_scales() for found in classes if found is not None)


def unserved(config: Mapping[str, Any]) -> str | None:
    """Why the installed SGLang serves no draft for a target, by its class and weights; None if it does, or without
    SGLang.
    """
    found = served_class(config)
    if found is None:
        return None
    kind = f"the target's model_type is {config.get('model_type')}"
    if found.way == "none":
        return f"{kind}: {found.sentence}"
    if found.loses_scales and has_fp8_blocks(config):
        return (
            f"{kind}, with scales of FP8 blocks (weight_scale_inv), which SGLang {installed_version()} does not load "
            f"in its {found.name}, so its states are no numbers; it runs the checkpoint that this one was made from"
        )
    return None


def not_run(config: Mapping[str, Any]) -> str | None:
    """Why dflow itself does not run a target in SGLang, to capture features or to check a draft; None if it does.

    A target that is not Qwen's and has a vision tower is not run without SGLang either.
    """
    if reason := unserved(config):
        return reason
    if not config.get("vision_config") or is_qwen(config):
        return None
    return f"the target ({config.get('model_type')}) has a vision tower, of which only Qwen's are run in SGLang"


def models_folder() -> Path | None:
    """The folder of the installed SGLang's models, found without importing SGLang; None without it."""
    found = importlib.util.find_spec("sglang")
    for place in (found.submodule_search_locations if found else None) or ():
        folder = Path(place).joinpath(*PACKAGE.split(".")[1:])
        if folder.is_dir():
            return folder
    return None


def architectures(folder: Path) -> list[str]:
    """All architectures that the models in the folder are registered for."""
    return sorted(_registered(folder))


@cache
def _registered(folder: Path) -> Mapping[str, Path]:
    """Architecture -> the file that registers a class of this name, by its EntryClass."""
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.py")):
        entry = re.search(rb"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", file.read_bytes(), re.MULTILINE)
        if entry:
            found |= {name.decode(): file for name in re.findall(rb"\w+", entry[1])}
    return found


@frozen
class _Class:
    """A class definition in a file of SGLang's models."""

    file: Path
    node: ast.ClassDef

    @classmethod
    def of(cls, file: Path, name: str) -> _Class | None:
        """The class of this name in a file, or in the file of SGLang's models that it is imported from."""
        for node in _statements(file):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return cls(file, node)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{PACKAGE}."):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return cls.of(file.with_name(f"{str(node.module).rpartition('.')[2]}.py"), alias.name)
        return None

    def lineage(self) -> Iterator[_Class]:
        """The class, and those of SGLang's models that it inherits from, in the order of look-up."""
        yield self
        for base in self.node.bases:
            if isinstance(base, ast.Name) and (found := _Class.of(self.file, base.id)):
                yield from found.lineage()

    def method(self, name: str) -> ast.FunctionDef | None:
        """The method of this name; of two in a class the last one, as in Python."""
        for each in self.lineage():
            own = [node for node in each.node.body if isinstance(node, ast.FunctionDef) and node.name == name]
            if own:
                return own[-1]
        return None

    def loses_scales(self) -> bool:
        """Whether the class, or one that it inherits from, renames the scales of FP8 blocks in whatever it loads."""
        return any(
            isinstance(node, ast.If) and ast.unparse(node.test) == OF_SCALES and RENAMED in ast.unparse(node.body[0])
            for each in self.lineage()
            for node in ast.walk(each.node)
        )

    def delegates_loading(self) -> bool:
        """Whether the class hands weights to `load_weights` of a part, such as the language model of a wrapper."""
        return any(
            isinstance(node, ast.Call) and re.fullmatch(r"self\.\w+\.load_weights", ast.unparse(node.func))
            for each in self.lineage()
            for node in ast.walk(each.node)
        )

    def way(self) -> Way:
        setter = self.method(SETTER)
        if setter is not None and all(part is None or part.method(SETTER) for part in self._asked(setter)):
            return "hook"
        return "patch" if setter is not None or self.method(EAGLE_SETTER) is not None else "none"

    def _asked(self, setter: ast.FunctionDef) -> Iterator[_Class | None]:
        """The classes of the attributes whose method of the same name the setter calls; None for one not found."""
        for node in ast.walk(setter):
            if isinstance(node, ast.Call) and (
                match := re.fullmatch(rf"self\.(\w+)\.{SETTER}", ast.unparse(node.func))
            ):
                yield self._attribute(match[1])

    def _attribute(self, name: str) -> _Class | None:
        """The class of self.NAME, as the first `__init__` of the lineage makes it that does: a class by its name, or by
        that of an argument, whose default is the first one of the lineage.
        """
        defaults: dict[str, tuple[Path, str]] = {}
        for each in self.lineage():
            for init in each.node.body:
                if not (isinstance(init, ast.FunctionDef) and init.name == "__init__"):
                    continue
                for argument, value in _defaults(init):
                    defaults.setdefault(argument, (each.file, value))
                made = _made(init, name)
                if made is not None:
                    return _Class.of(*defaults.get(made, (each.file, made)))
        return None


def _defaults(init: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """The arguments whose default is a name, with that name."""
    given = init.args.defaults
    for argument, value in zip(init.args.args[len(init.args.args) - len(given) :], given, strict=True):
        if isinstance(value, ast.Name):
            yield argument.arg, value.id


def _made(init: ast.FunctionDef, attribute: str) -> str | None:
    """The name of what `__init__` calls for self.ATTRIBUTE; None if it sets none by a call."""
    for node in ast.walk(init):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == f"self.{attribute}"
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
        ):
            return node.value.func.id
    return None


@cache
def _statements(file: Path) -> Sequence[ast.stmt]:
    return ast.parse(file.read_bytes()).body if file.is_file() else ()
