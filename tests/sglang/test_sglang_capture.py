"""States captured by SGLang's own model code against those of transformers, for every family that it runs on a CPU.

The table: the families of capture_cases.py x {text, long text, one image, two images}, and all of them in one batch.
What differs on purpose (the layer before, positions in one dimension, images swapped) differs by a hundred times more.
"""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from attrs import evolve, frozen
from capture_cases import FAMILIES, furthest, make_samples, make_target, processor_of
from family_checkpoints import picture, token_sample
from torch import Tensor

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.capture_targets.backend import forward_batch
from ops.lib.data.token_shards import TokenSample
from ops.lib.sglang import requests
from ops.lib.sglang.layers import keep_no_layers, set_layers_to_capture
from ops.lib.sglang.requests import VisionTokens, image_hash
from ops.lib.sglang.runtime import SglangRuntime
from ops.lib.target.model import Target

LAYER_IDS = (0, 1, 3, 6)  # deepstack adds behind layers 0 and 1; 6 is the last that can be captured
TIMES = 100
KINDS = ("text", "long text", "one image", "two images")


@frozen(eq=False)
class Family:
    """A target in both engines, its samples, and what transformers says of them one by one."""

    name: str
    target: TargetModel
    ours: Target
    runtime: SglangRuntime
    samples: dict[str, TokenSample]
    expected: dict[str, Tensor]
    expected_final: dict[str, Tensor]

    @property
    def tolerance(self) -> float:
        return FAMILIES[self.name].tolerance


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """SGLang's runtime of one family after the other in this process; each is closed before the next one starts."""
    target = make_target(request.param, tmp_path_factory.mktemp(request.param))
    ours = Target.load(target)
    samples = make_samples(processor_of(target), FAMILIES[request.param])
    states = {name: forward_batch(ours, [sample], LAYER_IDS, final_hidden=True) for name, sample in samples.items()}
    with ExitStack() as stack:
        runtime = stack.enter_context(
            SglangRuntime.start(
                target.path / "model", device="cpu", dtype="float32", pool_tokens=512, context_length=200
            )
        )
        yield Family(
            name=request.param,
            target=target,
            ours=ours,
            runtime=runtime,
            samples=samples,
            expected={name: features[0] for name, (features, _final) in states.items()},
            expected_final={name: final[0] for name, (_features, final) in states.items()},
        )


def captured(family, samples, layer_ids=LAYER_IDS):
    return family.runtime.capture(samples, layer_ids)


def test_states_of_each_kind_of_sample_equal_those_of_transformers(family, show):
    for kind, sample in family.samples.items():
        (states,) = captured(family, [sample])
        difference = furthest([states], [family.expected[kind]])
        scale = float(family.expected[kind].abs().max())
        show(f"{family.name}, {kind}: {difference:.1e} of {scale:.1f}, tolerance {family.tolerance:.0e}")
        assert states.shape == family.expected[kind].shape
        assert difference <= family.tolerance
        assert scale > 1


def test_texts_and_images_go_through_in_one_batch(family, show):
    samples = list(family.samples.values())
    assert family.runtime.pool_tokens >= sum(len(sample.input_ids) for sample in samples)  # one pass
    difference = furthest(captured(family, samples), list(family.expected.values()))
    show(f"{family.name}, mixed batch: {difference:.1e}, tolerance {family.tolerance:.0e}")
    assert difference <= family.tolerance


def test_more_samples_than_the_pool_holds_take_more_passes(family):
    times = 2 + family.runtime.pool_tokens // sum(len(sample.input_ids) for sample in family.samples.values())
    samples, expected = list(family.samples.values()) * times, list(family.expected.values()) * times
    assert furthest(captured(family, samples), expected) <= family.tolerance


def test_the_layer_before_would_be_seen(family, show):
    wrong = [layer_id - 1 for layer_id in LAYER_IDS[1:]]
    shifted = captured(family, list(family.samples.values()), wrong)
    width = family.ours.hidden_size
    difference = furthest(shifted, [states[:, width:] for states in family.expected.values()])
    show(f"{family.name}, the layer before: {difference:.2f} = {difference / family.tolerance:,.0f} tolerances")
    assert difference >= TIMES * family.tolerance


def test_positions_in_one_dimension_would_be_seen(family, monkeypatch, show):
    images = with_images(family)

    def in_one_dimension(_vision, input_ids, _grids):
        return torch.arange(len(input_ids)).expand(3, -1).contiguous(), torch.zeros(1, 1, dtype=torch.int64)

    monkeypatch.setattr(VisionTokens, "positions", in_one_dimension)
    for kind, sample in images.items():
        difference = furthest(captured(family, [sample]), [family.expected[kind]])
        show(f"{family.name}, {kind} at 1-D positions: {difference:.2f}")
        assert difference >= TIMES * family.tolerance


