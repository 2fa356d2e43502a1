"""`dflow init`: what it sees in a user's data, and a file that compiles as it stands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli
from family_checkpoints import make_checkpoint
from format_cases import (
    as_struct,
    data_url,
    llava,
    openai,
    own,
    write_arrow,
    write_csv,
    write_images,
    write_json,
    write_parquet,
)
from init_cases import chat, checkpoint, nodes, write_flat_photos, write_photos
from PIL import Image

from dsl.check import FILL_IN
from dsl.errors import PipelineError
from dsl.read_toml import read_graph
from executor.cli import main
from executor.commands import init
from ops.lib.target.token_ids import mask_warning
from ops.tools.init import advice, survey, text
from ops.tools.init.survey import TURN_TOKENS, Counter
from ops.tools.init.target import Measured, Target
from ops.tools.init.text import PLACEHOLDER


def test_lengths_are_counted_with_the_targets_tokenizer(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(project / "chat.jsonl", 200, answer=" ".join(["word"] * 295))
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    made = nodes(project / "pipeline.toml")
    said = capsys.readouterr().out
    assert "data: 200 samples (json), 0 with images, 200 text only" in said
    assert "tokens of a sample: median 308, 95 % 308, longest 308 (by the target's tokenizer; of 200 samples)" in said
    assert "tokens of an answer: median 296, 95 % 296, longest 296" in said
    assert "features: stored; 61,600 tokens x 645 bytes (5 layers of 32, 4 bytes each) = 40 MB" in said
    assert ("chat.jsonl", 61_600) == (made["ingest"]["source"], made["tokenize"]["expected_tokens"])
    assert (640, 256, 896) == (
        made["regenerate"]["max_new_tokens"],
        made["regenerate"]["max_prompt_tokens"],
        made["tokenize"]["max_length"],
    )
    switch = [line for line in (project / "pipeline.toml").read_text().splitlines() if 'answers = "data"' in line]
    assert ['# answers = "data"                # train on the data\'s answers: nothing is generated'] == switch
    assert "counts once" not in (project / "pipeline.toml").read_text()
    assert "max_pixels" not in made["tokenize"] and "require_answers" not in made["ingest"]
    assert (16, 32) == (made["train"]["block_size"], made["tokenize"]["min_loss_tokens"])


def test_prompts_of_several_turns_have_room_for_the_target_s_own_answers(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": role, "content": "one two"} for role in ("user", "assistant") * 3]
    (project / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 20)
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    regenerate = nodes(project / "pipeline.toml")["regenerate"]
    assert regenerate["max_prompt_tokens"] >= 3 * (2 + TURN_TOKENS) + 2 * regenerate["max_new_tokens"]
    written = (project / "pipeline.toml").read_text()
    assert "up to 543 if its earlier answers have max_new_tokens" in written
    assert "each conversation counts once: more if the chat template changes its history" in written


def test_several_sources_are_surveyed_as_one_and_become_the_list_of_ingest(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(project / "chat.jsonl", 200)
    chat(project / "more.jsonl", 100, answer=None)
    write_photos(project)
    assert 0 == main(
        ["init", "chat.jsonl", "more.jsonl", "photos", "--target", checkpoint(project / "target", sees=True)]
    )
    said = capsys.readouterr().out
    pictures = len([*(project / "photos").rglob("*.png")])
    assert f"data: {300 + pictures} samples (json, image-folder), {pictures} with images, 300 text only" in said
    assert "tokens of an answer: median 5, 95 % 5, longest 5" in said  # names of classes do not count
    ingest = nodes(project / "pipeline.toml")["ingest"]
    assert ["chat.jsonl", "more.jsonl", "photos"] == ingest["source"]
    assert not ingest["require_answers"] and "question" in ingest
    assert 'answers = "data"' not in (project / "pipeline.toml").read_text()


def test_every_source_that_cannot_be_read_is_named(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(project / "chat.jsonl", 20)
    (project / "notes.txt").write_text("hello")
    (project / "empty").mkdir()
    assert 1 == main(["init", "chat.jsonl", "notes.txt", "gone.jsonl", "empty"])
    said = capsys.readouterr().err
    assert all(each in said for each in ("notes.txt: ", "gone.jsonl: no such file or folder", "empty: "))
    assert not (project / "pipeline.toml").exists()


def test_without_a_target_lengths_are_estimated_and_only_the_checkpoint_is_left_to_fill_in(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(project / "chat.jsonl", 30)
    assert 0 == main(["init", "chat.jsonl", "-o", "mine.toml"])
    assert "estimated at 4 bytes a token" in capsys.readouterr().out
    with pytest.raises(PipelineError) as caught:
        read_graph(Path("mine.toml"), [], [])
    (mistake,) = map(str, caught.value.mistakes)
    assert f"node.target.checkpoint: still to be filled in:{PLACEHOLDER.removeprefix(FILL_IN)}" in mistake


def test_the_target_s_context_limits_prompts_and_answers(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = Path(checkpoint(project / "target", sees=False))
    config = json.loads((target / "config.json").read_text())

    def lengths(positions: int) -> tuple[int, ...]:
        (target / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))
        assert 0 == main(["init", "chat.jsonl", "--target", str(target), "--force"])
        made = nodes(project / "pipeline.toml")
        given = made["regenerate"] | made["tokenize"]
        return tuple(given[each] for each in ("max_prompt_tokens", "max_new_tokens", "max_length"))

    chat(project / "chat.jsonl", 20, answer=" ".join(["word"] * 295))
    assert (256, 640, 896) == lengths(897)
    assert "positions" not in capsys.readouterr().out
    assert (447, 448, 895) == lengths(896)
    capsys.readouterr()
    assert (99, 100, 199) == lengths(200)
    said = " ".join(capsys.readouterr().out.split())
    told = "note: the target's context, 200 positions (max_position_embeddings of its config.json), limits"
    assert f"{told} max_prompt_tokens and max_new_tokens; 20 of 20 samples examined are longer, and dropped" in said


def test_a_mask_token_is_written_where_none_is_known_and_an_id_can_serve(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = Path(checkpoint(project / "target", sees=False))
    chat(project / "chat.jsonl", 20)

    def tokens(count: int, special: str, **members: Any) -> None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        names = [{"id": 0, "content": special, "special": True, **flags}]
        model = {"type": "WordLevel", "unk_token": "w1", "vocab": {f"w{number}": number for number in range(1, count)}}
        made = json.loads((target / "tokenizer.json").read_text()) | {"model": model, "added_tokens": names, **members}
        (target / "tokenizer.json").write_text(json.dumps(made))

    def written() -> tuple[int, str]:
        assert 0 == main(["init", "chat.jsonl", "--target", str(target), "--force"])
        (line,) = [row for row in (project / "pipeline.toml").read_text().splitlines() if "mask_token_id" in row]
        return nodes(project / "pipeline.toml")["target"]["mask_token_id"], line

    tokens(300, "<|endoftext|>")
    number, line = written()
    assert 300 == number
    assert line.endswith("# none is known for this model: an embedding without a token of the tokenizer")
    tokens(400, "<|reserved_special_token_0|>")
    number, line = written()
    assert 0 == number
    assert line.endswith("# none is known for this model: the unused special token <|reserved_special_token_0|>")
    tokens(400, "<|empty_output|>")
    number, line = written()
    assert 0 == number
    assert line.endswith(
        "known for this model: the special token <|empty_output|>, which the chat template does not have"
    )
    tokens(400, "<|endoftext|>")
    number, line = written()
    assert 399 == number
    assert line.endswith("the token 'w399', which none of the 20 samples examined has; another text may")
    chat(project / "chat.jsonl", 20, answer="w399 w397")
    tokens(400, "<|endoftext|>", pre_tokenizer={"type": "WhitespaceSplit"})
    assert 398 == written()[0]
    chat(project / "chat.jsonl", 20, answer=" ".join(f"w{number}" for number in range(400)))
    number, line = written()
    assert 399 == number
    assert line.endswith("# none is known for this model: the last token of the vocabulary, 'w399', which is rare")


def test_a_full_byte_level_vocabulary_masks_with_a_byte_that_no_text_has_and_plan_accepts_it(project: Path) -> None:
    target = Path(checkpoint(project / "target", sees=False))
    made = json.loads((target / "tokenizer.json").read_text())
    letters = {chr(byte): byte for byte in range(0xA1, 0x100)}
    words = {f"w{number}": number for number in (*range(0xA1), *range(0x100, 400))}
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "WordLevel", "unk_token": "w1", "vocab": words | letters}
    (target / "tokenizer.json").write_text(json.dumps(made | {"model": model, "decoder": decoder, "added_tokens": []}))
    assert 0 == main(["init", str(chat(project / "chat.jsonl", 20)), "--target", str(target)])
    assert 0xC0 == nodes(project / "pipeline.toml")["target"]["mask_token_id"]
    assert mask_warning(target, 0xC0) is None
    warning = mask_warning(target, 399)
    assert warning is not None and warning.endswith(", such as 192 (the byte 0xC0, which no valid text has)")
    (target / "tokenizer.json").write_text(json.dumps(made | {"model": model, "decoder": None, "added_tokens": []}))
    warning = mask_warning(target, 0xC0)
    assert warning is not None and "; this vocabulary has none: take one that the data does not have" in warning


def test_a_thinking_target_is_asked_not_to_in_both_nodes(project: Path) -> None:
    target = checkpoint(project / "target", sees=False)
    (project / "target" / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}")
    assert 0 == main(["init", str(chat(project / "chat.jsonl", 30)), "--target", target])
    made = nodes(project / "pipeline.toml")
    assert [False, False] == [made[node]["enable_thinking"] for node in ("regenerate", "tokenize")]


def test_every_answer_is_learnt_behind_the_prompt_of_a_server_also_where_the_template_closes_the_last_alone(
    project: Path,
) -> None:
    target = checkpoint(project / "target", sees=False)
    (project / "target" / "chat_template.jinja").write_text("<|channel|>final<|message|>")
    turn = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    (project / "chat.jsonl").write_text(f"{json.dumps({'messages': turn * 2})}\n" * 30)
    assert 0 == main(["init", "chat.jsonl", "--target", target])
    made = nodes(project / "pipeline.toml")["tokenize"]
    assert "served" == made["contexts"] and "train_on" not in made


def test_an_existing_file_is_reported_before_the_target_is_measured(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def measured(target: Target, *_show: Callable[[str], None]) -> Measured:
        asked.append(target.checkpoint)
        return Measured([])

    monkeypatch.setattr(init, "measured", measured)
    arguments = ["init", str(chat(project / "chat.jsonl", 3)), "--target", checkpoint(project / "target", sees=False)]
    (project / "pipeline.toml").touch()
    assert 1 == main(arguments)
    assert "pipeline.toml exists" in capsys.readouterr().err and not asked
    assert 0 == main([*arguments, "--force"]) and asked


THOUGHTS: dict[str, Any] = {
    "reasoning_content": {"content": "Four.", "reasoning_content": "Two and two."},
    "reasoning": {"content": "Four.", "reasoning": "Two and two."},
    "thinking": {"content": "Four.", "thinking": "Two and two."},
    "in the text": {"content": "<think>\nTwo and two.\n</think>\n\nFour."},
    "the end alone": {"content": "Two and two.\n</think>\n\nFour."},
}


@pytest.mark.parametrize("kind", THOUGHTS)
@pytest.mark.parametrize(("of_ten", "chosen"), [(10, True), (5, True), (4, False)])
def test_reasoning_in_the_answers_decides_whether_the_target_is_asked_for_it(
    project: Path, capsys: pytest.CaptureFixture[str], kind: str, of_ten: int, chosen: bool
) -> None:
    target = checkpoint(project / "target", sees=False)
    (project / "target" / "chat_template.jinja").write_text("{% if enable_thinking %}<think>{% endif %}")
    rows = []
    for place in range(30):
        answer = THOUGHTS[kind] if place % 10 < of_ten else {"content": "Four."}
        asked = {"role": "user", "content": f"{place}: two and two?"}
        rows.append({"messages": [asked, {"role": "assistant", **answer}] * (1 + (place == 0))})
    (project / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert 0 == main(["init", "chat.jsonl", "--target", target])
    made = nodes(project / "pipeline.toml")
    assert [chosen, chosen] == [made[node]["enable_thinking"] for node in ("regenerate", "tokenize")]
    assert "served" == made["tokenize"]["contexts"]
    written = (project / "pipeline.toml").read_text()
    learnt = f"{3 * of_ten + 1} of 31 learnt answers have"
    assert 2 == written.count(f"# a guess, {learnt} reasoning: as your server runs it, the same in both nodes")
    said = " ".join(capsys.readouterr().out.split())
    assert f"reasoning: {learnt} some; does your server think?" in said
    assert f"enable_thinking = {str(chosen).lower()} is a guess by that share" in said
    dropped = f'answers = "data": false drops the {3 * of_ten} samples with reasoning'
    assert f"{dropped}; with true, the {30 - 3 * of_ten} samples with an answer without any" in said


def test_reasoning_that_the_targets_template_cannot_show_is_said(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "<think>Hm.</think>Four."
    chat(project / "chat.jsonl", 30, answer)
    target = checkpoint(project / "target", sees=False)
    assert 0 == main(["init", "chat.jsonl", "--target", target])
    assert "enable_thinking" not in nodes(project / "pipeline.toml")["tokenize"]
    said = " ".join(capsys.readouterr().out.split())
    assert "the target's chat template does not read enable_thinking, which shows or hides it" in said


@pytest.mark.parametrize(("installed", "chosen"), [("0.5.21", "sglang-0.5.21"), ("0.5.22", None), (None, None)])
def test_data_with_tools_is_shown_as_the_installed_engine_shows_it(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    installed: str | None,
    chosen: str | None,
) -> None:
    monkeypatch.setattr(text, "installed_version", lambda: installed)
    asked = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Sunny."}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    rows = [{"messages": asked, "tools": tools}] * 3 + [{"messages": asked}] * 27
    (project / "chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    made = nodes(project / "pipeline.toml")
    assert [chosen, chosen] == [made[node].get("tools_as") for node in ("regenerate", "tokenize")]
    written = (project / "pipeline.toml").read_text()
    assert (0 if chosen else 2) == written.count('\n# tools_as = "sglang-0.5.23"      # the engine that will serve')
    advice = f'so tools_as = "{chosen}"' if chosen else "take in tools_as in regenerate and tokenize"
    assert "tools: 3 (10 %) of 30 samples with tools, 0 (0 %) with calls of them" in (said := capsys.readouterr().out)
    assert advice in " ".join(said.split())


def test_prompts_without_answers_are_kept_for_the_target(project: Path) -> None:
    chat(project / "chat.jsonl", 30, answer=None)
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    made = nodes(project / "pipeline.toml")
    assert (False, 512) == (made["ingest"]["require_answers"], made["regenerate"]["max_new_tokens"])


@pytest.mark.parametrize(
    ("row", "kept"),
    [({"prompt": "Why?"}, False), ({"instruction": "Why?", "input": "", "output": "For no reason at all."}, None)],
)
def test_rows_of_questions_are_surveyed_as_ingest_reads_them(project: Path, row: dict[str, str], kept: object) -> None:
    (project / "data.jsonl").write_text(f"{json.dumps(row)}\n" * 20)
    write_csv(project, [row] * 20)
    target = checkpoint(project / "target", sees=False)
    for name in ("data.jsonl", "data.csv"):
        assert 0 == main(["init", name, "--target", target, "--force"])
        assert kept is nodes(project / "pipeline.toml")["ingest"].get("require_answers")


def test_samples_with_tools_and_with_calls_are_counted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}}
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    asked = {"role": "user", "content": "What time is it?"}
    called = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    said = {"role": "assistant", "content": "It is noon."}
    rows = [{"messages": [asked, said]}] * 5
    rows += [{"messages": [asked, said], "tools": [tool]}] * 2 + [{"messages": [*called, said], "tools": [tool]}]
    (project / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert 0 == main(["init", "data.jsonl"])
    line = "tools: 3 (38 %) of 8 samples with tools, 1 (12 %) with calls of them"
    assert line in capsys.readouterr().out.splitlines()
    assert f"# {line}" in (project / "pipeline.toml").read_text().splitlines()
    assert 0 == main(["init", str(chat(project / "chat.jsonl", 30)), "-o", "plain.toml"])
    assert "tools:" not in capsys.readouterr().out


def test_large_images_get_a_limit_and_broken_ones_are_counted(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (2048, 2048)).save(project / "large.png")
    (project / "broken.png").write_bytes(b"<html>404</html>")
    rows = [
        {"messages": [{"role": "user", "content": "?"}], "image": name}
        for name in ("large.png", "broken.png", "no.png")
    ]
    (project / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 5))
    assert 0 == main(["init", "data.jsonl", "--target", checkpoint(project / "target", sees=True)])
    said = capsys.readouterr().out
    assert "dropped: 5 (image missing), such as 3: no.png" in said
    assert "relative paths start from the file's own folder; --image-root names another one" in " ".join(said.split())
    assert "images: 5 of 10 examined can be decoded, 2048 x 2048 to 2048 x 2048 pixels" in said
    assert "dropped: 5 (image undecodable), such as 2: 16 bytes" in said
    assert "data: 5 samples (json), 5 with images, 0 text only" in said
    made = nodes(project / "pipeline.toml")
    assert [1_048_576] * 2 == [made[node]["max_pixels"] for node in ("regenerate", "tokenize")]
    assert 1280 + 256 == made["regenerate"]["max_prompt_tokens"]  # 1,024 for the image, and a quarter more


@pytest.mark.parametrize("is_folder", [True, False])
def test_samples_with_a_broken_image_do_not_count(
    project: Path, capsys: pytest.CaptureFixture[str], is_folder: bool
) -> None:
    """In a folder of images and in rows: what init counts is what inject_images keeps."""
    (project / "photos").mkdir()
    for place in range(30):
        Image.new("RGB", (64, 48)).save(project / "photos" / f"{place}.png")
    for place in range(6):
        (project / "photos" / f"{place}.png").write_bytes(b"<html>404</html>")
    rows = [{"prompt": "?", "image": f"photos/{place}.png"} for place in range(30)]
    (project / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    source = "photos" if is_folder else "rows.jsonl"
    assert 0 == main(["init", source, "--target", checkpoint(project / "target", sees=True)])
    said = " ".join(capsys.readouterr().out.split())
    assert "data: 24 samples (" in said and "24 with images, 0 text only" in said
    assert "images: 24 of 30 examined can be decoded" in said and "dropped: 6 (image undecodable)" in said
    splits = re.search(r"splits: (\d+) train, (\d+) val, (\d+) test", said)
    assert splits is not None and 24 == sum(map(int, splits.groups()))
    counted = nodes(project / "pipeline.toml")["tokenize"]["expected_tokens"]
    assert 0 == counted % 24 and f"tokens in total: about {counted:,}" in said


def test_of_images_that_were_not_examined_the_same_share_does_not_count(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "DECODED", 4)
    Image.new("RGB", (64, 48)).save(project / "sound.png")
    (project / "broken.png").write_bytes(b"")
    rows = [{"prompt": "?", "image": f"{('sound', 'broken')[place % 2]}.png"} for place in range(40)]
    rows += [{"prompt": "?"}] * 10
    (project / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = survey.survey((project / "rows.jsonl",), Counter.of(None))
    unseen = 40 - found.examined
    assert (0 < found.spoilt, 50 - found.spoilt) == (unseen > 0, found.samples)
    assert found.samples - round(unseen * found.spoilt / found.examined) == found.usable < found.samples
    assert 0 == main(["init", "rows.jsonl", "--target", checkpoint(project / "target", sees=True)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"data: {found.usable} samples (json), {found.usable - 10} with images, 10 text only" in said
    assert f"images: of the samples that were not examined {found.unseen_spoilt} do not count either" in said


@pytest.mark.parametrize(
    ("form", "write"),
    [
        ("json", lambda folder: write_json(folder, own)),
        ("json", lambda folder: write_json(folder, llava, array=True)),
        ("json", lambda folder: write_json(folder, openai(data_url))),
        ("parquet", lambda folder: write_parquet(folder, as_struct)),
        ("arrow", lambda folder: write_arrow(folder, as_struct)),
    ],
)
def test_the_same_samples_are_seen_in_every_format(
    project: Path, capsys: pytest.CaptureFixture[str], form: str, write: Callable[[Path], Path]
) -> None:
    write_images(project)
    source = write(project)
    assert 0 == main(["init", str(source), "--target", checkpoint(project / "target", sees=True)])
    said = capsys.readouterr().out
    assert f"data: 10 samples ({form}), 8 with images, 2 text only" in said
    assert "images: 10 of 10 examined can be decoded, 40 x 36 to 96 x 36 pixels" in said
    made = nodes(project / "pipeline.toml")
    assert "in-place" == made["inject"]["image_policy"]
    assert source == project / made["ingest"]["source"] and not Path(made["ingest"]["source"]).is_absolute()


def test_images_by_class_get_a_question_and_no_setting_is_taken_from_the_names_of_classes(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat", "dog"):
        (project / "photos" / name).mkdir(parents=True)
        for place in range(12):
            Image.new("RGB", (64, 48)).save(project / "photos" / name / f"{place}.png")
    assert 0 == main(["init", "photos", "--target", checkpoint(project / "target", sees=True)])
    made = nodes(project / "pipeline.toml")
    assert ("What is in the image?", 16) == (made["ingest"]["question"], made["train"]["block_size"])
    assert (32, 512) == (made["tokenize"]["min_loss_tokens"], made["regenerate"]["max_new_tokens"])
    said = " ".join(capsys.readouterr().out.split())
    tokens = 24 * (TURN_TOKENS + 5 + 4 + 256)  # five words, an image of 2 x 2 tokens, and half of 512
    assert f"tokens in total: about {tokens:,}, if the target's answers are half as long as max_new_tokens" in said
    assert f"stored; {tokens:,} tokens x" in said and tokens == made["tokenize"]["expected_tokens"]
    assert "answers: the names of classes do not count; the target answers" in said
    assert 'answers = "data"' not in (project / "pipeline.toml").read_text()
    assert "tokens of an answer" not in said and "median 14, 95 % 14, longest 14" in said


@pytest.mark.parametrize(
    ("words", "expected", "told"),
    [
        ((40, 40, 40), 32, "shorter answers are dropped, and counted\n"),
        ((40, 40, 3), 32, "shorter answers are dropped, and counted; 1 of 3 examined are\n"),
        ((3, 40, 3), 4, "few have 16, twice the block size\n"),
        ((6, 7, 9), 7, "few have 16, twice the block size\n"),
    ],
)
def test_most_of_the_data_has_as_many_answer_tokens_as_are_asked_for(
    project: Path, words: tuple[int, ...], expected: int, told: str
) -> None:
    for place, count in enumerate(words):
        chat(project / f"{place}.jsonl", 1, answer=" ".join(["word"] * count))
    joined = "".join((project / f"{place}.jsonl").read_text() for place in range(len(words)))
    (project / "all.jsonl").write_text(joined)
    assert 0 == main(["init", "all.jsonl", "--target", checkpoint(project / "target", sees=False)])
    made = nodes(project / "pipeline.toml")
    assert expected == made["tokenize"]["min_loss_tokens"]
    assert told in (project / "pipeline.toml").read_text()


def test_a_log_of_an_agent_is_learnt_by_its_last_answers_and_keeps_its_calls(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "w", "arguments": {"city": "Paris"}}}]}
    result = {"role": "tool", "tool_call_id": "x", "content": "sunny"}
    answer = {"role": "assistant", "content": " ".join(["word"] * 60)}
    rows = []
    for place in range(40):
        asked = [{"role": "user", "content": f"Question {place}"}]
        for messages, said in ((asked, call), ([*asked, call, result], answer)):
            response = {"choices": [{"message": said, "finish_reason": "stop"}]}
            rows.append({"request": {"messages": messages, "tools": [{"name": "w"}]}, "response": response})
    (project / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = checkpoint(project / "target", sees=False)
    assert 0 == main(["init", "log.jsonl", "--target", target])
    made = nodes(project / "pipeline.toml")
    text = (project / "pipeline.toml").read_text()
    assert ("last", 2) == (made["ingest"]["learnt_in_requests"], made["tokenize"]["min_loss_tokens"])
    assert "train_on" not in made["tokenize"]
    assert "later requests of a log have the earlier answers again, and each is learnt once" in text
    assert "drawn by hash of the conversation" in text and "duplicate_ids" not in made["ingest"]
    chat(project / "chat.jsonl", 200, answer=" ".join(["word"] * 60))
    assert 0 == main(["init", "chat.jsonl", "log.jsonl", "--target", target, "--force"])
    assert "last" == nodes(project / "pipeline.toml")["ingest"]["learnt_in_requests"]
    assert "drawn by hash of the id, of requests of the conversation" in (project / "pipeline.toml").read_text()


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("each", 'so learnt_in_requests = "last": later requests of a log have the earlier answers again'),
        ("last", "most conversations are in the log by their last request only, so all answers are learnt"),
        ("last, of the same question", "most conversations are in the log by their last request only, so all answers"),
        ("last, without earlier reasoning", "earlier answers came back without the reasoning that last ones have"),
    ],
)
def test_what_is_learnt_of_requests_follows_from_whether_the_log_has_those_before(
    project: Path, capsys: pytest.CaptureFixture[str], kind: str, told: str
) -> None:
    rows = []
    for place in range(40):
        question = "Well?" if "same" in kind else f"Question {place}"
        first, second = {"role": "user", "content": question}, {"role": "user", "content": f"Then {place}?"}
        own = {"role": "assistant", "content": f"First {place}."}
        said = {"content": "word " * 30} | ({"reasoning_content": "Hm."} if "reasoning" in kind else {})
        asked = ([first], own), ([first, own, second], said)
        for messages, message in asked if kind == "each" else asked[1:]:
            response = {"choices": [{"message": message, "finish_reason": "stop"}]}
            rows.append({"request": {"messages": messages}, "response": response})
    (project / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 0 == main(["init", "log.jsonl"])
    said = " ".join(capsys.readouterr().out.split())
    before = 40 if kind == "each" else 0
    assert f"requests: 40 of {len(rows)} have earlier answers, and of {before} of them the log has the request" in said
    assert told in said
    text = (project / "pipeline.toml").read_text()
    is_last = kind in ("each", "last, without earlier reasoning")
    assert (is_last, not is_last) == (
        '\nlearnt_in_requests = "last"' in text,
        '\n# learnt_in_requests = "last"' in text,
    )


def logged(reasons: list[str], answer: str = "word " * 40) -> str:
    """A log with a request for each finish reason."""
    rows = [
        {
            "request": {"messages": [{"role": "user", "content": f"Question {place}"}]},
            "response": {"choices": [{"message": {"content": answer}, "finish_reason": reason}]},
        }
        for place, reason in enumerate(reasons)
    ]
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def test_few_requests_without_a_usable_answer_are_counted_by_reason_and_change_nothing(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "log.jsonl").write_text(logged(["stop"] * 40 + ["length", "length", "error"]))
    assert 0 == main(["init", "log.jsonl"])
    said = " ".join(capsys.readouterr().out.split())
    assert "data: 40 samples (json)" in said and "user's turn" not in said
    assert "dropped: 2 (the answer was cut at its limit), such as 41; set require_answers = false" in said
    assert "dropped: 1 (the request failed), such as 43;" in said and "warning:" not in said
    assert "require_answers" not in tomli.loads((project / "pipeline.toml").read_text())["node"]["ingest"]


def test_many_requests_without_a_usable_answer_are_prompts_and_a_warning(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "log.jsonl").write_text(logged(["stop"] * 30 + ["length"] * 9 + ["error"]))
    assert 0 == main(["init", "log.jsonl"])
    said = " ".join(capsys.readouterr().out.split())
    reasons = "9 the answer was cut at its limit, 1 the request failed"
    assert (
        f"warning: 10 of 40 requests have no usable answer ({reasons}): they are kept as prompts (require_answers = "
        "false is written), which the target answers; " in said
    )
    assert "user's turn" not in said
    assert not tomli.loads((project / "pipeline.toml").read_text())["node"]["ingest"]["require_answers"]


def test_a_share_of_dropped_rows_as_a_run_would_warn_of_is_a_warning_with_what_to_do(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "w", "arguments": {}}}]}
    bad = [{"messages": [{"role": "user", "content": f"{place}"}, call]} for place in range(5)]
    chat(project / "chat.jsonl", 35, answer="word " * 40)
    with (project / "chat.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in bad)
    assert 0 == main(["init", "chat.jsonl"])
    said = " ".join(capsys.readouterr().out.split())
    assert 'tool calls without tools), such as 36; give each row its "tools", or set default_tools' in said
    assert "warning: 12% of the samples (5 of 40) are dropped: 5 tool calls without tools" in said


def test_short_answers_that_would_be_dropped_are_a_warning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(project / "short.jsonl", 8, answer="one two")
    chat(project / "long.jsonl", 32, answer="word " * 60)
    target = checkpoint(project / "target", sees=False)
    assert 0 == main(["init", "short.jsonl", "long.jsonl", "--target", target])
    said = " ".join(capsys.readouterr().out.split())
    assert "warning: 8 of 40 samples examined have fewer than min_loss_tokens = 32 answer tokens" in said


def test_a_template_that_shows_no_tools_is_a_warning_of_init_and_plan(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Sunny. " * 40}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    rows = [{"request": {"messages": asked[:1], "tools": tools}, "response": asked[1]["content"]}] * 40
    (project / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    target = checkpoint(project / "target", sees=False)
    assert 0 == main(["init", "log.jsonl", "--target", target])
    warning = "the target's chat template shows no tools, so 40 samples with tools are dropped: give load_target a"
    assert f"warning: {warning} chat_template" in " ".join(capsys.readouterr().out.split())
    assert 0 == main(["plan", "pipeline.toml"])
    warning = "the target's chat template shows no tools, so samples with tools are dropped: give load_target a"
    assert 1 == " ".join(capsys.readouterr().out.split()).count(f"warning: {warning}")
    assert 0 == main(["plan", "pipeline.toml", "-s", 'regenerate.answers="data"'])
    assert 1 == " ".join(capsys.readouterr().out.split()).count(f"warning: {warning}")
    (project / "target" / "chat_template.jinja").write_text("{{ messages }}{{ tools }}")
    assert 0 == main(["init", "log.jsonl", "--target", target, "--force"])
    assert 0 == main(["plan", "pipeline.toml"])
    assert "shows no tools" not in capsys.readouterr().out


def test_a_target_of_two_layers_is_captured_at_its_first_and_planned_as_it_stands(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = checkpoint(project / "target", sees=False)
    config = json.loads((project / "target" / "config.json").read_text())
    (project / "target" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    chat(project / "chat.jsonl", 200)
    assert 0 == main(["init", "chat.jsonl", "--target", target])
    assert [0] == nodes(project / "pipeline.toml")["capture"]["target_layer_ids"]
    assert 0 == main(["plan", "pipeline.toml"])
    written = (project / "pipeline.toml").read_text()
    line = next(line for line in written.splitlines() if line.startswith("target_layer_ids"))
    (project / "pipeline.toml").write_text(written.replace(line, "num_layers = 1"))
    assert 2 == main(["plan", "pipeline.toml"])
    said = " ".join(capsys.readouterr().out.split())
    assert "has none between its 2nd and 3rd-last; set target_layer_ids = [0] instead" in said
    (project / "target" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert 1 == main(["init", "chat.jsonl", "--target", target, "--force"])
    assert "the target has 1 layer" in capsys.readouterr().err


def test_features_that_the_disk_does_not_hold_are_captured_while_training(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(project / "chat.jsonl", 100)
    monkeypatch.setattr(init, "free_bytes", lambda _folder: 1000)
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    made = nodes(project / "pipeline.toml")
    assert ("online", "@tokenize") == (made["train"]["capture"], made["shard"]["tokens"])
    assert "capture" not in made and "features: captured while training" in capsys.readouterr().out


@pytest.mark.parametrize("stored", [True, False])
def test_an_algorithm_is_recommended_with_its_reason_and_each_other_one_is_a_line_to_take_in(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stored: bool
) -> None:
    chat(project / "chat.jsonl", 100)
    if not stored:
        monkeypatch.setattr(init, "free_bytes", lambda _folder: 1000)
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    assert "algorithm: dflash, known to SGLang and vLLM, the cheapest step, no teacher" in capsys.readouterr().out
    assert "dflash" == nodes(project / "pipeline.toml")["train"]["algorithm"]
    text = (project / "pipeline.toml").read_text()
    for name in ("dflash2", "dspark", "lilicorr"):
        other = text.replace('\nalgorithm = "dflash" ', '\n# algorithm = "dflash" ')
        other = other.replace(f'# algorithm = "{name}"', f'algorithm = "{name}"')
        if name != "dflash2":
            assert ("final_hidden = true in [node.capture]" in other) == stored
            other = other.replace("# final_hidden = true", "final_hidden = true")
        (project / "other.toml").write_text(other)
        assert 0 == main(["plan", "other.toml"]), name
        graph = read_graph(project / "other.toml")
        assert name == graph.nodes["train"].config.algorithm
        assert "capture" not in graph.nodes or graph.nodes["capture"].config.final_hidden == (name != "dflash2")


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("empty", ["contains neither JSON, Parquet nor CSV", "the folder is empty"]),
        ("papers", ["contains neither JSON, Parquet nor CSV", "files found: 2 .pdf, 1 no suffix"]),
        ("broken.jsonl", ["broken.jsonl:2: broken JSON at column 13", 'broken.jsonl:3: no list "messages"']),
        ("nothing.jsonl", ["nothing.jsonl: holds no samples"]),
        (
            "missing.jsonl",
            ["none of its 2 samples can be used", "2 (image missing), such as 1: no.png", "--image-root"],
        ),
        ("nowhere", ["nowhere: no such file or folder"]),
    ],
)
def test_data_that_cannot_be_used_is_told_with_all_that_is_wrong(
    project: Path, capsys: pytest.CaptureFixture[str], source: str, told: list[str]
) -> None:
    (project / "empty").mkdir()
    (project / "papers").mkdir()
    for name in ("a.pdf", "b.PDF", "c"):
        (project / "papers" / name).write_bytes(b"%PDF")
    (project / "broken.jsonl").write_text('{"messages": []}\n{"messages": \n{"conversations": 3}\n')
    (project / "nothing.jsonl").write_text("\n")
    chat(project / "missing.jsonl", 2, image="no.png")
    assert 1 == main(["init", source])
    said = capsys.readouterr().err
    assert [] == [part for part in told if part not in said], said
    assert [] == [*project.glob("*.toml")]


def test_data_target_and_file_are_refused_together(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (64, 64)).save(project / "a.png")
    chat(project / "data.jsonl", 3, image="a.png")
    (project / "pipeline.toml").write_text("mine")
    target = checkpoint(project / "target", sees=False)
    assert 1 == main(["init", "data.jsonl", "--target", target])
    said = capsys.readouterr().err
    assert "pipeline.toml exists" in said and "the target (qwen3) takes no images" in said
    assert "mine" == (project / "pipeline.toml").read_text()


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        ("talks.v2.jsonl", "pipeline.toml", "talks.v2"),
        ("my talks (2026), größer.jsonl", "pipeline.toml", "my-talks-2026-größer"),
        ("talks 2.5", "pipeline.toml", "talks-2.5"),
        (".", "pipeline.toml", "here"),
        ("!.jsonl", "pipeline.toml", "pipeline"),
        ("talks.v2.jsonl", "second.toml", "second"),
        ("talks.v2.jsonl", "sub/pipeline.toml", "talks.v2"),
    ],
)
def test_the_pipeline_is_called_as_the_data_unless_the_file_has_a_name_of_its_own(
    project: Path, monkeypatch: pytest.MonkeyPatch, source: str, output: str, expected: str
) -> None:
    (project / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(project / "here")
    path = project / "here" / source
    if path.suffix != ".jsonl":
        path.mkdir(exist_ok=True)
        path = path / "chat.jsonl"
    chat(path, 10)
    target = checkpoint(project / "target", sees=False)
    assert 0 == main(["init", source, "-o", output, "--target", target])
    graph = read_graph(Path(output), [], [])
    assert (expected, expected) == (graph.name, graph.experiment)


@pytest.mark.parametrize(
    ("samples", "most", "expected", "saved", "told"),
    [
        (10, 500, None, 3, "omitted: of about 36 steps only the last is worth measuring"),
        (120, 500, 50, 38, "a tenth of the steps, but 50 to 500: a rule of thumb"),
        (3000, 500, 180, 180, "a tenth of the steps: a rule of thumb"),
        (3000, 70, 70, 70, "a tenth of the steps, but 50 to 70: a rule of thumb"),
    ],
)
def test_val_is_measured_at_a_tenth_of_the_steps_and_of_few_only_at_the_end(
    project: Path, monkeypatch: pytest.MonkeyPatch, samples: int, most: int, expected: int | None, saved: int, told: str
) -> None:
    monkeypatch.setattr(advice, "MOST_BETWEEN", most)
    chat(project / "chat.jsonl", samples, answer=" ".join(["word"] * 200))
    assert 0 == main(["init", "chat.jsonl", "--target", checkpoint(project / "target", sees=False)])
    train = nodes(project / "pipeline.toml")["train"]
    assert (expected, saved) == (train.get("eval_every"), train.get("checkpoint_every"))
    text = (project / "pipeline.toml").read_text()
    assert told in text
    lost = "about a tenth of the training" if most == 500 else "70 steps"
    assert f"steps; an attempt that is killed loses at most {lost}" in text


@pytest.mark.parametrize(
    "write",
    [
        write_photos,
        write_flat_photos,
        lambda folder: chat(folder / "chat.jsonl", 40),
        lambda folder: write_parquet(folder, as_struct),
    ],
    ids=["photos", "flat photos", "JSONL", "Parquet"],
)
def test_what_is_written_can_be_planned_as_it_stands(
    project: Path, capsys: pytest.CaptureFixture[str], write: Callable[[Path], Path]
) -> None:
    write_images(project)
    source = write(project)
    make_checkpoint("qwen3_vl", project / "target")
    assert 0 == main(["init", str(source), "--target", "target"])
    said = capsys.readouterr().out
    assert "wrote pipeline.toml, and dflow.schema.json, which lets an editor complete and check it\nnext:\n" in said
    assert "    dflow plan pipeline.toml " in said
    assert 0 == main(["plan", "pipeline.toml"])
    plan = capsys.readouterr().out
    planned = [line.split()[0] for line in plan.splitlines()[1:] if "runs" in line.split()]
    assert list(nodes(project / "pipeline.toml")) == planned
    assert "of disk are free" in plan


def test_a_schema_that_is_there_stays_and_is_told_until_force_renews_it(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat(project / "chat.jsonl", 3)
    schema = project / "dflow.schema.json"
    schema.write_text("{}")
    assert 0 == main(["init", "chat.jsonl"])
    said = capsys.readouterr().out
    assert "{}" == schema.read_text() and "wrote pipeline.toml\nnote: the existing dflow.schema.json" in said
    assert 0 == main(["init", "chat.jsonl", "--force"])
    assert "{}" != schema.read_text() and "note: the existing" not in capsys.readouterr().out
    assert 0 == main(["init", "chat.jsonl", "-o", "another.toml"])
    assert "wrote another.toml\n" in capsys.readouterr().out  # the same schema is not written again
    assert 0 == main(["init", "chat.jsonl", "-o", "second.toml"])
    assert "note: the dflow.schema.json" not in capsys.readouterr().out


def test_held_out_prompts_are_there_however_small_the_data(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat(project / "chat.jsonl", 10)
    assert 0 == main(["init", "chat.jsonl"])
    said = capsys.readouterr().out
    assert "splits: 7 train, 1 val, 2 test" in said and "note: 10 samples show whether the chain runs" in said
    assert (
        "note: 2 samples fall into test: `dflow diagnose` judges a draft by 4 or more, and of fewer says little;"
        in (" ".join(said.split()))
    )
    chat(project / "more.jsonl", 100)
    assert 0 == main(["init", "more.jsonl", "-o", "more.toml"])
    assert "fall into test" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["dog/{}.png", "IMG_{}.jpg", "{}"])
@pytest.mark.parametrize("samples", [5, 8, 10, 40])
def test_of_few_samples_train_has_most_and_test_no_fewer_than_val(
    project: Path, capsys: pytest.CaptureFixture[str], name: str, samples: int
) -> None:
    line = json.loads(chat(project / "chat.jsonl", 1).read_text())
    rows = [json.dumps({**line, "id": name.format(place)}) for place in range(1, samples + 1)]
    (project / "chat.jsonl").write_text("\n".join(rows))
    assert 0 == main(["init", "chat.jsonl"])
    told = re.search(r"# (\d+) train, (\d+) val, (\d+) test, drawn by hash", (project / "pipeline.toml").read_text())
    assert told is not None, capsys.readouterr().out
    train, val, test = map(int, told.groups())
    assert train >= test >= val >= 1 and samples == train + val + test


@pytest.mark.parametrize(
    ("has_gpu", "arguments", "dtype"),
    [(False, [], "float32"), (True, [], "bfloat16"), (False, ["--dtype", "bfloat16"], "bfloat16")],
)
def test_a_machine_without_a_gpu_computes_in_float32_unless_told_otherwise(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_gpu: bool,
    arguments: list[str],
    dtype: str,
) -> None:
    monkeypatch.setattr(init, "may_have_gpu", lambda: has_gpu)
    chat(project / "chat.jsonl", 200)
    target = Path(checkpoint(project / "target", sees=False))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert 0 == main(["init", "chat.jsonl", "--target", str(target), *arguments])
    made = nodes(project / "pipeline.toml")
    assert {dtype} == {
        made[node].get("dtype", "float32") for node in ("regenerate", "capture", "train", "export", "eval")
    }
    assert (dtype == "bfloat16") == ("tie_margin" in made["eval"])
    said, text = capsys.readouterr().out, (project / "pipeline.toml").read_text()
    why = "no GPU here, and bfloat16 takes 3 to 20 times as long on most CPUs; with a GPU bfloat16, in every node"
    said = " ".join(said.split())
    assert (
        (dtype == "float32")
        == (f'dtype = "float32"                 # {why}' in text)
        == (f"dtype: float32; {why}" in said)
    )
    assert f"(5 layers of 32, {4 if dtype == 'float32' else 2} bytes each)" in said
