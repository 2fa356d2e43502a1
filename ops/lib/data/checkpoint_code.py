"""Code that a checkpoint may bring along, and what of it is refused. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsl.errors import DataError
from ops.lib.data.files import read_object, shown_json

ADAPTER = "adapter_config.json"
NAMING_CODE = ("config.json", "tokenizer_config.json", "*processor*.json")  # by auto_map
NAMING_FILES = ("tokenizer_config.json", "special_tokens_map.json")
READ = (".json", ".jinja", ".txt", ".model", ".py")  # what transformers reads of a directory besides weights
ATTENTION = ("_attn_implementation", "attn_implementation")


def check_code(directory: Path, trust_remote_code: bool) -> None:
    """Check that a target or draft brings no untrusted code, and none from elsewhere. Raises DataError.

    For an unknown architecture, SGLang runs the code that auto_map in config.json names even without trust. With trust,
    transformers fetches code and kernels from any repository that a config names.
    """
    check_reads(directory)
    config = read_settings(directory / "config.json")
    if config.get("transformers_weights"):
        raise DataError(f"{directory}/config.json: transformers_weights names other weights than those here; remove it")
    named = dict(_places(config.get("auto_map")))
    if named and not trust_remote_code:
        raise DataError(
            f"{directory}/config.json: auto_map names code of the checkpoint's own ({', '.join(named)}), "
            "which only runs with trust_remote_code = true; read the *.py files first"
        )
    if trust_remote_code:
        check_places(directory)
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for name in ATTENTION:
            if "/" in str(part.get(name, "")):
                raise DataError(
                    f'{directory}/config.json: {name} = "{part[name]}" is a kernel of another repository, which could '
                    "run any code; remove it"
                )
    check_no_adapter(directory)


def check_no_adapter(directory: Path) -> None:
    """Refuse a LoRA adapter: it names a base model, which transformers would download. Raises DataError."""
    if not (directory / ADAPTER).exists():
        return
    base = read_settings(directory / ADAPTER).get("base_model_name_or_path")
    named = f" {shown_json(base)}" if base else ""
    tokenizer = "this directory" if any(directory.glob("tokenizer*")) else "the base model"
    raise DataError(
        f"{directory}/{ADAPTER}: this is an adapter, not a model; merge it into its base model{named} "
        f"(`merge_and_unload` of peft), save the result with the tokenizer of {tokenizer}, and use that"
    )


def check_link(file: Path, directory: Path) -> None:
    """Refuse a link that leads out of a checkpoint, as a stranger's could copy a private file. Raises DataError.

    Weights may lie anywhere, since no private file can be read as safetensors. Hugging Face's cache has its files in
    blobs/, beside snapshots/<revision>/.
    """
    if not file.is_symlink() or file.suffix == ".safetensors":
        return
    folder, leads_to = directory.resolve(), file.resolve()
    own = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    if not any(leads_to.is_relative_to(place) for place in own):
        raise DataError(
            f"{file}: a link out of the checkpoint, to {leads_to}; replace it by the file if that belongs to it"
        )


def check_reads(directory: Path) -> None:
    """Check that no text file of a model directory leads out of it when it is loaded. Raises DataError.

    It might do so by a link, or by a path in a tokenizer's JSON, which transformers prefers to files that it finds.
    """
    for file in sorted(directory.rglob("*")):
        if file.suffix in READ or file.is_dir():
            check_link(file, directory)
    for name in NAMING_FILES:
        for key, value in read_settings(directory / name).items():
            for path in _paths(key, value):
                if isinstance(path, str) and _is_outside(path, directory):
                    raise DataError(f"{directory / name}: {key} names {path}, which lies outside; remove it")


def _paths(key: str, value: Any) -> Sequence[Any]:
    """The values in a member of a tokenizer's JSON that may name files."""
    if key == "init_inputs" and isinstance(value, list):
        return value
    return [value] if key.endswith("_file") else []


def _is_outside(path: str, directory: Path) -> bool:
    """Whether a path names an existing file or folder outside the directory."""
    try:
        found = Path(path).resolve()
        return found.exists() and not found.is_relative_to(directory.resolve())
    except (OSError, ValueError):
        return False


def check_places(directory: Path) -> None:
    """Check that no config in a directory names code of another repository, which transformers would run.

    Raises DataError.
    """
    for file in sorted({file for pattern in NAMING_CODE for file in directory.glob(pattern)}):
        elsewhere = [each for _, each in _places(read_settings(file).get("auto_map")) if _is_elsewhere(each, directory)]
        if elsewhere:
            raise DataError(
                f"{directory}: auto_map of {file.name} names code of another repository ({', '.join(elsewhere)}); "
                f"copy its *.py files beside {file.name} and remove the part before '--'"
            )


def read_settings(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint; empty if there is no such file. Raises DataError for anything else."""
    return read_object(file) if file.is_file() else {}


def _places(auto_map: Any) -> Iterator[tuple[str, str]]:
    """Pairs of a class's role and its "module.class" in an auto_map. A tokenizer may list two, the slow and
    the fast.
    """
    members = auto_map.items() if isinstance(auto_map, Mapping) else [("AutoTokenizer", auto_map)] if auto_map else ()
    for name, places in members:
        for place in places if isinstance(places, list) else [places]:
            if place is not None:
                yield str(name), str(place)


def _is_elsewhere(place: str, directory: Path) -> bool:
    return "--" in place and not place.startswith(f"{directory}--")
