"""What is wrong with an own algorithm's files that import torch, found in a process of its own.

    python -m ops.lib.drafts.own_modules FOLDER BLOCK_SIZE LAYERS FIELDS

FIELDS: of the algorithm's config, as JSON. All files are imported, and a draft is made on the "meta" device, which
holds no numbers; its tensors are compared with the contract's. Prints the mistakes as a list in JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsl.draft_folders import FILES, INIT, use_draft_folders
from dsl.errors import ConfigError
from dsl.named_function import named_function
from ops.lib.drafts.algorithms import algorithm_class, part_of, place_in
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.own_folder import draft_config

AROUND = "exactly two entries, what goes around the attention, then what goes around the MLP, or none"


def mistakes_here(folder: Path, block_size: int, layers: int, fields: Mapping[str, Any]) -> list[str]:
    """Each as "file: what is wrong", of a draft of this block size and number of layers; no other folder is known."""
    use_draft_folders([folder / INIT])
    mistakes = [mistake for file in FILES if (mistake := _import_mistake(folder, file))]
    if mistakes:
        return list(dict.fromkeys(mistakes))  # one file may import another
    try:
        config = draft_config(algorithm_class(folder.name)(**fields), block_size, layers)
    except ConfigError:  # sizes that fit the target's, perhaps, and not these
        return []
    try:
        return _draft_mistakes(folder, config)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return [_raised(error, folder / "modules.py")]


def _import_mistake(folder: Path, file: str) -> str:
    try:
        named_function(f"{folder.name}.{file.removesuffix('.py')}:__name__")
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return _raised(error, folder / file)
    return ""


def _raised(error: Exception, file: Path) -> str:
    return f"{place_in(error) or f'{file}: '}{type(error).__name__}: {error}"


def _draft_mistakes(folder: Path, config: DraftConfig) -> list[str]:
    import torch

    from ops.lib.drafts.backbone.contract_fields import expected_shapes
    from ops.lib.drafts.backbone.hooks import Around, Drawn
    from ops.lib.drafts.backbone.model import DraftModel
    from ops.lib.drafts.dflash.config import Dflash

    file, algorithm = folder / "modules.py", config.algorithm
    with torch.device("meta"):
        around = part_of(algorithm, "modules:around_sublayers")(config)
        heads = part_of(algorithm, "modules:heads")(config)
        plain = DraftModel(draft_config(Dflash(), config.block_size, config.num_hidden_layers))
    mistakes = []
    for name, found, kind, beside in (
        ("around_sublayers", around, Around, plain.layers[0]),
        ("heads", heads, Drawn, plain),
    ):
        if not isinstance(found, dict):
            mistakes.append(f"{file}: {name} returned {type(found).__name__}; expected a dict of {kind.__name__}")
            continue
        wrong = [key for key, module in found.items() if not isinstance(module, kind)]
        mistakes += [f'{file}: {name}, "{key}": expected a {kind.__name__} (backbone/hooks.py)' for key in wrong]
        taken = [key for key in found if hasattr(beside, key)]
        mistakes += [f'{file}: {name}, "{key}": the backbone has a part of this name: rename it' for key in taken]
    if isinstance(around, dict) and len(around) not in (0, 2):
        mistakes.append(f"{file}: around_sublayers returned {len(around)} entries; expected {AROUND}")
    if mistakes:
        return mistakes
    with torch.device("meta"):
        made = {name: tuple(tensor.shape) for name, tensor in DraftModel(config).state_dict().items()}
    said = expected_shapes(to_serving(config))
    differing = [name for name in [*made, *said] if made.get(name) != said.get(name)]
    return [
        f"{folder / 'contract.py'} says {_shape(said.get(name))} of the tensor {name}, modules.py makes "
        f"{_shape(made.get(name))}"
        for name in dict.fromkeys(differing)
    ]


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str([*shape])


if __name__ == "__main__":
    print(json.dumps(mistakes_here(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))))
