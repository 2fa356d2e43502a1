"""The trial of an algorithm of the user's: its folder is imported, and what it has is called once.

    python -m ops.lib.drafts.own_trial FOLDER BLOCK_SIZE LAYERS TRAINING

TRAINING: a `Training`, as JSON. Prints the first thing that is wrong as a string in JSON, empty where nothing is. The
folder's config.py was tried before, by `own_config`.

    B rows, D proposals of a block, K = D + 1, N blocks, W slots, M hidden size, V vocabulary
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from dsl.convert import structure
from dsl.errors import ConfigError
from dsl.imports import named_function
from dsl.op_table import DRAFT_FILES, INIT, use_draft_folders
from ops.lib.drafts.algorithms import Algorithm, algorithm_class, own_options, part_of
from ops.lib.drafts.backbone.config import DraftConfig, to_serving
from ops.lib.drafts.losses.kinds import LossKind
from ops.lib.drafts.own_config import draft_config, expect, placed

GPU = "cuda"

if TYPE_CHECKING:
    from torch import Tensor

    from ops.lib.drafts.backbone.hooks import Around


@frozen(kw_only=True)
class Training:
    """The training that decides which functions of an algorithm are called, and how.

    fields: of the algorithm's config. own: of its own table, None without one. loss: the kind.
    """

    fields: dict[str, Any] = field(factory=dict)
    own: dict[str, Any] | None = None
    loss: LossKind = "dflash"


def mistake_of(folder: Path, block_size: int, layers: int, training: Training) -> str:
    """The first mistake in trying a draft of this block size and layer count; "" for none.

    Only this folder's algorithm is registered then.
    """
    use_draft_folders([folder / INIT])
    try:
        for file in DRAFT_FILES:
            with placed(str(folder / file)):
                named_function(f"{folder.name}.{file.removesuffix('.py')}:__name__")
        algorithm = algorithm_class(folder.name)(**training.fields)
        try:
            config = draft_config(algorithm, block_size, layers)
        except ConfigError:  # sizes that fit the target's, perhaps, and not these
            return ""
        with placed(str(folder)):
            _try_on_devices(folder, config, training)
    except ConfigError as error:
        return str(error)
    return ""


def _try_on_devices(folder: Path, config: DraftConfig, training: Training) -> None:
    """Call the algorithm's functions on the CPU.

    Its code may be meant for a GPU only. So an error on the CPU counts only if the GPU, where there is one, raises too.
    """
    import torch

    try:
        _try_functions(folder, config, training, "cpu")
    except ConfigError:  # of what it returned, or has
        raise
    except Exception:
        if not torch.cuda.is_available():
            raise
        _try_functions(folder, config, training, GPU)


def _try_functions(folder: Path, config: DraftConfig, training: Training, device: str) -> None:
    """Make a draft, and call its functions with random states."""
    import torch

    from ops.lib.drafts.backbone.load import random_draft
    from ops.lib.drafts.backbone.sizes import expected_shapes
    from ops.lib.drafts.check_returns import check_outcome, check_proposal
    from ops.lib.drafts.decoding.sampling import GreedyChoice
    from ops.lib.drafts.losses.loss import Loss
    from ops.lib.drafts.losses.loss_request import Asked

    algorithm = config.algorithm
    torch.manual_seed(0)
    draft = random_draft(config, 0, device)
    made = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    said = expected_shapes(to_serving(config))
    for name in dict.fromkeys([*made, *said]):
        what = f"config.py: shapes says {said.get(name)} of the tensor {name}, model.py makes {made.get(name)}"
        expect(made.get(name) == said.get(name), what)
    first = draft.layers[0]
    around = ("enter", "leave") if first.around else ()
    for function in ("scores", "token_logits", "block_losses", *around):
        part_of(algorithm, f"reference:{function}")
    K, M, V = config.block_size, config.hidden_size, config.vocab_size
    head_VM = torch.zeros(V, M, device=device)  # on a CPU the system gives such memory only where it is written to
    options = own_options(folder.name)
    loss = Loss(kind=training.loss, own=None if options is None else structure(options, training.own or {}))
    for name in first.around:
        _try_around(algorithm, name, getattr(first, name), torch.randn(2, config.layout().queries, M, device=device))
    weights_NK = torch.ones(2, K, device=device)
    weights_NK[:, 0] = 0
    asked = Asked(
        hidden_WM=torch.randn(2 * K, M, device=device, requires_grad=True),
        rows_W=torch.arange(2 * K, device=device),
        tokens_NK=torch.randint(V, (2, K), device=device),
        weights_NK=weights_NK,
        teacher_WM=torch.randn(2 * K, M, device=device) if loss.needs_teacher else None,
    )
    block_losses, propose = part_of(algorithm, "loss:block_losses"), part_of(algorithm, "model:propose")
    metrics = algorithm.metrics(loss.needs_teacher)
    check_outcome(algorithm, block_losses(draft, asked, head_VM, loss), 2 * K, metrics)
    hidden_BDM, logits_BDV = (torch.randn(2, K - 1, size, device=device) for size in (M, V))
    anchors_B = torch.tensor([0, 1], device=device)
    check_proposal(algorithm, propose(draft, hidden_BDM, logits_BDV, anchors_B, GreedyChoice()), 2, K - 1)


def _try_around(algorithm: Algorithm, name: str, module: Around, x_NKM: Tensor) -> None:
    from ops.lib.drafts.check_returns import check_entered, check_left

    shape = tuple(x_NKM.shape)
    entered = module.enter(x_NKM)
    check_entered(algorithm, name, entered, shape)
    check_left(algorithm, name, module.leave(*entered), shape)
    farther = f'"{name}": enter reads more than the `reach` slots before, or what leave needs is no [N, K, ...]'
    expect(not _reaches_farther(module, x_NKM), farther)


def _reaches_farther(module: Around, x_NKM: Tensor) -> bool:
    """Whether a module reads slots farther away than its `reach` promises.

    Slots beyond its reach should equal those of a shorter block whose last slot is repeated.
    """
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


if __name__ == "__main__":
    training = structure(Training, json.loads(sys.argv[4]))
    print(json.dumps(mistake_of(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), training)))
