"""SGLang's real HTTP server with its workers for drafts, started by `dflow serve` on a run's store.

The target is a dense Qwen3-VL, which SGLang's own launcher cannot serve with a draft; the draft is a good one blurred
by noise, so that accepted lengths vary and wrong features would show. It has learnt the beginning of every answer that
is asked for: of answers that a draft never saw, chance alone accepts a token here and there, others on every processor.
"""

from __future__ import annotations

import base64
import io
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from algorithm_cases import grown
from attrs import frozen
from dflash_cases import BLOCK, NEW_TOKENS, QUESTIONS, Case, make_case
from fake_stage import FakeStage
from family_checkpoints import picture
from PIL import Image
from ports import free_port
from serve_cases import record_run, write_folder
from server_process import ON_A_CPU, SWITCHES, cpu_environment

from dsl.op import Ref
from executor.model_tools.serve import MAX_TOKENS
from executor.records.run_record import find_record
from executor.store.artifact_store import Store
from executor.system.output import printable
from ops.artifacts import ImageSamples, TokenShards
from ops.lib.data.files import read_json, read_jsonl, write_jsonl
from ops.lib.data.image_packs import PackWriter
from ops.lib.data.token_shards import TokenReader, TokenSample
from ops.lib.drafts.algorithms import Algorithm
from ops.lib.drafts.backbone.load import load_draft
from ops.lib.drafts.decoding.decode import Decoded, decode_plain, decode_speculative
from ops.lib.drafts.dspark.config import Dspark
from ops.lib.target.model import Target
from ops.lib.vision.processor import load_processor
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import tokenize_chat
from ops.tools.serve.chat import chat_messages

IMAGES = [picture(24, 16), picture(16, 32, seed=1), picture(24, 24, seed=2)]
COUNTS = (0, 1, 2, 1, 1)
MAX_PIXELS = 1024
ON_CPU = [*(part for pair in ON_A_CPU.items() for part in pair), *SWITCHES]


@frozen(eq=False)
class Run:
    """A store with the record of a run, and the samples and tokens that its draft was evaluated on."""

    case: Case
    store: Store
    run: str
    draft: Path
    samples: Path
    tokens: TokenShards

    def dflow_serve(self, port: int, *arguments: str) -> list[str]:
        own = ["serve", self.run, "--store", str(self.store.path), "--port", str(port), *arguments]
        return [sys.executable, "-m", "executor.cli", *own, "--", *ON_CPU]

    def chat(self) -> list[tuple[dict[str, Any], TokenSample]]:
        """Each conversation as it is sent, and as dflow tokenised it."""
        rows = {row["id"]: row for row in read_jsonl(self.samples / "samples.jsonl")}
        found = held_out(self.tokens)
        return [({"messages": chat_messages(rows[sample.id], self.samples)}, sample) for sample in found]


def make_run(folder: Path, family: str, quality: str, *, images: bool, algorithm: Algorithm | None = None) -> Run:
    """quality: of the draft, which knows the first tokens of the target's answers to all prompts of the run.

    algorithm: which then changes some of its proposals; default: none, it is of plain DFlash.
    """
    samples = write_samples(folder / "samples", images)

    def chats(checkpoint: Path) -> list[TokenSample]:
        return held_out(tokenised(folder / "tokens", samples, checkpoint))

    case = make_case(family, folder / "case", images=images, also=chats)
    draft = case.drafts[quality].path
    if algorithm is not None:
        draft = grown(draft, folder / "grown", algorithm)
    tokens = TokenShards(folder / "tokens" / "out", "tokens")
    info = read_json(tokens.path / "tokens.json")
    captured = {name: info[name] for name in ("image_backend", "pixel_limits")}
    made = {
        "target": case.target.path,
        "train": write_folder(folder / "train", {"training.json": {"captured": captured}}),
        "export": draft,
        "check": write_folder(folder / "check", {"check.json": {}}),
        "eval": write_folder(folder / "eval", {"report.json": {}}),
        "inject": samples,
        "tokenize": tokens.path,
    }
    (made["check"] / "draft").symlink_to(draft)
    store, run = record_run(folder / "run", made, states={"eval": {"metrics": {"eval/tau": 2.5}}})
    return Run(case, store, run, draft, samples, tokens)


def held_out(tokens: TokenShards) -> list[TokenSample]:
    reader = TokenReader(tokens, "test")
    return [reader.sample(index) for index in range(len(reader.records))]


