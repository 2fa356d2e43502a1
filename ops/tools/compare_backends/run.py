"""Capture a few samples with both backends and report how far they differ. A separate process:

    python -m ops.tools.compare_backends.run REQUEST RESULT

REQUEST is {"graph", "node", "artifacts": {node: [path, digest]}, "samples"}; RESULT gets what `main` describes.
"""

from __future__ import annotations

import gc
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsl.errors import DataError, DflowError
from dsl.graph import Graph, GraphNode, graph_from_json
from ops.artifacts import ImageSamples, TargetModel, TokenShards
from ops.capture_targets.agreement import LOG_PROB_TOLERANCE, TIMES_OWN_ROUNDING, compare_states
from ops.capture_targets.backend import HuggingFaceBackend
from ops.capture_targets.layers import layers_of
from ops.capture_targets.sglang import SglangBackend
from ops.lib.data.batching import spread
from ops.lib.data.files import read_json, read_jsonl
from ops.lib.data.image_packs import read_packed
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.data.tool_forms import tools_in_form
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.sglang.mm_processor import ServedPrompts
from ops.lib.sglang.process import float32_refusal
from ops.lib.sglang.version import installed_version
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import check_samples_fit, target_info
from ops.lib.vision.batch import collate
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.encode import asked
from ops.tokenize_chat.records import conversation_of

MEMORY_PART = 0.8  # of a GPU's free memory, for weights in float32


@frozen
class Request:
    """A capture node to compare, its input artifacts, and the number of samples."""

    graph: Graph
    node: GraphNode
    artifacts: dict[str, tuple[Path, str]]
    samples: int

    @classmethod
    def read(cls, path: Path) -> Request:
        values = read_json(path)
        graph = graph_from_json(values["graph"])
        artifacts = {name: (Path(place), digest) for name, (place, digest) in values["artifacts"].items()}
        return cls(graph, graph.nodes[values["node"]], artifacts, values["samples"])

    @property
    def tokenize(self) -> GraphNode:
        """The node that made the tokens."""
        return self.graph.nodes[self.node.inputs["tokens"][0]]

    @property
    def tokens(self) -> TokenShards:
        return TokenShards(*self.artifacts[self.tokenize.id])

    @property
    def target(self) -> TargetModel:
        return TargetModel(*self.artifacts[self.node.inputs["target"][0]])

    @property
    def readers(self) -> dict[str, TokenReader]:
        """The token readers of the captured splits, by split."""
        return {split: TokenReader(self.tokens, split) for split in self.node.config.splits}

    @property
    def images(self) -> ImageSamples | None:
        """The messages and images behind the tokens; None if the store no longer has them."""
        source = self.tokenize.inputs.get("samples", ())
        return ImageSamples(*self.artifacts[source[0]]) if source and source[0] in self.artifacts else None


@frozen(eq=False)
class BackendOutput:
    """The output of one backend in one dtype: states [S, F] and log-probabilities [S - 1] of each sample."""

    states: list[Tensor]
    log_probs: list[Tensor]


def main(arguments: Sequence[str]) -> int:
    """Compare the backends, and write the result as a JSON object.

    It holds {"node", "layers", "device", "backends", "samples", "dtypes": [...], "left_out", "preprocessing",
    "image_bounds", "agree"}, or {"error"} if the comparison is refused.
    """
    request_file, result_file = map(Path, arguments)
    try:
        result = compare(Request.read(request_file))
    except DflowError as error:
        result = {"error": str(error)}
    result_file.write_text(json.dumps(result), "utf-8")  # not atomic: its folder may not be writable
    return 0