def test_swapped_images_would_be_seen(family, show):
    """Two images of one shape, whose pixels change places."""
    with_images(family)
    side = FAMILIES[family.name].side
    images = [picture(side, side, seed) for seed in (4, 5)]
    sample = token_sample(processor_of(family.target), "Which is first?", images=images, name="pair")
    assert sample.image_grid_thw[0].tolist() == sample.image_grid_thw[1].tolist()
    first, second = sample.pixel_values.chunk(2)
    assert not torch.equal(first, second)
    swapped = evolve(sample, pixel_values=torch.cat([second, first]))
    expected = forward_batch(family.ours, [sample], LAYER_IDS)[0][0]
    right, wrong = (furthest(captured(family, [one]), [expected]) for one in (sample, swapped))
    show(f"{family.name}, two images of one shape: {right:.1e}, swapped {wrong:.2f}")
    assert right <= family.tolerance
    assert wrong >= TIMES * family.tolerance


def with_images(family):
    images = {kind: sample for kind, sample in family.samples.items() if len(sample.image_grid_thw)}
    if not images:
        pytest.skip(f"{family.name} is a text model")
    return images


def test_changed_pixels_change_the_hash_and_the_states(family, monkeypatch, show):
    """And what a stale hash would do: the first image's embedding, from SGLang's cache, for the second image."""
    sample = with_images(family)["one image"]
    other = evolve(sample, pixel_values=sample.pixel_values + 0.25)
    grid = sample.image_grid_thw[0]
    assert image_hash(sample.pixel_values, grid) == image_hash(sample.pixel_values.clone(), grid)
    assert image_hash(sample.pixel_values, grid) != image_hash(other.pixel_values, grid)
    assert image_hash(sample.pixel_values, grid) != image_hash(sample.pixel_values, grid[[0, 2, 1]])
    (expected,) = forward_batch(family.ours, [other], LAYER_IDS)[0]
    honest = captured(family, [sample, other])
    monkeypatch.setattr(requests, "image_hash", lambda _pixels, _grid: 1)
    stale = captured(family, [sample, other])
    right, wrong = furthest([honest[1]], [expected]), furthest([stale[1]], [expected])
    show(f"{family.name}, a second image: {right:.1e} by its own hash, {wrong:.2f} by a stale one")
    assert right <= family.tolerance
    assert wrong >= TIMES * family.tolerance


def test_an_image_of_one_colour_is_another_one_when_it_is_turned(family, show):
    """Its pixel rows are the same numbers, so a hash of them alone would give it the first one's embedding."""
    sample = with_images(family)["one image"]
    flat = evolve(sample, pixel_values=torch.full_like(sample.pixel_values, 0.5))
    turned = evolve(flat, image_grid_thw=flat.image_grid_thw[:, [0, 2, 1]])
    for one, states in zip([flat, turned], captured(family, [flat, turned]), strict=True):
        difference = furthest([states], [forward_batch(family.ours, [one], LAYER_IDS)[0][0]])
        show(f"{family.name}, one colour, grid {one.image_grid_thw.tolist()}: {difference:.1e}")
        assert difference <= family.tolerance


def test_other_layers_replace_the_earlier_ones(family):
    """Qwen3.5's own setter would add them up."""
    width = family.ours.hidden_size
    samples = list(family.samples.values())
    for layer_ids in ((3,), (1, 6), LAYER_IDS):
        places = [LAYER_IDS.index(layer_id) for layer_id in layer_ids]
        wanted = [
            torch.cat([states[:, place * width : (place + 1) * width] for place in places], dim=-1)
            for states in family.expected.values()
        ]
        assert furthest(captured(family, samples, layer_ids), wanted) <= family.tolerance


def test_final_hidden_states_are_those_behind_the_final_norm(family, show):
    states = family.runtime.states(list(family.samples.values()), LAYER_IDS, final_hidden=True)
    difference = furthest([final for _features, final in states], list(family.expected_final.values()))
    scale = max(float(final.abs().max()) for final in family.expected_final.values())
    show(f"{family.name}, final hidden states: {difference:.1e} of {scale:.1f}")
    assert difference <= family.tolerance


def test_the_last_layer_which_sglang_drops_without_a_word_is_refused(family):
    for layer_ids, named in (((1, 7), r"\[7\]"), ((-1, 2), r"\[-1\]"), ((3, 9), r"\[9\]")):
        with pytest.raises(DataError, match=rf"layers {named} cannot be captured from 8 layers: use 0 to 6"):
            captured(family, [family.samples["text"]], layer_ids)


def test_a_model_that_keeps_fewer_layers_than_asked_for_is_found_out(family, monkeypatch):
    def forgetful(model, layer_ids, num_layers):
        if len(layer_ids) == 1:
            keep_no_layers(model)
        else:
            set_layers_to_capture(model, layer_ids[:-1], num_layers)

    monkeypatch.setattr("ops.lib.sglang.runtime.set_layers_to_capture", forgetful)
    for layer_ids, width in ((LAYER_IDS, 96), ((2,), 0)):  # without any, SGLang returns the final states in their place
        with pytest.raises(DataError, match=rf"SGLang kept states of width {width}, where those of layers"):
            captured(family, [family.samples["text"]], layer_ids)


