"""What is wrong with a checkpoint: found by names of files, its JSON and the headers of its shards. Loads no torch.

A safetensors file is the length of its header (8 bytes, little endian), the header as JSON, and the tensors, at the
"data_offsets" that the header gives: so it says how long the file has to be.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from dsl.errors import ConfigError, DataError
from dsl.files import parse_json
from ops.lib.data.checkpoint_code import ADAPTER, check_code, check_no_adapter, check_places, check_reads
from ops.lib.data.files import LARGEST_JSON, check_json_files, read_object
from ops.lib.target.checkpoint_files import INDEX, SINGLE, check_weights, weight_files
from ops.lib.target.head_settings import head_settings
from ops.lib.target.quantised import BY_SGLANG, dequantising_mistake, method_of, numbers_of
from ops.lib.target.sizes import TargetSizes, check_tables, named_dtype
from ops.lib.target.stored_weights import StoredTensor, UnknownEnd, find_ends, head_bias, listed, weights_mistakes
from ops.lib.target.token_ids import check_added_tokens, check_ends
from ops.lib.target.tokenizer_check import tokenizer_warnings
from ops.lib.vision.config_classes import lacks_layers
from ops.lib.vision.family_config import check_family_config, check_model_type, is_qwen, text_part, with_defaults
from ops.lib.vision.processor_files import chosen_limits, image_settings, processor_mistakes, template_texts
from ops.lib.vision.template_kinds import pinned_note, read_day, template_warnings, thought_warning, with_day

State = tuple[tuple[str, int, int, int], ...]
POINTER = b"version https://git-lfs"
LONGEST_HEADER = LARGEST_JSON  # bytes; the safetensors library takes twice as many
AGAIN = "copy or download it again"


def loading_mistakes(checkpoint: str, trust_remote_code: bool) -> list[str]:
    """Sentences on why a checkpoint cannot be loaded, with remedies; empty for a missing path, which may be
    a model id.
    """
    path = Path(checkpoint)
    return list(_loading_mistakes(path, trust_remote_code, _state(path))) if path.exists() else []


@lru_cache(maxsize=8)  # several hooks of a plan ask, and a tokenizer.json has ten megabytes
def _loading_mistakes(path: Path, trust_remote_code: bool, _state: State) -> tuple[str, ...]:
    mistakes = [*checkpoint_mistakes(path), *_raised(check_code, path, trust_remote_code)]
    if trust_remote_code:
        mistakes += _raised(check_places, path)
    return tuple(dict.fromkeys(mistakes))


def _state(path: Path) -> State:
    """A description of a directory's files that changes when they do."""
    files = sorted([*path.iterdir(), *path.glob("*/*.jinja")]) if path.is_dir() else [path]
    status = ((file, file.stat() if file.exists() else file.lstat()) for file in files)
    return tuple((str(file), each.st_mtime_ns, each.st_size, each.st_ino) for file, each in status)


def draft_folder_mistakes(path: Path) -> list[str]:
    """Sentences on why a directory does not hold a draft's files. A draft has no code and no processor."""
    return _files_mistakes(path, "draft", _json_mistakes)


def checkpoint_mistakes(path: Path) -> list[str]:
    """Sentences on why a directory cannot be a target, apart from trust in its code."""
    mistakes = _files_mistakes(path, "target", lambda path: _json_mistakes(path) or _config_mistakes(path))
    return mistakes + stored_mistakes(path)


def _files_mistakes(path: Path, kind: str, check_json: Callable[[Path], list[str]]) -> list[str]:
    """Mistakes in the files of a directory: pointers of git-lfs, JSON files and weights.

    kind: what the files are for. check_json: not called where a JSON file is only a pointer.
    """
    other = _something_else(path, kind)
    if other:
        return other
    pointers = _pointers(path)
    mistakes = _pointer_mistakes(path, pointers)
    if not any(file.suffix == ".json" for file in pointers):
        mistakes += check_json(path)
    return mistakes + _weights_mistakes(path, pointers, kind)


