"""What pipelines/smollm2_files.py makes: the tokenizer that a GGUF file describes, and prompts that stay the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

from pipelines import smollm2_files, smollm2_tools_files

ROOT = Path(__file__).parents[1]
PIPELINE = ROOT / "pipelines" / "smollm2.toml"
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["he", "ll", "hell", "hello", "Ġhello", "12"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]


def gguf_fields(**changed: Any) -> dict[str, Any]:
    """The fields of a GGUF file: control tokens, the 256 bytes, and six longer tokens."""
    tokens = [*CONTROL, *sorted(ByteLevel.alphabet()), *WORDS]
    return {
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        "llama.context_length": 64,
        **changed,
    }


@pytest.mark.unit
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("hello hello", ["hello", "Ġhello"]),
        ("hello12", ["hello", "1", "2"]),  # a merge that crosses digits is never used
        ("<|im_start|>hello<|im_end|>", ["<|im_start|>", "hello", "<|im_end|>"]),
        ("é ½", ["Ã", "©", "Ġ", "Â", "½"]),
        (" \n", ["Ġ", "Ċ"]),
    ],
)
def test_texts_are_split_into_the_tokens_of_the_gguf_file_and_come_back(text: str, tokens: list[str]) -> None:
    tokenizer = smollm2_files.tokenizer_of(gguf_fields())
    assert tokenizer.tokenize(text) == tokens
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.unit
def test_the_saved_tokenizer_ends_texts_where_the_gguf_file_says(tmp_path: Path) -> None:
    smollm2_files.tokenizer_of(gguf_fields()).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([1, tokenizer.convert_tokens_to_ids("hello"), 2], skip_special_tokens=True) == "hello"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"


@pytest.mark.unit
def test_another_way_of_splitting_is_refused() -> None:
    with pytest.raises(ValueError, match="splits texts as 'llama-bpe'"):
        smollm2_files.tokenizer_of(gguf_fields(**{"tokenizer.ggml.pre": "llama-bpe"}))


@pytest.mark.unit
def test_prompts_are_chosen_by_their_text_whatever_their_order() -> None:
    texts = [f"question number {number}" for number in range(100)]
    few, more = smollm2_files.chosen(texts, 10), smollm2_files.chosen(reversed(texts), 20)
    assert few == more[:10]
    assert smollm2_files.chosen(["no", "no" * 400, "Größe der Welt?", " a question  ", "a question"], 9) == []
    assert smollm2_files.chosen([" What is a question?  ", "What is a question?"], 9) == ["What is a question?"]


@pytest.mark.unit
def test_calls_are_made_of_the_first_values_that_are_right_without_those_left_to_the_function() -> None:
    truth = [
        {"math.hypot": {"x": [4], "y": [5], "z": ["", 0]}},
        {"find": {"where": [{"city": ["Paris", "paris"], "near": [True]}], "names": [["a", "b"]]}},
    ]
    made = [call["function"] for call in smollm2_tools_files.calls(truth)["tool_calls"]]
    assert made == [
        {"name": "math.hypot", "arguments": {"x": 4, "y": 5}},
        {"name": "find", "arguments": {"where": {"city": "Paris", "near": True}, "names": ["a", "b"]}},
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Pi is 3.14159, isn't it?", "Pi Ġis Ġ 3 . 1 4 1 5 9 , Ġisn 't Ġit ?"),
        ("2024-11-27", "2 0 2 4 - 1 1 - 2 7"),
        ("def f(x):\n    return x + 10\n", "def Ġf ( x ): ĊĠĠĠ Ġreturn Ġx Ġ+ Ġ 1 0 Ċ"),
        (" two  spaces\n\n\nthree lines", "Ġtwo Ġ Ġspaces ĊĊ Ċ three Ġlines"),
        ("naïve café", "na Ã¯ve ĠcafÃ©"),
        ("We'll they're I'M", "We 'll Ġthey 're ĠI ' M"),
        ("<|im_start|>user\nHi<|im_end|>\n", "<|im_start|> user Ċ Hi <|im_end|> Ċ"),
        ("<empty_output>", "<empty_output>"),
    ],
)
def test_the_real_tokenizer_splits_as_the_model_was_trained(smollm2: Path, text: str, tokens: str) -> None:
    """By hand: digits one by one, then GPT-2's pieces, then the longest merges of the file."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2 / "model")
    assert tokenizer.tokenize(text) == tokens.split(" ")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.slow
@pytest.mark.chain
def test_the_pipeline_runs_to_the_end_on_a_few_prompts_of_the_real_model(tmp_path: Path, smollm2: Path) -> None:
    changed = ["ingest.max_samples=40", "regenerate.max_new_tokens=12", "shard.epochs=1", "train.eval_every=20"]
    changed += ["train.eval_prompts=1", "eval.max_prompts=3", "eval.max_new_tokens=12"]
    options = [option for value in changed for option in ("-s", value)]
    command = [sys.executable, "-m", "executor.cli", "run", str(PIPELINE), "--store", str(tmp_path), *options]
    subprocess.run(command, check=True, cwd=ROOT)
    (report,) = tmp_path.glob("objects/*/report.json")
    measured = json.loads(report.read_text())
    assert 0 == measured["lossless"]["errors"]
    assert 1 <= measured["tau"]["all"]["tau"]
