"""What is wrong with an own algorithm's files that import torch, found in a process of its own.

    python -m ops.lib.drafts.own_modules FOLDER BLOCK_SIZE LAYERS TRAINING

TRAINING: a `Training`, as JSON. All files are imported, and a draft is made on the "meta" device, which holds no
numbers; its tensors are compared with the contract's. Then its functions are called once, of a narrow draft. Prints the
mistakes as a list in JSON.

    B rows, D proposals of a block, K = D + 1, N blocks, W slots, M hidden size, V vocabulary
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from dsl.convert import structure
from dsl.draft_folders import FILES, INIT, use_draft_folders
from dsl.errors import ConfigError
from dsl.named_function import named_function
from ops.lib.drafts.algorithms import Algorithm, algorithm_class, own_options, part_of, place_in
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.losses.kinds import LossKind
from ops.lib.drafts.own_folder import draft_config

if TYPE_CHECKING:
    from torch import Tensor

    from ops.lib.drafts.backbone.hooks import Around

AROUND = "exactly two entries, what goes around the attention, then what goes around the MLP, or none"


@frozen(kw_only=True)
class Training:
    """What decides which functions a training calls with what. fields: of the algorithm's config; own: of its table,
    None where it has none; loss: the kind.
    """

    fields: dict[str, Any] = field(factory=dict)
    own: dict[str, Any] | None = None
    loss: LossKind = "dflash"


def mistakes_here(folder: Path, block_size: int, layers: int, training: Training) -> list[str]:
    """Each as "file: what is wrong", of a draft of this block size and number of layers; no other folder is known."""
    use_draft_folders([folder / INIT])
    mistakes = [mistake for file in FILES if (mistake := _import_mistake(folder, file))]
    if mistakes:
        return list(dict.fromkeys(mistakes))  # one file may import another
    try:
        config = draft_config(algorithm_class(folder.name)(**training.fields), block_size, layers)
    except ConfigError:  # sizes that fit the target's, perhaps, and not these
        return []
    try:
        return _draft_mistakes(folder, config) or _function_mistakes(folder, config, training)
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
    if around and "enter" not in named_function(f"{folder.name}.reference:__dict__"):
        mistakes.append(f"{folder / 'reference.py'} has no functions enter and leave, and around_sublayers has entries")
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


def _function_mistakes(folder: Path, config: DraftConfig, training: Training) -> list[str]:
    """What the functions return once, for random states of a draft with narrow layers on the CPU."""
    import torch

    from ops.lib.drafts.backbone.load import random_draft
    from ops.lib.drafts.decoding.sampling import GreedyChoice
    from ops.lib.drafts.losses.asked import Asked
    from ops.lib.drafts.losses.loss import Loss
    from ops.lib.drafts.returned import check_outcome, check_proposal

    algorithm = config.algorithm
    try:
        narrow = evolve(config, num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=64)
    except ConfigError:  # sizes that do not fit the algorithm
        return []
    torch.manual_seed(0)
    draft = random_draft(narrow, seed=0)
    K, M, V = narrow.block_size, narrow.hidden_size, narrow.vocab_size
    head_VM = torch.zeros(V, M)  # the system gives such memory only where it is written to
    options = own_options(folder.name)
    loss = Loss(kind=training.loss, own=None if options is None else structure(options, training.own or {}))
    x_NKM = torch.randn(2, narrow.layout().queries, M)
    first = draft.layers[0]
    mistakes = [
        mistake
        for name in first.around
        for mistake in _around_mistakes(folder / "modules.py", algorithm, name, getattr(first, name), x_NKM)
    ]
    weights_NK = torch.ones(2, K)
    weights_NK[:, 0] = 0
    asked = Asked(
        hidden_WM=torch.randn(2 * K, M, requires_grad=True),
        rows_W=torch.arange(2 * K),
        tokens_NK=torch.randint(V, (2, K)),
        weights_NK=weights_NK,
        teacher_WM=torch.randn(2 * K, M) if loss.needs_teacher else None,
    )
    mistakes += _tried(
        folder / "loss.py",
        lambda: part_of(algorithm, "loss:block_losses")(draft, asked, head_VM, loss),
        lambda outcome: check_outcome(algorithm, outcome, 2 * K, algorithm.metrics(loss.needs_teacher)),
    )
    hidden_BDM, logits_BDV = torch.randn(2, K - 1, M), torch.randn(2, K - 1, V)
    return mistakes + _tried(
        folder / "propose.py",
        lambda: part_of(algorithm, "propose:propose")(
            draft, hidden_BDM, logits_BDV, torch.tensor([0, 1]), GreedyChoice()
        ),
        lambda proposal: check_proposal(algorithm, proposal, 2, K - 1),
    )


def _around_mistakes(file: Path, algorithm: Algorithm, name: str, module: Around, x_NKM: Tensor) -> list[str]:
    from ops.lib.drafts.returned import check_entered, check_left

    shape, entered = tuple(x_NKM.shape), []

    def enter() -> Any:
        entered.append(module.enter(x_NKM))
        return entered[0]

    mistakes = _tried(file, enter, lambda pair: check_entered(algorithm, name, pair, shape))
    if mistakes or not entered:
        return mistakes
    mistakes = _tried(file, lambda: module.leave(*entered[0]), lambda left: check_left(algorithm, name, left, shape))
    return mistakes or _tried(
        file, lambda: _reaches_farther(module, x_NKM), lambda farther: _check_reach(name, farther)
    )


def _reaches_farther(module: Around, x_NKM: Tensor) -> bool:
    """Whether its slots are not those of a shorter block whose last one stands for all others, as `reach` promises."""
    import torch

    from ops.lib.drafts.backbone.model import repeat_last

    K = x_NKM.shape[1]
    if module.reach is None or K <= module.reach + 2:
        return False
    alike_NKM = repeat_last(x_NKM[:, :2], K)
    whole, first = module.enter(alike_NKM), module.enter(alike_NKM[:, : module.reach + 2])
    return not all(
        one.shape[:2] == x_NKM.shape[:2] and torch.allclose(one, repeat_last(other, K), rtol=1e-4, atol=1e-5)
        for one, other in zip(whole, first, strict=True)
    )


def _check_reach(name: str, farther: bool) -> None:
    if farther:
        raise ConfigError(
            f'"{name}": enter reads more than the `reach` slots before, or what leave needs is no [N, K, ...]'
        )


def _tried(file: Path, call: Callable[[], Any], check: Callable[[Any], None]) -> list[str]:
    """What a call of the user's code raised, or what the check says of what it returned. check raises ConfigError.

    Where there is a GPU, code may be meant for that alone, so what it raises on the CPU is no mistake.
    """
    import torch

    try:
        returned = call()
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return [] if torch.cuda.is_available() else [_raised(error, file)]
    try:
        check(returned)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str([*shape])


if __name__ == "__main__":
    training = structure(Training, json.loads(sys.argv[4]))
    print(json.dumps(mistakes_here(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), training)))
