"""SGLang's log-probabilities and greedy answers are those of the target as dflow loads it, images included."""

from __future__ import annotations

import io
from array import array

import attrs
import colour_chats as colours
import pytest
import torch
from capture_cases import FAMILIES, furthest, make_samples, make_target, processor_of
from colour_chats import packed, trained  # noqa: F401 (fixtures)
from PIL import Image
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import MultimodalInputs, Req
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from ops.lib.data.token_shards import TokenSample
from ops.lib.drafts.losses.log_probs import token_log_probs
from ops.lib.sglang.mm_processor import ServedPrompt, ServedPrompts
from ops.lib.sglang.requests import greedy_request
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.model import Target
from ops.lib.vision.batch import collate
from ops.lib.vision.processor import load_processor
from ops.regenerate_answers.decode import generate
from ops.regenerate_answers.sampling import Sampling

CPU = {"device": "cpu", "dtype": "float32", "pool_tokens": 4096, "context_length": 1024}
QUESTION = "What colour is it?"
HELD_OUT = 6
NEW_TOKENS = 12


@pytest.mark.parametrize("name", FAMILIES)
def test_sglang_holds_an_answer_as_probable_as_we_do(name, tmp_path):
    artifact = make_target(name, tmp_path)
    samples = make_samples(processor_of(artifact), FAMILIES[name])
    ours = {case: token_log_probs(Target.load(artifact), collate([sample]))[0] for case, sample in samples.items()}
    with SglangRuntime.start(artifact.path / "model", **CPU) as runtime:
        theirs = {case: runtime.token_log_probs(sample) for case, sample in samples.items()}
    for case, sample in samples.items():
        learnt = sample.loss_mask[1:]
        difference = furthest([ours[case][learnt]], [theirs[case][learnt]])
        shifted = furthest([ours[case][1:][learnt[1:]]], [theirs[case][:-1][learnt[1:]]])
        print(
            f"{name}, {case}: log-probabilities differ by {difference:.1e}; those of the tokens before by {shifted:.1f}"
        )
        assert theirs[case].shape == ours[case].shape
        assert difference < FAMILIES[name].tolerance
        assert shifted > 1000 * FAMILIES[name].tolerance


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_solid_red_image_that_goes_through_sglangs_preprocessing_and_sampling_is_answered_red(trained):  # noqa: F811
    """And so are other pictures of every colour that the target never saw, and a text; each as transformers answers."""
    pictures = {"red": Image.new("RGB", (40, 40), (255, 0, 0))}
    generator = torch.Generator().manual_seed(1)
    for number in range(HELD_OUT):
        pictures |= {f"{colour} {number}": colours.solid(colour, generator) for colour in colours.COLOURS}
    asking = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    counting = [{"role": "user", "content": [{"type": "text", "text": "Count to 3."}]}]
    with ServedPrompts.open(trained.checkpoint) as served:
        prompts = {name: served.prompt(asking, [png(image)]) for name, image in pictures.items()}
        prompts["text"] = served.prompt(counting, [])
    processor = load_processor(str(trained.checkpoint))
    with SglangRuntime.start(trained.checkpoint, **CPU) as runtime:
        requests = [served_request(prompt, name) for name, prompt in prompts.items()]
        answers = greedy(runtime, requests, processor.eos_token_ids)
    said = dict(zip(prompts, map(processor.tokenizer.decode, answers), strict=True))
    expected = {name: f"It is {name.split()[0]}.<|im_end|>" for name in pictures}
    right = sum(said[name] == answer for name, answer in expected.items())
    print(f"SGLang's greedy answers: {right} of {len(pictures)} colours right; {said['red']!r} and {said['text']!r}")
    assert said == expected | {"text": "There are three of them.<|im_end|>"}
    target = attrs.evolve(trained.target, info={"eos_token_ids": processor.eos_token_ids})
    assert answers == answered(target, prompts)


def served_request(prompt: ServedPrompt, name: str) -> Req:
    """A greedy request from the result of SGLang's own preprocessing of a prompt."""
    images = None if prompt.output is None else MultimodalInputs.from_processor_output(prompt.output)
    padded_ids = prompt.input_ids.tolist() if images is None else images.padded_input_ids
    return greedy_request(name, prompt.input_ids, array("q", padded_ids), images, NEW_TOKENS)


@torch.inference_mode()
def greedy(runtime: SglangRuntime, requests: list[Req], eos_token_ids) -> list[list[int]]:
    """The greedy answer to each request, its EOS included; all are decoded together, step by step."""
    mm_schedule.embedding_cache.clear()
    with runtime.prepared(requests) as (batch, forward_batch):
        steps = []
        for step in range(NEW_TOKENS):
            if step:
                batch.input_ids = steps[-1].to(torch.int64)
                batch.prepare_for_decode()
                forward_batch = ForwardBatch.init_new(batch, runtime.runner, return_hidden_states_before_norm=False)
            output = runtime.runner.forward(forward_batch).logits_output
            steps.append(runtime.runner.sample(output, forward_batch))
    answers = torch.stack(steps, dim=1).tolist()
    ends = [next((at for at, token in enumerate(each) if token in eos_token_ids), NEW_TOKENS) for each in answers]
    return [answer[: end + 1] for answer, end in zip(answers, ends, strict=True)]


def answered(target: Target, prompts) -> list[list[int]]:
    """Transformers' greedy answers to the same ids and pixels."""
    samples = [
        TokenSample(
            id=name,
            category="image" if prompt.output else "text",
            input_ids=prompt.input_ids,
            loss_mask=torch.zeros(len(prompt.input_ids), dtype=torch.bool),
            pixel_values=prompt.pixel_values if prompt.output else torch.empty(0, 96),
            image_grid_thw=prompt.image_grid_thw,
            prompt_tokens=len(prompt.input_ids),
        )
        for name, prompt in prompts.items()
    ]
    return generate(target, samples, torch.zeros(len(samples), NEW_TOKENS), Sampling())