def write_samples(folder: Path, images: bool) -> Path:
    folder.mkdir(parents=True)
    packs, rows = PackWriter(folder), []
    pictures = [*(IMAGES[:count] for count in COUNTS), [picture(48, 48)]]  # the last one is too large for the limit
    for index, (question, of_it) in enumerate(zip([*QUESTIONS, "What now?"], pictures, strict=True)):
        shown = [png(image) for image in of_it] if images else []
        asked = [*({"type": "image"} for _ in shown), {"type": "text", "text": question}]
        told = {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]}
        rows.append(
            {
                "id": f"chat-{index}",
                "split": "test",
                "category": "image" if shown else "text",
                "messages": [{"role": "user", "content": asked}, told],
                "images": [packs.add(encoded) for encoded in shown],
            }
        )
    write_jsonl(folder / "samples.jsonl", [{**rows[0], "id": "train", "split": "train"}, *rows])
    return folder


def tokenised(folder: Path, samples: Path, processor: Path) -> TokenShards:
    """With a limit on the size of images that the target's own processor does not have."""
    stage = FakeStage(folder, {"samples": ImageSamples(samples, "samples")})
    options = {"max_pixels": MAX_PIXELS, "min_loss_tokens": 1, "preview_samples": 0}
    tokenize_chat(TokenizeChat(samples=Ref("inject"), processor=str(processor), **options), stage)
    return stage.artifact(TokenShards)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def vision(tmp_path_factory) -> Run:
    return make_run(tmp_path_factory.mktemp("vision"), "qwen3_vl", "noisy", images=True)


@pytest.fixture(scope="module")
def server(vision, tmp_path_factory) -> Iterator[tuple[str, list[str]]]:
    """The server's address, and what dflow printed until the server was ready and had answered."""
    port = free_port()
    errors = tmp_path_factory.mktemp("server") / "errors"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            vision.dflow_serve(port), env=cpu_environment(), stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as dflow,
    ):
        printed = []
        for line in dflow.stdout:
            printed.append(line.rstrip("\n"))
            if line == "Ctrl-C stops it\n":
                break
        try:
            assert "Ctrl-C stops it" == printed[-1], errors.read_text()
            yield f"http://127.0.0.1:{port}", printed
        finally:
            dflow.send_signal(signal.SIGINT)
            dflow.wait(60)


def reference(case: Case, draft: Path, sample: TokenSample, new: int, eos: list[int]) -> Decoded:
    target = Target(case.loaded.model, {**case.loaded.info, "eos_token_ids": eos}, case.loaded.device)
    speculative = decode_speculative(target, load_draft(draft), sample, new)
    assert decode_plain(target, sample, new).tokens == speculative.tokens
    return speculative


def steps_of(meta: dict[str, Any]) -> dict[int, int]:
    """How many verification steps accepted how many draft tokens."""
    return {accepted: count for accepted, count in enumerate(meta["spec_correct_drafts_histogram"]) if count}


def test_answers_and_accepted_lengths_of_prompts_equal_those_of_evaluate(vision, server):
    url, _printed = server
    case = vision.case
    expected = case.reference(vision.draft)
    assert case.plain != expected
    assert [plain.tokens for plain in case.plain] == [decoded.tokens for decoded in expected]
    totals = Counter()
    for index, (question, count, decoded) in enumerate(zip(QUESTIONS, COUNTS, expected, strict=True)):
        place = "<|vision_start|><|image_pad|><|vision_end|>" * count
        body = {
            "text": f"<|im_start|>user\n{place}{question}<|im_end|>\n<|im_start|>assistant\n",
            "image_data": [base64.b64encode(png(image)).decode() for image in IMAGES[index % 2 :][:count]] or None,
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": NEW_TOKENS + 1,
                "stop_token_ids": sorted(case.eos),
            },
        }
        given = httpx.post(f"{url}/generate", json=body, timeout=120).json()
        meta = given["meta_info"]
        assert list(decoded.tokens) == given["output_ids"]
        assert case.prompts[index].prompt_tokens == meta["prompt_tokens"]
        assert (decoded.steps, dict(Counter(decoded.accepted))) == (meta["spec_verify_ct"], steps_of(meta))
        totals += Counter(tokens=meta["completion_tokens"] - 1, steps=meta["spec_verify_ct"])
    tau = sum(one.generated for one in expected) / sum(one.steps for one in expected)
    served = totals["tokens"] / totals["steps"]
    print(f"tau over HTTP {served:.4f}, of decode_speculative {tau:.4f}")
    assert tau == served
    assert 1.2 < tau < BLOCK - 1  # neither by chance nor by heart


