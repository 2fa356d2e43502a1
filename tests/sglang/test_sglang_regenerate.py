"""The target's answers from SGLang's own HTTP server: those of the target loaded here."""

from __future__ import annotations

import shutil

import pytest
from attrs import frozen
from fake_stage import folder_digest
from regenerate_cases import PARROTED, answers_of, artifact_of, make_talker, run, run_endpoint, turn
from server_process import running_server

from dsl.errors import DataError
from ops.artifacts import ImageSamples
from ops.lib.data.files import read_json, read_jsonl, write_jsonl

CONTEXT = 256
OPTIONS = {"max_new_tokens": 16, "finish_reasons": ("stop", "length"), "min_answer_tokens": 1}


@frozen
class Endpoint:
    url: str


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    return make_talker(tmp_path_factory.mktemp("talker"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory) -> ImageSamples:
    """Texts and pictures, several turns, a system prompt, and two pictures in one conversation."""
    artifact = artifact_of(tmp_path_factory.mktemp("asked") / "samples", lambda _: PARROTED)
    rows = list(read_jsonl(artifact.path / "samples.jsonl"))
    rows[3]["messages"].insert(0, turn("system", "Be brief."))
    pictures = [rows[0]["images"][0], rows[1]["images"][0]]
    messages = [turn("user", "Which one is it?", image=True), turn("assistant", "?")] * 2
    rows.append({**rows[0], "id": "two-pictures", "messages": messages, "images": pictures})
    write_jsonl(artifact.path / "samples.jsonl", rows)
    return ImageSamples(artifact.path, folder_digest(artifact.path))


@pytest.fixture(scope="module")
def server(talker, tmp_path_factory):
    arguments = ["--model-path", str(talker.path / "model"), "--served-model-name", "talker", "--dtype", "float32"]
    arguments += ["--image-processor-backend", "pil", "--context-length", str(CONTEXT)]
    with running_server(tmp_path_factory.mktemp("server"), arguments) as running:
        yield Endpoint(f"{running.url}/v1")


@pytest.fixture(scope="module")
def local(samples, talker, tmp_path_factory):
    return run(tmp_path_factory.mktemp("local"), samples, talker, **OPTIONS)


@pytest.mark.parametrize("dialect", ["auto", "openai"])
def test_sglang_gives_the_bytes_of_the_target_itself(samples, talker, server, local, dialect, tmp_path):
    """auto: by the ids of the tokens, which SGLang tells; openai: by the text alone."""
    stage = run_endpoint(tmp_path, samples, talker, server, **OPTIONS, dialect=dialect)
    assert answers_of(local) == answers_of(stage)
    assert (dialect == "auto") == (folder_digest(local.out_dir) == folder_digest(stage.out_dir))  # ids by auto only
    assert {1, 2} == {len(texts) for texts in answers_of(stage).values()}
    assert [0] == stage.metric("regenerate/prompted_differently")
    assert "sglang" == read_json(stage.out_dir / "measurements.json")["server"]["owned_by"]


def test_sglang_answers_prompts_of_ids_with_the_bytes_of_the_target_itself(samples, talker, server, tmp_path):
    folder = tmp_path / "samples"
    folder.mkdir()
    texts = [row for row in read_jsonl(samples.path / "samples.jsonl") if not row["images"]]
    write_jsonl(folder / "samples.jsonl", texts)
    asked = ImageSamples(folder, folder_digest(folder))
    local = run(tmp_path / "local", asked, talker, **OPTIONS)
    stage = run_endpoint(tmp_path / "served", asked, talker, server, **OPTIONS, prompts="ids")
    assert folder_digest(local.out_dir) == folder_digest(stage.out_dir)
    assert [0] == stage.metric("regenerate/prompted_differently")


def test_a_prompt_that_sglang_refuses_drops_its_sample_with_what_sglang_says(samples, talker, server, local, tmp_path):
    folder = tmp_path / "samples"
    shutil.copytree(samples.path, folder)
    rows = list(read_jsonl(folder / "samples.jsonl"))
    long = {**rows[3], "id": "long", "messages": [turn("user", "Describe the square. " * 100)]}
    write_jsonl(folder / "samples.jsonl", [*rows, long])
    stage = run_endpoint(tmp_path, ImageSamples(folder, "long"), talker, server, **OPTIONS)
    assert {"refused by the server": 1} == read_json(stage.out_dir / "summary.json")["dropped"]
    dropped = (stage.out_dir / "dropped.csv").read_text()
    assert "long,refused by the server" in dropped
    assert str(CONTEXT) in dropped
    assert answers_of(local) == answers_of(stage)


def test_sglang_is_told_to_read_other_images_than_tokenize_chat_would_make(samples, talker, server, tmp_path, capsys):
    """The sizes of images are the server's affair: where they are not those of the config, every image tells."""
    stage = run_endpoint(tmp_path, samples, talker, server, **OPTIONS, splits=("val",), min_pixels=64 * 64)
    assert [2] == stage.metric("regenerate/prompted_differently") == stage.metric("regenerate/answers")
    assert 'reads another prompt of sample "picture-blue"' in capsys.readouterr().out


def test_a_name_that_sglang_does_not_serve_is_refused_although_sglang_would_answer(samples, talker, server, tmp_path):
    with pytest.raises(DataError, match='serves no model "parrot"; it serves "talker"'):
        run_endpoint(tmp_path, samples, talker, server, model="parrot")


def test_a_parameter_that_sglang_refuses_ends_the_stage_before_the_samples(samples, talker, server, tmp_path):
    with pytest.raises(
        DataError, match=r"rejects requests: 400: frequency_penalty must be.*\n.*check the parameters, including extra"
    ):
        run_endpoint(tmp_path, samples, talker, server, extra_body={"frequency_penalty": 77.0})