def test_a_sample_longer_than_the_runtime_is_refused_by_name(family):
    sample = family.samples["long text"]
    many = evolve(sample, id="endless", input_ids=sample.input_ids.repeat(6), loss_mask=sample.loss_mask.repeat(6))
    with pytest.raises(DataError, match=r"sample endless: \d+ tokens, and the runtime was started for samples of 200"):
        captured(family, [many])


def cut(ids, places, _vision):
    return torch.cat([ids[: places[0]], ids[places[0] + 1 :]])


def no_start(ids, places, _vision):
    return replaced(ids, places[0] - 1, int(ids[0]))


def moved(ids, places, vision):
    """The last token of the first image among those of the second: the sum is right."""
    last = next(place for place in places if int(ids[place + 1]) != vision.image_token_id)
    without = torch.cat([ids[:last], ids[last + 1 :]])
    return torch.cat([without[: places[-1]], ids[last : last + 1], without[places[-1] :]])


def torn(ids, places, _vision):
    """A word between the tokens of the first image, which end one place later."""
    return torch.cat([ids[: places[1]], ids[:1], ids[places[1] :]])


def with_video(ids, _places, vision):
    return replaced(ids, len(ids) - 2, vision.video_token_id)


def open_end(ids, _places, vision):
    return replaced(ids, len(ids) - 1, vision.vision_start_token_id)


def replaced(ids, place, token):
    ids = ids.clone()
    ids[place] = token
    return ids


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"\d+ image tokens, but the engine expects \d+ for its 2 images"),
        (no_start, r"no vision start token before the image tokens at \[\d+\], so the images would get the positions"),
        (moved, r"runs of \[.*\] image tokens, but its images .* need runs of \["),
        (torn, r"runs of \[.*\] image tokens, but its images .* need runs of \["),
        (with_video, "it has video tokens, and only images are captured"),
        (open_end, "it ends with a vision start token, without an image after it"),
    ],
)
def test_image_tokens_that_are_not_those_of_the_images_are_refused_by_name(family, damage, message):
    sample = with_images(family)["two images"]
    vision = family.runtime.vision
    places = torch.nonzero(sample.input_ids == vision.image_token_id).flatten().tolist()
    damaged = evolve(sample, id="odd", input_ids=damage(sample.input_ids, places, vision))
    with pytest.raises(DataError, match=rf"sample odd: {message}.*: tokenize it again with the target's own processor"):
        captured(family, [damaged])


def test_pixel_rows_that_are_not_those_of_the_images_are_refused_by_name(family):
    sample = with_images(family)["two images"]
    fewer = evolve(sample, id="torn", pixel_values=sample.pixel_values[:-4])
    with pytest.raises(DataError, match=r"sample torn: \d+ pixel rows, but its grids .* need \d+: tokenize it again"):
        captured(family, [fewer])
    narrow = evolve(sample, id="narrow", pixel_values=sample.pixel_values[:, :-1].contiguous())
    with pytest.raises(DataError, match=r"sample narrow: pixel rows of \d+ numbers, but the target's patches have"):
        captured(family, [narrow])


def test_an_image_has_the_same_states_whatever_an_earlier_call_held(family, monkeypatch, show):
    """Also where two images share a hash: SGLang's cache of their embeddings lasts for one call."""
    images = with_images(family)
    one, two = images["one image"], images["two images"]
    (first,) = captured(family, [one])
    captured(family, [two, one])
    assert torch.equal(first, captured(family, [one])[0])
    other = evolve(one, pixel_values=one.pixel_values + 0.25)
    (expected,) = forward_batch(family.ours, [other], LAYER_IDS)[0]
    monkeypatch.setattr(requests, "image_hash", lambda _pixels, _grid: 1)
    captured(family, [one])
    difference = furthest(captured(family, [other]), [expected])
    show(f"{family.name}, an image behind another one of its hash in an earlier call: {difference:.1e}")
    assert difference <= family.tolerance


def test_nothing_of_a_pass_stays_in_the_pools(family):
    runner = family.runtime.runner
    pools = (runner.req_to_token_pool, runner.token_to_kv_pool_allocator)
    captured(family, [family.samples["text"]])
    free = [pool.available_size() for pool in pools]
    captured(family, list(family.samples.values()))
    assert free == [pool.available_size() for pool in pools]
    assert runner.req_to_token_pool.size <= free[0] + 1


def test_images_for_a_text_model_are_refused_by_name(family):
    if FAMILIES[family.name].has_vision:
        pytest.skip(f"{family.name} sees")
    shown = evolve(family.samples["text"], pixel_values=torch.zeros(4, 96), image_grid_thw=torch.tensor([[1, 2, 2]]))
    with pytest.raises(DataError, match="sample text: it has images, but the target is a text model"):
        captured(family, [shown])