def test_chats_with_images_as_data_urls_equal_what_dflow_tokenised(vision, server):
    url, _printed = server
    for body, sample in vision.chat():
        eos = sorted(vision.case.eos)
        decoded = reference(vision.case, vision.draft, sample, NEW_TOKENS, eos)
        asked = {
            **body,
            "model": "default",
            "temperature": 0,
            "max_tokens": NEW_TOKENS + 1,
            "stop_token_ids": eos,
            "return_meta_info": True,
            "return_token_ids": True,
        }
        choice = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=120).json()["choices"][0]
        meta = choice["meta_info"]
        assert sample.prompt_tokens == meta["prompt_tokens"]
        assert list(decoded.tokens) == choice["response_token_ids"]
        assert (decoded.steps, dict(Counter(decoded.accepted))) == (meta["spec_verify_ct"], steps_of(meta))


def test_dflow_shows_a_held_out_prompt_with_its_answer_and_tau(vision, server):
    _url, printed = server
    sample = next(sample for _body, sample in vision.chat() if sample.category == "image")
    config = read_json(vision.case.checkpoint / "generation_config.json")
    decoded = reference(vision.case, vision.draft, sample, MAX_TOKENS - 1, [config["eos_token_id"]])

    assert f"-m ops.lib.sglang.launch_server --model-path {vision.store.path}" in printed[0]
    assert "lacks a method that DFLASH needs for qwen3_vl targets" in printed[1]
    shown = next(line for line in printed if line.startswith("tau: "))
    found = re.fullmatch(r"tau: (\S+) \((\d+) tokens after the first in (\d+) verification steps\); .*: (\S+)", shown)
    tau, accept = decoded.generated / decoded.steps, len(decoded.tokens) / decoded.steps
    assert (f"{tau:.3g}", str(decoded.generated), str(decoded.steps), f"{accept:.3g}") == found.groups()
    assert f"({sample.id}, 1 image(s))" in "\n".join(printed)
    assert "tau of the evaluation, over all its prompts: 2.5" in printed


@pytest.mark.parametrize("algorithm", [None, Dspark(rank=8, sample_from_anchor=False)], ids=["dflash", "dspark"])
def test_a_text_target_passes_the_check_with_sglangs_own_launcher(tmp_path, algorithm):
    """Tokens, by their text, and verification steps are those of dflow's own decoding."""
    run = make_run(tmp_path, "qwen3", "trained", images=False, algorithm=algorithm)
    command = run.dflow_serve(free_port(), "--check")
    result = subprocess.run(command, env=cpu_environment(), capture_output=True, text=True, timeout=300)

    assert (0, "") == (result.returncode, result.stderr)
    assert "-m sglang.launch_server " in result.stdout
    assert f" --speculative-algorithm {'DFLASH' if algorithm is None else 'DSPARK'} " in result.stdout
    assert f" --speculative-num-draft-tokens {BLOCK} " in result.stdout
    sample = run.chat()[0][1]
    config = read_json(run.case.checkpoint / "generation_config.json")
    decoded = reference(run.case, run.draft, sample, MAX_TOKENS - 1, [config["eos_token_id"]])
    tau, accept = decoded.generated / decoded.steps, len(decoded.tokens) / decoded.steps
    print(f"{decoded.generated} tokens in {decoded.steps} steps")
    assert 1.2 < tau < BLOCK  # of its tokens the first 30 are learnt
    text = load_processor(str(run.case.checkpoint)).tokenizer.decode(decoded.tokens, skip_special_tokens=True)
    assert f"({sample.id})\nanswer: {printable(text)}\n" in result.stdout
    assert (
        f"tau: {tau:.3g} ({decoded.generated} tokens after the first in {decoded.steps} verification steps); SGLang's "
        f"spec_accept_length, which also counts the first token: {accept:.3g}\n"
    ) in result.stdout


def test_sglangs_refusal_of_a_cpu_is_told_before_anything_is_loaded(vision, tmp_path):
    """With the patches for any model, and without those that open the gate of DFLASH."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        f"import sys\nsys.path.append({str(Path(__file__).parent / 'cpu_support')!r})\n"
        "import import_hooks, platform_patches\nimport_hooks.install()\n"
    )
    environment = cpu_environment() | {"PYTHONPATH": f"{site}:{Path(__file__).parents[2]}"}
    command = vision.dflow_serve(free_port(), "--check")
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    assert 1 == result.returncode
    assert "SGLang refuses DFLASH on this machine; run the command on one with a GPU" in result.stderr
    assert "DFLASH speculative decoding is not supported by" in result.stderr
    log = next(find_record(vision.store.records, vision.run).folder.glob("serve-*.log"))
    assert "Load weight begin" not in log.read_text()