def stored_mistakes(path: Path) -> list[str]:
    """Mistakes in the weights, by a readable config.json and readable headers."""
    try:
        config = with_defaults(read_object(path / "config.json"))
        files = [file for file in weight_files(path) if not _raised(tensor_headers, file)]
    except (OSError, DataError):
        return []
    return weights_mistakes(path, config, {name: each for file in files for name, each in tensor_headers(file).items()})


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors that transformers loads, by name. Raises DataError as `weight_files` and `tensor_headers`."""
    return {name: each for file in weight_files(directory) for name, each in tensor_headers(file).items()}


def running_mistake(config: Mapping[str, Any], directory: Path | None, instead: str = BY_SGLANG) -> str:
    """A text on why transformers cannot run a target with quantised weights; empty if it can.

    directory: its checkpoint, None where that is not here yet. instead: what to do without running it. Raises
    DataError as `stored_tensors`.
    """
    known = method_of(config) is not None and directory is not None
    return dequantising_mistake(config, stored_tensors(directory) if known and directory is not None else {}, instead)


def quantised_bytes(config: Mapping[str, Any], directory: Path) -> int | None:
    """The bytes of the quantised weights in the files; None for unquantised ones, or where there are no files."""
    if method_of(config) is None:
        return None
    with suppress(OSError, DataError):  # reported as mistakes of the files
        return sum(tensor.end - tensor.start for tensor in stored_tensors(directory).values()) or None
    return None


def sizes_in(directory: Path, config: Mapping[str, Any]) -> TargetSizes:
    """Sizes of a target by its config.json with defaults, and of one that is not Qwen's by its files if they are there.

    Raises DataError as `TargetSizes.of`.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    if not is_qwen(config):
        with suppress(OSError, DataError):  # reported as mistakes of the files
            shapes = numbers_of(config, stored_tensors(directory))
    return TargetSizes.of(config, shapes or None)


def layers_mistake(directory: Path) -> str:
    """Why no draft can be fed by a checkpoint, as the source of its class says; empty for all that is measured."""
    config = with_defaults(read_object(directory / "config.json"))
    kind = text_part(config).get("model_type")
    if config.get("auto_map") or not lacks_layers(kind):
        return ""
    return (
        f'{directory}: this {kind} cannot be a target: its class in transformers has no "layers", by whose inputs a '
        "draft is fed; choose another: docs/targets.md"
    )


def ends_mistakes(directory: Path, embed_key: str | None, lm_head_key: str | None) -> dict[str, str]:
    """Why the embedding, the head or its bias is not known of a checkpoint without other mistakes, by field of
    load_target.
    """
    config = with_defaults(read_object(directory / "config.json"))
    text = text_part(config)
    if not all(isinstance(text[name], int) for name in ("vocab_size", "hidden_size")):
        return {}  # the estimate reports them
    stored = stored_tensors(directory)
    try:
        ends = find_ends(directory, config, stored, embed_key, lm_head_key)
    except UnknownEnd as error:
        return {error.field: str(error)}
    mistakes = _raised(head_bias, directory, stored, ends, head_settings(config).bias)
    return {"checkpoint": mistakes[0]} if mistakes else {}


def processor_folder_mistakes(processor: str | None, trust_remote_code: bool = False) -> list[str]:
    """Sentences on why a processor cannot be loaded from a directory; empty for a built-in one or a model id."""
    if processor is None or not Path(processor).is_dir():
        return []
    directory = Path(processor)
    mistakes = _processor_mistakes(directory, _state(directory))
    return mistakes or (_raised(check_places, directory) if trust_remote_code else [])


@lru_cache(maxsize=8)
def _processor_mistakes(directory: Path, _state: State) -> list[str]:
    pointers = _pointers(directory)
    if pointers:
        return _pointer_mistakes(directory, pointers)
    return _json_mistakes(directory) or processor_mistakes(directory)


def pixel_mistakes(processor: str | None, min_pixels: int | None, max_pixels: int | None) -> dict[str, str]:
    """The conflict between a node's pixel limits and its processor's files, by field; empty for a model id."""
    if processor is None or not Path(processor).is_dir():
        return {}
    mistakes = _raised(chosen_limits, processor, *image_settings(Path(processor)), min_pixels, max_pixels)
    return {"max_pixels" if min_pixels is None else "min_pixels": mistakes[0]} if mistakes else {}


def chat_template_mistakes(file: str | None) -> dict[str, str]:
    """A mistake, by field, if the chat_template file is no template; empty without a file, which is
    reported elsewhere.
    """
    if file is None or not Path(file).exists():
        return {}
    from ops.lib.vision.chat_template import read_chat_template  # loads jinja2

    mistakes = _raised(read_chat_template, file)
    return {"chat_template": mistakes[0]} if mistakes else {}


def thinking_mistakes(
    enable_thinking: bool | None, chat_template: str | None, processor: str | None, builtin: str = ""
) -> dict[str, str]:
    """A mistake, by field, if no chat template reads enable_thinking: the file's, else the directory's,
    else built-in.
    """
    if enable_thinking is None or (chat_template is not None and not Path(chat_template).exists()):
        return {}
    from ops.lib.vision.chat_template import check_thinking, read_chat_template  # loads jinja2

    if chat_template is not None:
        texts, source = [read_chat_template(chat_template) or ""], chat_template
    elif processor is not None and Path(processor).is_dir():
        texts, source = template_texts(Path(processor)), processor
    elif builtin:
        texts, source = [builtin], 'processor = "builtin"'
    else:
        return {}
    try:
        check_thinking(enable_thinking, texts, source)
    except ConfigError as error:
        return {"enable_thinking": str(error)}
    return {}


