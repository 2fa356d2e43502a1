"""Tokenizers that are not their checkpoint's: what is said of them, and of those that are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from any_targets import any_checkpoint
from fake_stage import FakeStage

from dsl.estimate import PlanContext
from dsl.launch import Launch
from ops.lib.target.tokenizer_check import tokenizer_warnings
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.plan import estimate
from ops.load_target.run import load_target, round_trip_warning
from ops.tools.init.target import measurable, measured, read_target

LLAMA = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>' + message.content "
    "+ '<|eot_id|>' }}{% endfor %}{# <|not_written|> #}{% if tools %}<|python_tag|>{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}<|user|>{{ message.content + eos_token }}{% endfor %}"
)
OF_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
OF_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


def files(folder: Path, tokens: tuple[str, ...], eos: str | dict[str, Any], ends: list[int], **settings: Any) -> Path:
    """The files by which a tokenizer is judged. tokens: special ones, with ids from 0. ends: eos_token_id."""
    added = [{"id": number, "content": token, "special": True} for number, token in enumerate(tokens)]
    tokenizer = {"model": {"vocab": {"a": len(tokens), "b": len(tokens) + 1}}, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos, **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 20, "eos_token_id": ends}))
    return folder


@pytest.mark.parametrize(
    ("tokens", "eos", "ends", "template", "said"),
    [
        (OF_LLAMA, "<|eot_id|>", [3], LLAMA, None),
        (OF_LLAMA, {"content": "<|eot_id|>"}, [0, 3], LLAMA, None),
        (("</s>",), "</s>", [0], ZEPHYR, None),  # whose marks are plain text
        (
            OF_GEMMA,
            "<|eot_id|>",
            [3],
            LLAMA,
            [
                "eos_token '<|eot_id|>' of tokenizer_config.json is no token of tokenizer.json",
                "the chat template writes none of its EOS tokens ('<end_of_turn>'), so that no answer ends",
                "the chat template writes <|start_header_id|>, <|end_header_id|>, <|eot_id|>, which tokenizer.json "
                "does not have: they become several tokens each",
            ],
        ),
        (
            OF_LLAMA,
            "<|eot_id|>",
            [0, 17],
            LLAMA,
            [
                "eos_token '<|eot_id|>' of tokenizer_config.json has the id 3, and eos_token_id of config.json and "
                "generation_config.json is 0 ('<|begin_of_text|>'), 17 ('no token')"
            ],
        ),
        (
            OF_LLAMA[1:],
            "<|eot_id|>",
            [2],
            LLAMA.replace("message.role", "'<|begin_of_text|>'"),
            ["the chat template writes <|begin_of_text|>, which tokenizer.json does not have"],
        ),
    ],
)
def test_what_does_not_fit_is_named_with_file_and_token_and_what_fits_is_not(
    tmp_path: Path,
    tokens: tuple[str, ...],
    eos: str | dict[str, Any],
    ends: list[int],
    template: str,
    said: list[str] | None,
) -> None:
    found = tokenizer_warnings(files(tmp_path, tokens, eos, ends), [template])
    if said is None:
        assert () == found
        return
    [warning] = found
    assert warning.startswith(f"the tokenizer of {tmp_path} does not fit its other files: {said[0]}")
    assert all(part in warning for part in said) and warning.count("; ") == len(said) - 1
    assert "Copy tokenizer.json, tokenizer_config.json, generation_config.json and the chat template again" in warning
    assert "not_written" not in warning and "python_tag" not in warning


def test_ids_that_two_files_give_to_different_tokens_are_named(tmp_path: Path) -> None:
    told = {"0": {"content": "<|begin_of_text|>"}, "2": {"content": "<|fim|>"}, "9": {"content": "<|new|>"}}
    folder = files(tmp_path, OF_LLAMA, "<|eot_id|>", [3], added_tokens_decoder=told)
    [warning] = tokenizer_warnings(folder, [LLAMA])
    wrong = "2 is '<|fim|>' there and '<|end_header_id|>' here. Copy"
    assert f"tokenizer_config.json gives 1 ids to other tokens than tokenizer.json: {wrong}" in warning


def test_plan_init_doctor_and_load_target_warn_of_another_models_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = any_checkpoint("llama", tmp_path / "target")
    assert () == tokenizer_warnings(target, [(target / "chat_template.jinja").read_text()])
    tokenizer = (target / "tokenizer.json").read_text()
    (target / "tokenizer.json").write_text(tokenizer.replace("<|im_end|>", "<eos>").replace("<|im_start|>", "<bos>"))
    config = LoadTarget(checkpoint=str(target), mask_token_id=399)
    context = PlanContext(launch=Launch(), inputs={}, artifact=None, root=tmp_path, free_disk=0)
    wrong = (
        "eos_token '<|im_end|>' of tokenizer_config.json is no token of tokenizer.json; the chat template writes none "
        "of its EOS tokens ('<eos>'), so that no answer ends; the chat template writes <|im_"
    )
    assert 1 == sum(wrong in note for note in estimate(config, context).notes)
    assert 1 == sum(wrong in note for note in measurable(str(target)).notes)  # of doctor
    assert 1 == sum(wrong in line for line in measured(read_target(str(target))).lines)  # of init
    load_target(config, FakeStage(tmp_path / "stage"))
    assert 1 == capsys.readouterr().out.count(
        f"warning: the tokenizer of {target} does not fit its other files: {wrong}"
    )


def test_a_decoder_that_loses_blanks_is_warned_of(tmp_path: Path) -> None:
    target = any_checkpoint("llama", tmp_path / "target")
    assert round_trip_warning(target, load_processor(str(target)).tokenizer) is None
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["decoder"] = {"type": "Fuse"}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    warning = round_trip_warning(target, load_processor(str(target)).tokenizer)
    assert warning is not None and 'does not give back a text: of "The draft took 12 tokens' in warning