def compare(request: Request) -> dict[str, Any]:
    """Compare both backends, in float32 and in the capture's dtype, and SGLang's preprocessing of the same messages.

    If SGLang does not support float32, only transformers' float32 measures the rounding; "left_out" in the result says
    why. Raises DataError for tokens that do not fit the target, and ConfigError for layers that the target lacks.
    """
    config, info = request.node.config, target_info(request.target)
    layer_ids = layers_of(config, info["num_layers"])
    check_samples_fit(request.readers.values(), request.target)
    samples = choose(request.readers, request.samples)
    device = device_of(request.node)
    fits = float32_fits(request.target, device)
    dtypes = [*(["float32"] if fits else []), config.dtype]
    left_out = None if config.dtype == "float32" else why_not_float32(request.target, device, fits)
    ours = {dtype: with_transformers(request, samples, layer_ids, dtype, device) for dtype in dict.fromkeys(dtypes)}
    free_memory()
    image_token_id = TokenReader(request.tokens).info["image_token_id"]
    compared = []
    for dtype, given in ours.items():
        if dtype == "float32" and left_out:
            continue
        theirs = with_sglang(request, samples, layer_ids, dtype, device)
        exact = ours.get("float32")
        exactly = None if exact is None else exact.states
        states = compare_states(samples, given.states, theirs.states, layer_ids, image_token_id, dtype, exactly)
        log_probs = compare_log_probs(samples, given, theirs, dtype, exact)
        compared.append({"dtype": dtype, "states": [each.row() for each in states], "log_probs": log_probs})
    preprocessing = compare_preprocessing(request, samples, device) if info["vision"] else []
    agree = all(row["agrees"] for part in compared for row in [*part["states"], part["log_probs"]])
    return {
        "node": request.node.id,
        "layers": list(layer_ids),
        "device": device,
        "backends": {"huggingface": importlib.metadata.version("transformers"), "sglang": installed_version()},
        "samples": [
            {"id": sample.id, "tokens": len(sample.input_ids), "images": len(sample.image_grid_thw)}
            for sample in samples
        ],
        "dtypes": compared,
        "left_out": left_out,
        "preprocessing": preprocessing,
        "image_bounds": image_bounds(request),
        "agree": agree and not any(row["differences"] for row in preprocessing or ()),
    }