def date_mistakes(day: str | None, chat_template: str | None, checkpoint: str) -> dict[str, str]:
    """A mistake, by field, if template_date does not go with any chat template of the file or the directory."""
    if day is None:
        return {}
    mistakes = [
        _raised(with_day, text, read_day(day), checkpoint) for text in chosen_templates(chat_template, checkpoint)
    ]
    return {"template_date": mistakes[0][0]} if mistakes and all(mistakes) else {}


def template_notes(chat_template: str | None, checkpoint: str | None) -> tuple[str, ...]:
    """Warnings of what the chat template does that answers and servers depend on, and of a tokenizer that does not fit
    it; none for a model id.
    """
    texts = chosen_templates(chat_template, checkpoint)
    return (*template_warnings(texts), *_tokenizer_warnings(checkpoint, texts))


def loaded_template_notes(chat_template: str | None, checkpoint: str, day: str | None = None) -> tuple[str, ...]:
    """The notes on the chat template of a target that is loaded, in which a fixed day takes the place of today's.

    day: the one that is set, None for the default. Warnings begin with "warning: "; none for a model id.
    """
    texts = chosen_templates(chat_template, checkpoint)
    note = pinned_note(texts[0], chat_template or checkpoint) if day is None and len(texts) == 1 else ""
    of_template = template_warnings(texts) if day is None and not note else filter(None, [thought_warning(texts)])
    warnings = (*of_template, *_tokenizer_warnings(checkpoint, texts))
    return (*filter(None, [note]), *(f"warning: {each}" for each in warnings))


def _tokenizer_warnings(checkpoint: str | None, templates: list[str]) -> tuple[str, ...]:
    return () if (folder := _readable_folder(checkpoint)) is None else tokenizer_warnings(folder, templates)


def chosen_templates(chat_template: str | None, checkpoint: str | None) -> list[str]:
    """The text of the file, else those of the directory; empty for what cannot be read, which is reported elsewhere."""
    if chat_template is not None:
        file = Path(chat_template)
        return [file.read_text("utf-8", "replace")] if file.is_file() else []
    return [] if (folder := _readable_folder(checkpoint)) is None else template_texts(folder)


def _readable_folder(checkpoint: str | None) -> Path | None:
    """The directory of a checkpoint; None for a model id, or where it cannot be read, which is reported elsewhere."""
    if checkpoint is None or not Path(checkpoint).is_dir() or processor_folder_mistakes(checkpoint):
        return None
    return Path(checkpoint)


def _something_else(path: Path, kind: str) -> list[str]:
    """Sentences on what a path is instead of a checkpoint, such as GGUF weights or an empty folder. kind: what it is
    for.

    They explain everything else that is missing; empty if the path may be a checkpoint.
    """
    weights = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    quantized = path if path.suffix == ".gguf" else next(iter(sorted(path.glob("*.gguf"))), None)
    if quantized is not None and (path.is_file() or not weights):
        return [
            f"{quantized}: GGUF weights, which are converted for llama.cpp, cannot be a {kind}; use the original "
            "checkpoint, a directory with config.json and *.safetensors"
        ]
    if path.is_file():
        return [f"{path} is a file; a checkpoint is the directory with config.json and *.safetensors"]
    if (path / ADAPTER).exists():
        return _raised(check_no_adapter, path)
    if not any(path.iterdir()):
        return [f"{path}: this directory is empty; download the checkpoint into it, or name another directory"]
    if not (path / "config.json").is_file():
        return [
            f"{path}: no config.json in this {kind} directory; name the directory of a Hugging Face checkpoint, with "
            "config.json and *.safetensors"
        ]
    return []


def _json_mistakes(directory: Path) -> list[str]:
    """Mistakes for JSON files that are links out of the directory, or no JSON."""
    return _raised(check_reads, directory) or _raised(check_json_files, directory)


def _config_mistakes(directory: Path) -> list[str]:
    """Mistakes in readable JSON files: an unknown family, ids beyond the vocabulary, and what the processor lacks."""
    config = read_object(directory / "config.json")
    tables = _raised(check_tables, config)
    if tables:  # nothing else can be read of it
        return [f"{directory}: {mistake}" for mistake in tables]
    config = with_defaults(config)
    unknown = [*_raised(check_model_type, config), *_raised(named_dtype, config), *_raised(check_family_config, config)]
    return [
        *(f"{directory}: {mistake}" for mistake in unknown),
        *_raised(check_ends, directory),
        *_raised(check_added_tokens, directory),
        *processor_mistakes(directory),
    ]


