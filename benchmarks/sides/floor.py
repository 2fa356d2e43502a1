"""The matmul floor: the matrix products that every DFlash step needs, each timed at its shape, summed.

Everything else (norms, RoPE, softmax, the exponentials of the loss, copies) is omitted, and so is what exact savings
avoid: attention to what a block does not see, recomputed scores in the backward pass, the mask slots' norms
and projections in the first layer (they are all equal), slots without weight after the last layer's keys and
values, context after the last anchor, gradients of the frozen head, embedding and features.

An algorithm's own products, with its default options, are the group "algorithm". DFlash2's convolutions read the slot
before, so that two rows a block differ from the others in the first layer, and the last one has all slots as outputs.

Legend: T context before the last anchor, F features, M hidden, N blocks, K block size, W weighted slots, H query heads,
G key/value heads, D head size, I intermediate, V vocabulary, R rank.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.sides.measured import parser, rank_of, sizes_of
from benchmarks.sides.problem import Problem, Sizes, make_problem, slot_targets
from ops.lib.drafts.dflash2.config import Dflash2Options
from ops.lib.drafts.lilicorr.config import LilicorrOptions

BUCKET = 8  # anchors whose queries share one product with their context
HEAD_ROWS = 2048  # rows of logits in one product: no real step has all of them in memory
REPEATS = 3
DFLASH2, LILICORR = Dflash2Options(), LilicorrOptions()


@dataclass(frozen=True)
class Product:
    """A kind of matrix product in a step: `count` products of [m, k] and [k, n] matrices, each over a batch.

    first_transposed, second_transposed: whether that operand is transposed in memory, as in the step.
    """

    group: str
    count: int
    batch: int
    m: int
    k: int
    n: int
    first_transposed: bool = False
    second_transposed: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.count * self.batch * self.m * self.k * self.n


def products(problem: Problem, algorithm: str = "dflash", rank: int | None = None) -> list[Product]:
    """The matrix products of one step, forward and backward. rank: as of `rank_of`."""
    sizes, has_convolutions = problem.sizes, algorithm == "dflash2"
    M, width, kv_width = sizes.hidden, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    slots, weighted = sizes.anchors * sizes.block, int((slot_targets(problem)[1] > 0).sum())
    seen = int(problem.anchors_A.max())
    result = _linear("fc", seen, sizes.features, M, input_gradient=False)
    for index in range(sizes.layers):
        # In the first layer the rows are the anchors' tokens and one mask slot; its input, the embedding, is frozen.
        first, last = index == 0, index == sizes.layers - 1
        distinct = sizes.anchors + 1 if first else slots
        inputs = 2 * sizes.anchors + 1 if first and has_convolutions else distinct
        outputs = weighted if last and not has_convolutions else slots
        if has_convolutions:
            kernels = 2 * DFLASH2.taps * M // DFLASH2.group
            result += _linear("algorithm", distinct, M, kernels, input_gradient=not first)
            result += _linear("algorithm", outputs, M, kernels)
        result += _linear("context K/V", seen, M, 2 * kv_width)
        result += _linear("q/k/v/o", min(inputs, outputs), M, width, input_gradient=not first)
        result += _linear("q/k/v/o", inputs, M, 2 * kv_width, input_gradient=not first)
        result += _linear("q/k/v/o", outputs, width, M)
        result += _linear("MLP", outputs, M, 2 * sizes.intermediate)
        result += _linear("MLP", outputs, sizes.intermediate, M)
        result += _attention(problem, outputs)
    for rows in _parts(weighted):
        result.append(Product("lm_head", 1, 1, rows, M, sizes.vocabulary, second_transposed=True))  # logits
        result.append(Product("lm_head", 1, 1, rows, sizes.vocabulary, M))  # gradient of the hidden states
    return result + OWN_PRODUCTS[algorithm](problem, weighted, rank_of(sizes, rank))


def _parts(rows: int) -> Iterator[int]:
    """Rows of logits, in equal parts except the last."""
    size = -(-rows // -(-rows // HEAD_ROWS))
    for start in range(0, rows, size):
        yield min(size, rows - start)


def _of_dflash2(problem: Problem, weighted: int, rank: int) -> list[Product]:
    """The selector: projection of the hidden states, logits and scores of the candidates and the label."""
    offered = DFLASH2.candidates + 1
    result = _linear("algorithm", weighted, problem.sizes.hidden, rank)
    result += _for_each_slot(weighted, offered, problem.sizes.hidden, 2)  # the head is frozen
    return result + _for_each_slot(weighted, offered, rank, 3)


def _of_dspark(problem: Problem, weighted: int, rank: int) -> list[Product]:
    """The bias, and the target's logits: once for each token that blocks predict, as they overlap."""
    sizes = problem.sizes
    places_AK = problem.anchors_A[:, None] + torch.arange(sizes.block)
    predicted = len(places_AK[slot_targets(problem)[1] > 0].unique())
    result = []
    for rows in _parts(weighted):
        result += _linear("algorithm", rows, rank, sizes.vocabulary)
    for rows in _parts(predicted):
        result.append(Product("algorithm", 1, 1, rows, sizes.hidden, sizes.vocabulary, second_transposed=True))
    return result