def choose(readers: Mapping[str, TokenReader], count: int) -> list[TokenSample]:
    """Choose samples spread over the splits, half of them with images if possible. Raises DataError for none."""
    places = [(reader, row) for reader in readers.values() for row in range(len(reader))]
    seen = [(reader, row) for reader, row in places if reader.records[row]["category"] == "image"]
    read = [(reader, row) for reader, row in places if reader.records[row]["category"] != "image"]
    with_images = min(len(seen), max(count - len(read), (count + 1) // 2))
    chosen = [*spread(seen, with_images), *spread(read, count - with_images)]
    if not chosen:
        raise DataError(f"no samples in the splits {', '.join(readers)}: nothing to compare")
    return [reader.sample(row) for reader, row in chosen]


def device_of(node: GraphNode) -> str:
    return "cuda" if torch.cuda.is_available() and node.launch.device != "cpu" else "cpu"


def float32_fits(target: TargetModel, device: str) -> bool:
    """Whether the GPU has room for the weights in float32; always True on a CPU."""
    if device == "cpu":
        return True
    stored = sum(file.stat().st_size for file in (target.path / "model").glob("*.safetensors"))
    as_stored = read_json(target.path / "model" / "config.json")
    dtype = as_stored.get("dtype") or as_stored.get("torch_dtype") or "float32"
    weights = stored * 4 / getattr(torch, dtype).itemsize
    return weights < MEMORY_PART * torch.cuda.mem_get_info()[0]


def why_not_float32(target: TargetModel, device: str, fits: bool) -> str | None:
    """A text on why the backends are not compared in float32; None if they are."""
    if not fits:
        return "the GPU has no room for the weights in float32, so a fixed bound replaces the measured rounding"
    why = float32_refusal(target.path / "model", device)
    return why and f"{why}; only transformers' float32 measures the rounding"


def free_memory() -> None:
    """Free unused memory, on the GPU too, as SGLang reserves what is free when it starts."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@frozen
class OneProcess:
    """The parts of a stage that a backend uses, for a single process."""

    inputs: Mapping[str, Any]
    device: str
    rank: int = 0
    world_size: int = 1

    def info(self, text: str) -> None:
        """Drop what a stage would log: the comparison prints its own lines."""


def with_transformers(
    request: Request, samples: Sequence[TokenSample], layer_ids: Sequence[int], dtype: str, device: str
) -> BackendOutput:
    """The output of transformers, computed for one sample at a time, so that nothing is padded."""
    backend = HuggingFaceBackend.load(evolve(request.node.config, dtype=dtype), request.target, device)
    states = [backend.forward([sample], layer_ids)[0].features.cpu() for sample in samples]
    log_probs = [token_log_probs(backend.target, collate([sample], device))[0].cpu() for sample in samples]
    return BackendOutput(states, log_probs)


def with_sglang(
    request: Request, samples: Sequence[TokenSample], layer_ids: Sequence[int], dtype: str, device: str
) -> BackendOutput:
    """The output of SGLang for all samples in one batch, as in a capture.

    It uses the node's server arguments, but only one device.
    """
    config = evolve(request.node.config, backend="sglang", dtype=dtype, tp_degree=1)
    stage = OneProcess({"target": request.target, "tokens": request.tokens}, device)
    with closing(SglangBackend.start(config, stage, request.readers)) as backend:
        states = [states.features for states in backend.forward(samples, layer_ids)]
        return BackendOutput(states, [backend.runtime.token_log_probs(sample) for sample in samples])


def compare_log_probs(
    samples: Sequence[TokenSample], ours: BackendOutput, theirs: BackendOutput, dtype: str, exact: BackendOutput | None
) -> dict[str, Any]:
    """The largest difference of log-probabilities over the answers' tokens, and whether rounding explains it."""
    largest = _largest(samples, ours.log_probs, theirs.log_probs)
    own = _largest(samples, ours.log_probs, exact.log_probs) if exact is not None else 0.0
    allowed = max(LOG_PROB_TOLERANCE[dtype], TIMES_OWN_ROUNDING * own)
    return {"largest": largest, "allowed": allowed, "agrees": largest <= allowed}


def _largest(samples: Sequence[TokenSample], a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    learnt = [sample.loss_mask[1:] for sample in samples]
    pairs = zip(a, b, learnt, strict=True)
    return max(float((x - y)[mask].nan_to_num(torch.inf).abs().max()) for x, y, mask in pairs if mask.any())


def compare_preprocessing(request: Request, samples: Sequence[TokenSample], device: str) -> list[dict[str, Any]] | None:
    """Compare each sample's tokens with SGLang's preprocessing of its messages and images; None if these are gone.

    It uses the tokens' image backend and image sizes, as `dflow serve` does, and tools as SGLang's server writes them.
    """
    if request.images is None:
        return None
    wanted = {name for sample in samples for name in (sample.id, conversation_of(sample.id))}
    rows = {row["id"]: row for row in read_jsonl(request.images.path / "samples.jsonl") if row["id"] in wanted}
    thinking = getattr(request.tokenize.config, "enable_thinking", None)
    options = {} if thinking is None else {"enable_thinking": thinking}
    backend = TokenReader(request.tokens).info["image_backend"]
    compared = []
    sizes = {"mm_process_config": {"image": image_bounds(request)}}
    with ServedPrompts.open(request.target.path / "model", backend, device, sizes) as served:
        for sample in samples:
            row = rows[sample.id if sample.id in rows else conversation_of(sample.id)]
            messages = asked(sample, row)
            references = row["images"][: len(sample.image_grid_thw)]
            images = [read_packed(request.images.path, reference) for reference in references]
            tools = {"tools": tools_in_form(f"sglang-{installed_version()}", row["tools"])} if "tools" in row else {}
            prompt = served.prompt(messages, images, {**options, **tools})
            ids = sample.input_ids[: sample.prompt_tokens]
            differences = [] if torch.equal(prompt.input_ids, ids) else [_first_difference(ids, prompt.input_ids)]
            if images and not torch.equal(prompt.image_grid_thw, sample.image_grid_thw):
                differences.append(f"grids {sample.image_grid_thw.tolist()}, SGLang's {prompt.image_grid_thw.tolist()}")
            elif images and not torch.equal(prompt.pixel_values, sample.pixel_values):
                largest = float((prompt.pixel_values - sample.pixel_values).abs().max())
                differences.append(f"pixel values differ by up to {largest:.1e}")
            compared.append({"id": sample.id, "differences": differences})
    return compared


def image_bounds(request: Request) -> dict[str, int]:
    """The image limits to pass to SGLang's server if the tokens use other image sizes than the target's defaults.

    Always both, because SGLang silently ignores a single one; empty if the defaults apply.
    """
    info = target_info(request.target)
    made, own = (
        load_processor(str(folder), trust_remote_code=trusts_own_code(folder, info)).image_processor
        for folder in (request.tokens.path / "processor", request.target.path / "model")
    )
    if made is None or own is None or dict(made.size) == dict(own.size):
        return {}
    return {"min_pixels": made.size["shortest_edge"], "max_pixels": made.size["longest_edge"]}


def _first_difference(ours: Tensor, theirs: Tensor) -> str:
    shared = min(len(ours), len(theirs))
    other = (ours[:shared] != theirs[:shared]).nonzero().flatten().tolist()
    where = f"from token {other[0]} on" if other else "at their end"
    return f"the prompt's {len(ours)} tokens and SGLang's {len(theirs)} differ {where}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
