"""Compiles the training steps of an algorithm for an absent H100, at the sizes of a draft for Qwen3-8B with two layers.

    python -m tests.gpu.compile_step ALGORITHM

Prints as JSON what test_sm90.py looks at, step by step.
"""

from __future__ import annotations

import absent_h100  # first: what follows may ask torch for its device

absent_h100.install()

import json  # noqa: E402
import sys  # noqa: E402
import warnings  # noqa: E402

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks.gpu_sizes import QWEN3_8B  # noqa: E402
from benchmarks.sides.ours import draft_config  # noqa: E402
from benchmarks.sides.problem import Sizes  # noqa: E402
from ops.lib.drafts.algorithms import algorithm_class  # noqa: E402
from ops.lib.drafts.attention.blocks import choose_attention  # noqa: E402
from ops.lib.drafts.backbone.model import DraftModel  # noqa: E402
from ops.lib.drafts.backbone.rope import rope_frequencies  # noqa: E402
from ops.lib.drafts.backbone.step import Engine, MicroBatch  # noqa: E402
from ops.lib.drafts.dflash2.config import Dflash2Options  # noqa: E402
from ops.lib.drafts.dspark.config import DsparkOptions  # noqa: E402
from ops.lib.drafts.lilicorr.config import LilicorrOptions  # noqa: E402
from ops.lib.drafts.losses.loss import Loss  # noqa: E402
from ops.lib.drafts.losses.slots import block_weights  # noqa: E402
from ops.lib.sequence_parallel.exchange import Alone  # noqa: E402
from ops.train_dflash.batches import Place, draw, pack  # noqa: E402
from ops.train_dflash.engine import weights_to_compute_with  # noqa: E402
from ops.train_dflash.staging import Direct  # noqa: E402

OPTIONS = {"dflash": None, "dflash2": Dflash2Options, "dspark": DsparkOptions, "lilicorr": LilicorrOptions}
STEPS = ((3072, 512), (3072, 512), (3000, 500), (600, 3), (131_072, 512))  # context, anchors
DTYPE = torch.bfloat16


class OneSample:
    """A sample whose states lie on the GPU, as those that are captured online."""

    def __init__(self, length: int, features: int, hidden: int) -> None:
        self.length, self.width, self.hidden = length, features, hidden

    def labels(self, _index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids_S = torch.randint(1000, (self.length,), generator=torch.Generator().manual_seed(0))
        return ids_S, torch.arange(self.length) >= self.length // 8

    def features(self, _index: int, first: int, last: int) -> torch.Tensor:
        return torch.empty(last - first, self.width, dtype=DTYPE, device=absent_h100.DEVICE)

    def final_hidden(self, _index: int, first: int, last: int) -> torch.Tensor:
        return torch.empty(last - first, self.hidden, dtype=DTYPE, device=absent_h100.DEVICE)


def main(name: str) -> None:
    warnings.simplefilter("ignore")  # the compiler's own
    own = OPTIONS[name]() if OPTIONS[name] is not None else None
    sizes = Sizes(context=131_072, anchors=512, **QWEN3_8B | {"layers": 2})
    algorithm = algorithm_class(name)
    config = draft_config(sizes, algorithm() if own is None else algorithm(**own.sizes()))
    loss, steps = Loss(own=own), []
    with torch.device("meta"):
        model = DraftModel(config)
    model.frequencies, model.rope_scale = rope_frequencies(config)
    with absent_h100.AbsentGpu():
        model.to_empty(device=absent_h100.DEVICE)
        model.compile_layers()
        ends_VM = torch.empty(config.vocab_size, config.hidden_size, dtype=DTYPE, device=absent_h100.DEVICE)
        engine = Engine(
            model=model,
            embed_VM=ends_VM,
            head=ends_VM,
            loss=loss,
            attend=choose_attention(absent_h100.DEVICE, config, DTYPE)[1],
            exchange=Alone(),
            computing=weights_to_compute_with(model, DTYPE),
        )
        for context, anchors in STEPS:
            batch = micro_batch(config, context, anchors, loss.needs_teacher)
            with engine.computing():
                engine.train(batch, 1.0)
            steps.append(counters["stats"]["unique_graphs"])
    breaks = sum(counters["graph_break"].values())
    print(json.dumps({"graphs": steps, "breaks": breaks, "kernels": absent_h100.kernels}))


def micro_batch(config, context: int, anchors: int, with_teacher: bool) -> MicroBatch:
    place = Place(dp_rank=0, dp_size=1, sp_rank=0, sp_degree=1, device=absent_h100.DEVICE, dtype=DTYPE)
    reader = OneSample(context, len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
    weights_K = block_weights(config.block_size)
    drawn = [draw(reader, 0, weights_K, anchors, seed=0, epoch=0)]
    batch, _ = pack(reader, drawn, place, with_teacher=with_teacher).send(Direct(place.device))
    return batch


if __name__ == "__main__":
    main(sys.argv[1])