def _of_lilicorr(problem: Problem, weighted: int, rank: int) -> list[Product]:
    """The transformer over the candidates, LILICORR.candidates of a slot, and their logits."""
    sizes, width, factors = problem.sizes, 4 * rank, 4 * rank
    nodes, inner = weighted * LILICORR.candidates, int(LILICORR.mlp_ratio * width)
    heads = min(LILICORR.heads, width)
    result = _linear("algorithm", weighted, sizes.hidden, width) + _linear("algorithm", weighted, width, factors)
    result += _linear("algorithm", nodes, sizes.hidden, width, input_gradient=False)  # of embeddings, which are frozen
    result += _linear("algorithm", nodes, width, width)
    for _ in range(LILICORR.layers):
        for inputs, outputs in ((width, 4 * width), (width, inner), (inner, width)):
            result += _linear("algorithm", nodes, inputs, outputs)
        block = nodes // sizes.anchors
        result += _softmax_products(sizes.anchors * heads, block, block, width // heads, "algorithm")
    result += _linear("algorithm", nodes, width, 2 * width) + _linear("algorithm", nodes, width, factors)
    return result + _for_each_slot(weighted, LILICORR.candidates + 1, sizes.hidden, 2)


def _for_each_slot(slots: int, offered: int, size: int, count: int) -> list[Product]:
    """Products of each slot's own vector with the rows of its candidates, and `count` - 1 gradients of them."""
    return [Product("algorithm", count, slots, 1, size, offered, second_transposed=True)]


OWN_PRODUCTS: dict[str, Callable[[Problem, int, int], list[Product]]] = {
    "dflash": lambda problem, weighted, rank: [],
    "dflash2": _of_dflash2,
    "dspark": _of_dspark,
    "lilicorr": _of_lilicorr,
}


def _linear(group: str, rows: int, inputs: int, outputs: int, *, input_gradient: bool = True) -> list[Product]:
    """The products of a linear layer: x W^T, the gradient of W, and that of x unless nothing before it is trained."""
    result = [
        Product(group, 1, 1, rows, inputs, outputs, second_transposed=True),
        Product(group, 1, 1, outputs, rows, inputs, first_transposed=True),
    ]
    return [*result, Product(group, 1, 1, rows, outputs, inputs)] if input_gradient else result


def _attention(problem: Problem, queries: int) -> list[Product]:
    """The products of attention, forward and backward.

    Each bucket of anchors attends to the context that its blocks see on average, and each block to itself. Each of the
    two takes two products forward, and four backward: the gradients of weights, values, queries and keys.
    """
    sizes = problem.sizes
    G, D, K, heads_per_kv = sizes.kv_heads, sizes.head_dim, sizes.block, sizes.heads // sizes.kv_heads
    result = []
    for anchors in problem.anchors_A.split(BUCKET):
        rows = round(len(anchors) * queries / sizes.anchors) * heads_per_kv
        result += _softmax_products(G, rows, round(float(anchors.double().mean())), D)
    per_block = round(queries / sizes.anchors) * heads_per_kv
    return result + _softmax_products(sizes.anchors * G, per_block, K, D)


def _softmax_products(batch: int, rows: int, keys: int, size: int, group: str = "attention") -> list[Product]:
    return [
        Product(group, 2, batch, rows, size, keys, second_transposed=True),  # scores; gradient of the weights
        Product(group, 2, batch, rows, keys, size),  # output; gradient of the queries
        Product(group, 2, batch, keys, rows, size, first_transposed=True),  # gradients of values and of keys
    ]


def seconds(product: Product, dtype: torch.dtype) -> float:
    """Measure the CPU seconds of a product: the median of a few runs after a warm-up, into allocated memory."""
    left = _operand(product.batch, product.m, product.k, product.first_transposed, dtype)
    right = _operand(product.batch, product.k, product.n, product.second_transposed, dtype)
    out = torch.empty(product.batch, product.m, product.n, dtype=dtype)
    multiply = torch.bmm
    if product.batch == 1:
        left, right, out, multiply = left[0], right[0], out[0], torch.mm
    multiply(left, right, out=out)
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        multiply(left, right, out=out)
        times.append(time.process_time() - start)
    return product.count * statistics.median(times)


def _operand(batch: int, rows: int, columns: int, transposed: bool, dtype: torch.dtype) -> Tensor:
    if transposed:
        return torch.ones(batch, columns, rows, dtype=dtype).transpose(1, 2)
    return torch.ones(batch, rows, columns, dtype=dtype)


def anchors_only(sizes: Sizes) -> Problem:
    """A problem without its large tensors, for counting: the same anchors as those of the whole problem."""
    small = Sizes(context=sizes.context, anchors=sizes.anchors, hidden=1, layers=0, vocabulary=2, target_layers=1)
    problem = make_problem(small)
    return replace(problem, sizes=sizes)


def main() -> None:
    arguments = parser().parse_args()
    sizes = sizes_of(arguments)
    torch.set_num_threads(1)
    dtype = getattr(torch, arguments.dtype)
    groups: dict[str, dict[str, float]] = {}
    for product in products(anchors_only(sizes), arguments.algorithm, arguments.rank):
        group = groups.setdefault(product.group, {"seconds": 0.0, "gflop": 0.0})
        group["seconds"] += seconds(product, dtype)
        group["gflop"] += product.flops / 1e9
    print(json.dumps({"seconds": sum(group["seconds"] for group in groups.values()), "groups": groups}))


if __name__ == "__main__":
    main()
