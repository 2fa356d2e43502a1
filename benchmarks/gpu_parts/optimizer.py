"""The update by AdamW and by Muon: clipping and one step over all weights of the draft, with random gradients."""

from __future__ import annotations

import torch

from benchmarks.gpu_parts.timing import answer, draft_sizes, part_parser, peak_mib, times_of
from benchmarks.sides.ours import draft_config
from ops.lib.drafts.backbone.hooks import no_hidden_matrices, undecayed
from ops.lib.drafts.backbone.model import DraftModel
from ops.lib.training.optimizer import clip_gradients, make_optimizer, set_rate


def main() -> None:
    arguments = part_parser(__doc__).parse_args()
    device = torch.device(arguments.device)
    with device:
        model = DraftModel(draft_config(draft_sizes(arguments.tiny)))
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    figures = {}
    for kind in ("adamw", "muon"):
        optimizer = make_optimizer(
            model, 0.01, kind=kind, no_hidden_matrices=no_hidden_matrices(model), undecayed=undecayed(model)
        )
        set_rate(optimizer, 1e-6)

        def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()

        memory = peak_mib(update, device)
        figures[kind] = {**times_of(update, device, 2 if arguments.tiny else 5, warm_up=1), "mib": memory}
    answer({"weights": sum(parameter.numel() for parameter in model.parameters()), "updates": figures})


if __name__ == "__main__":
    main()