def _pointers(directory: Path) -> list[Path]:
    """The files that are only git-lfs pointers to their content."""
    files = (file for file in sorted(directory.iterdir()) if file.is_file())
    return [file for file in files if _first_bytes(file, len(POINTER)) == POINTER]


def _pointer_mistakes(directory: Path, pointers: list[Path]) -> list[str]:
    if not pointers:
        return []
    names = listed([file.name for file in pointers])
    return [
        f"{directory}: pointers of git-lfs in place of {names}; run `git lfs pull` in this directory, or download the "
        "checkpoint again"
    ]


def _weights_mistakes(directory: Path, pointers: list[Path], kind: str) -> list[str]:
    shards = [file for file in sorted(directory.glob("*.safetensors")) if file.is_file() and file not in pointers]
    mistakes = [mistake for file in shards for mistake in _raised(_check_size, file)]
    if (directory / INDEX).is_file() and not (directory / SINGLE).is_file() and directory / INDEX not in pointers:
        return [*_raised(_check_shards, directory / INDEX), *mistakes]
    return [*_raised(check_weights, directory, kind), *mistakes]


def _check_shards(index: Path) -> None:
    """Check that an index names no missing files. Raises DataError."""
    named = read_object(index).get("weight_map")
    if not isinstance(named, Mapping) or not all(isinstance(name, str) for name in named.values()):
        raise DataError(f"{index}: no weight_map of tensors to files; {AGAIN}")
    shards = sorted(set(named.values()))
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing:
        raise DataError(f"{index}: {len(missing)} of {len(shards)} shards are missing: {listed(missing)}; {AGAIN}")
    elsewhere = [name for name in shards if Path(name).name != name]
    if elsewhere:
        raise DataError(f"{index}: names {elsewhere[0]}, which is no file of this directory; {AGAIN}")


def _check_size(file: Path) -> None:
    """Check that a shard has the size that its header says. Raises DataError."""
    expected, size = _expected_size(file), file.stat().st_size
    if size < expected:
        raise DataError(f"{file}: truncated, {size:,} of {expected:,} bytes; {AGAIN}")
    if size > expected:
        raise DataError(f"{file}: damaged, {size:,} bytes, but {expected:,} by its header; {AGAIN}")


def _expected_size(file: Path) -> int:
    """The bytes of a safetensors file by its header. Raises DataError as `_header`."""
    header = _header(file)
    try:
        ends = [operator.index(tensor["data_offsets"][1]) for tensor in header.values()]
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        raise _damaged(file) from None
    return 8 + int.from_bytes(_first_bytes(file, 8), "little") + max(ends, default=0)


def tensor_headers(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. Raises DataError as `_header`."""
    header, first = _header(file), 8 + int.from_bytes(_first_bytes(file, 8), "little")
    try:
        found = {}
        for name, tensor in header.items():
            start, end = map(operator.index, tensor["data_offsets"])
            shape = tuple(map(operator.index, tensor["shape"]))
            found[name] = StoredTensor(file, name, shape, str(tensor["dtype"]), first + start, first + end)
        return found
    except (TypeError, ValueError, KeyError):
        raise _damaged(file) from None


def stored_bytes(file: Path, name: str, most: int) -> bytes:
    """The bytes of a tensor in a safetensors file. Raises DataError as `_header`, and for more than `most` bytes."""
    try:
        begin, end = map(operator.index, _header(file)[name]["data_offsets"])
    except (TypeError, ValueError, KeyError):
        raise _damaged(file) from None
    if not 0 <= begin <= end <= begin + most:
        raise _damaged(file)
    with file.open("rb") as opened:
        opened.seek(8 + int.from_bytes(opened.read(8), "little") + begin)
        return opened.read(end - begin)


def _header(file: Path) -> dict[str, Any]:
    """The tensors by the header of a safetensors file. Raises DataError if that is damaged or truncated."""
    length = int.from_bytes(_first_bytes(file, 8), "little")
    start = _first_bytes(file, 8 + min(length, LONGEST_HEADER))
    if len(start) < 8 or (length <= LONGEST_HEADER and len(start) < 8 + length):
        raise DataError(f"{file}: truncated inside its header, {len(start):,} bytes; {AGAIN}")
    try:
        header = dict(parse_json(start[8:]))
    except (TypeError, ValueError):
        raise _damaged(file) from None
    header.pop("__metadata__", None)
    return header


def _damaged(file: Path) -> DataError:
    return DataError(f"{file}: damaged, its header is not that of a safetensors file; {AGAIN}")


def _first_bytes(file: Path, count: int) -> bytes:
    with file.open("rb") as opened:
        return opened.read(count)


def _raised(check: Callable[..., object], *arguments: object) -> list[str]:
    """The message of a check's DataError, if it raises one."""
    try:
        check(*arguments)
    except DataError as error:
        return [str(error)]
    return []
