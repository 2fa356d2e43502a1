"""What is no target is refused with its remedy by `dflow init` and `dflow plan`, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from init_cases import chat, checkpoint

from dsl.estimate import PlanContext
from dsl.launch import Launch
from dsl.op import Ref
from executor.cli import main
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.plan import missing_here as finetune_vlm_missing_here
from ops.load_target.op import LoadTarget
from ops.load_target.plan import estimate as load_target_estimate
from ops.load_target.plan import missing_here as load_target_missing_here
from ops.regenerate_answers.op import RegenerateAnswers
from ops.regenerate_answers.plan import missing_here as regenerate_answers_missing_here
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.plan import missing_here as tokenize_chat_missing_here

PIPELINE = """
[pipeline]
name = "one"

[node.target]
op = "load_target"
checkpoint = "target"

[mlflow]
tracking = false
"""
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5000000000\n"


def shard(path: Path, tensor: str, cut: int = 0, more: int = 0) -> None:
    """A safetensors file with one tensor of 16 bytes."""
    header = json.dumps({tensor: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16 + more)
    path.write_bytes(content[: len(content) - cut])


def sharded(folder: Path) -> None:
    """Three shards in place of the single file, which is the last of them."""
    names = [f"model-{place}-of-3.safetensors" for place in range(1, 4)]
    (folder / "model.safetensors").rename(folder / names[-1])
    for name in names[:-1]:
        shard(folder / name, name)
    index = {"weight_map": {name: name for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def emptied(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def gguf(folder: Path) -> None:
    emptied(folder)
    (folder / "model-q4.gguf").write_bytes(b"GGUF")


def gguf_file(folder: Path) -> None:
    emptied(folder)
    folder.rmdir()
    folder.write_bytes(b"GGUF")


def gguf_beside_a_config(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.gguf")


def adapter(folder: Path) -> None:
    emptied(folder)
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Qwen/Qwen3-8B"}))
    (folder / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")


def adapter_with_tokenizer(folder: Path) -> None:
    adapter(folder)
    (folder / "tokenizer.json").write_text("{}")


def other_family(folder: Path) -> None:
    change(folder / "config.json", model_type="word_counter")


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def only_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_shards(folder: Path) -> None:
    sharded(folder)
    for place in (1, 3):
        (folder / f"model-{place}-of-3.safetensors").unlink()


def truncated(folder: Path) -> None:
    sharded(folder)
    shard(folder / "model-2-of-3.safetensors", "a", cut=6)


def truncated_in_the_header(folder: Path) -> None:
    sharded(folder)
    shard(folder / "model-2-of-3.safetensors", "a", cut=30)
    (folder / "model-3-of-3.safetensors").write_bytes(b"1234")


def damaged(folder: Path) -> None:
    sharded(folder)
    shard(folder / "model-1-of-3.safetensors", "a", more=1)
    (folder / "model-2-of-3.safetensors").write_bytes(b"<html>Not found</html>")
    header = b'{"a": {"data_offsets": [0, 1.5]}}'
    (folder / "model-3-of-3.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def pointers(folder: Path) -> None:
    sharded(folder)
    for name in ("model-1-of-3.safetensors", "model-2-of-3.safetensors", "tokenizer.json"):
        (folder / name).write_text(POINTER)


def without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def quantised(folder: Path) -> None:
    change(folder / "config.json", quantization_config={"quant_method": "modelopt"})
    (folder / "hf_quant_config.json").write_text("{}")
    header = {"lm_head.weight": {"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}}
    weights(folder, header, bytes(16))


def another_head(folder: Path) -> None:
    change(folder / "config.json", tie_word_embeddings=True)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    header = {
        name: {"dtype": "F32", "shape": [2, 2], "data_offsets": [16 * place, 16 * place + 16]}
        for place, name in enumerate(names)
    }
    weights(folder, header, bytes(31) + b"1")


def weights(folder: Path, header: dict[str, Any], tensors: bytes) -> None:
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + tensors)


def named_templates(folder: Path) -> None:
    without_template(folder)
    templates = [{"name": name, "template": "{{ messages }}"} for name in ("tool_use", "rag")]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))


def tokens_without_embeddings(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    added = [
        {"id": number, "content": f"<new {number}>", "special": number % 2 == 0} for number in (398, 399, 400, 401)
    ]
    change(folder / "tokenizer.json", added_tokens=tokenizer["added_tokens"] + added)
    settings = {"added_tokens_decoder": {"402": {"content": "<a>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "added_tokens.json").write_text(json.dumps({"<b>": 403}))


def several(folder: Path) -> None:
    other_family(folder)
    without_template(folder)
    truncated(folder)


GGUF = "GGUF weights, which are converted for llama.cpp, cannot be a target; use the original checkpoint, a directory "
GGUF += "with config.json and *.safetensors"
ADAPTER = "/adapter_config.json: this is an adapter, not a model; merge it into its base model 'Qwen/Qwen3-8B' "
ADAPTER += "(`merge_and_unload` of peft), save the result with the tokenizer of {}, and use that"
UNSUPPORTED = ": model_type 'word_counter': the installed transformers has no language model of this type; "
NO_WEIGHTS = ": no *.safetensors in this target directory, and other formats are not supported; "
TRUNCATED = "/model-2-of-3.safetensors: truncated, 80 of 86 bytes; copy or download it again"
NO_TEMPLATE = "it has no chat template (chat_template.jinja); copy that of the instruct version of the model"
DAMAGED = "damaged, its header is not that of a safetensors file; copy or download it again"
# What is done to a sound checkpoint, and a part of each sentence that it is refused with, behind TARGET, its path.
MISTAKES: list[tuple[Callable[[Path], None], list[str]]] = [
    (gguf, [f"TARGET/model-q4.gguf: {GGUF}"]),
    (gguf_beside_a_config, [f"TARGET/model.gguf: {GGUF}"]),
    (adapter, [f"TARGET{ADAPTER.format('the base model')}"]),
    (adapter_with_tokenizer, [f"TARGET{ADAPTER.format('this directory')}"]),
    (emptied, ["TARGET: this directory is empty; download the checkpoint into it, or name another directory"]),
    (
        without_config,
        ["TARGET: no config.json in this target directory; name the directory of a Hugging Face checkpoint"],
    ),
    (other_family, [f"TARGET{UNSUPPORTED}"]),
    (without_weights, [f"TARGET{NO_WEIGHTS}download the *.safetensors as well"]),
    (only_a_pickle, [f"TARGET{NO_WEIGHTS}pytorch_model.bin may run code when it is loaded: save it again"]),
    (
        without_shards,
        ["TARGET/model.safetensors.index.json: 2 of 3 shards are missing: model-1-of-3.safetensors, model-3"],
    ),
    (truncated, [f"TARGET{TRUNCATED}"]),
    (
        truncated_in_the_header,
        [
            "TARGET/model-2-of-3.safetensors: truncated inside its header, 56 bytes; copy or download it again",
            "TARGET/model-3-of-3.safetensors: truncated inside its header, 4 bytes; copy or download it again",
        ],
    ),
    (
        damaged,
        [
            "TARGET/model-1-of-3.safetensors: damaged, 87 bytes, but 86 by its header; copy or download it again",
            f"TARGET/model-2-of-3.safetensors: {DAMAGED}",
            f"TARGET/model-3-of-3.safetensors: {DAMAGED}",
        ],
    ),
    (
        pointers,
        [
            "TARGET: pointers of git-lfs in place of model-1-of-3.safetensors, model-2-of-3.safetensors, "
            "tokenizer.json; run `git lfs pull` in this directory, or download the checkpoint again"
        ],
    ),
    (without_template, [f"processor TARGET: {NO_TEMPLATE}"]),
    (without_tokenizer, ["processor TARGET: no tokenizer can be loaded: it has none of tokenizer.json, "]),
    (
        quantised,
        [
            "TARGET: quantised weights (quantization_config of config.json: 'modelopt', hf_quant_config.json, "
            "lm_head.weight of dtype F8_E4M3), and of those only fp8, mxfp4, awq, gptq, compressed-tensors are taken"
        ],
    ),
    (
        another_head,
        [
            "TARGET: config.json sets tie_word_embeddings, but lm_head.weight differs from model.embed_tokens.weight; "
            "set tie_word_embeddings = false if lm_head.weight is the head, or remove that tensor"
        ],
    ),
    (
        named_templates,
        [
            "processor TARGET: its chat templates are named rag, tool_use, and none is the default; copy the one to "
            "use to chat_template.jinja in that directory"
        ],
    ),
    (
        tokens_without_embeddings,
        [
            "TARGET: 4 tokens of the tokenizer lie beyond the 400 embeddings of the model, such as 400 (<new 400>), "
            "401 (<new 401>), 402 (<a>); resize the embedding (`resize_token_embeddings` of transformers) and save the"
        ],
    ),
    (several, [f"TARGET{UNSUPPORTED}", f"processor TARGET: {NO_TEMPLATE}", f"TARGET{TRUNCATED}"]),
]


@pytest.fixture
def target(project: Path) -> Path:
    """A sound checkpoint, data and a pipeline that uses it."""
    chat(project / "chat.jsonl", 3)
    (project / "one.toml").write_text(PIPELINE)
    return Path(checkpoint(project / "target", sees=False))


def starts_of_lines(starts: list[str], lines: list[str], prefix: str = "") -> bool:
    wanted = [prefix + start for start in starts]
    return len(wanted) == len(lines) and all(line.startswith(start) for line, start in zip(lines, wanted, strict=True))


@pytest.mark.parametrize(("damage", "sentences"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_checkpoint_that_cannot_be_a_target_is_refused_at_init_plan_and_run(
    target: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], sentences: list[str]
) -> None:
    damage(target)
    expected = [sentence.replace("TARGET", str(target)) for sentence in sentences]
    assert 1 == main(["init", "chat.jsonl", "--target", str(target)])
    said = capsys.readouterr().err.splitlines()
    assert starts_of_lines([f"dflow: {expected[0]}", *expected[1:]], said), said
    assert 2 == main(["plan", "one.toml", "--json"])
    plan = json.loads(capsys.readouterr().out)
    planned = plan["missing_here"]
    assert starts_of_lines(expected, planned, "node.target.checkpoint: "), planned
    assert "cannot be estimated" not in json.dumps(plan["resources"])
    assert 2 == main(["run", "one.toml"])
    assert planned == capsys.readouterr().err.splitlines()


def test_a_file_in_place_of_a_checkpoint_is_refused(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = target.parent / "model.gguf"
    file.write_bytes(b"GGUF")
    for given, sentence in (
        (file, f"{file}: {GGUF}"),
        (target / "config.json", "is a file; a checkpoint is the directory"),
    ):
        assert 1 == main(["init", "chat.jsonl", "--target", str(given)])
        assert sentence in capsys.readouterr().err
        assert 2 == main(["plan", "one.toml", "--json", "-s", f"target.checkpoint={given}"])
        plan = json.loads(capsys.readouterr().out)
        assert sentence in plan["missing_here"][0]
        assert {} == plan["resources"]


@pytest.mark.parametrize("changed", [lambda folder: None, sharded], ids=["one file", "shards"])
def test_a_sound_checkpoint_lacks_nothing(target: Path, changed: Callable[[Path], None]) -> None:
    changed(target)
    assert {} == load_target_missing_here(LoadTarget(checkpoint=str(target)))
    assert {} == finetune_vlm_missing_here(FinetuneVlm(tokens=Ref("tokens"), init=str(target)))
    assert {} == load_target_missing_here(LoadTarget(checkpoint="owner/name", revision="0" * 40))


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}),
        ("processor_config.json", {"chat_template": "{{ messages }}"}),
        ("chat_template.json", {"chat_template": "{{ messages }}"}),
    ],
)
def test_a_chat_template_may_be_in_any_file_that_transformers_reads(target: Path, file: str, settings: object) -> None:
    without_template(target)
    (target / file).write_text(json.dumps(settings))
    assert {} == load_target_missing_here(LoadTarget(checkpoint=str(target)))
    (target / file).write_text(json.dumps({"chat_template": None}))
    assert NO_TEMPLATE in load_target_missing_here(LoadTarget(checkpoint=str(target)))["checkpoint"]


def test_named_chat_templates_with_a_default_are_a_template(target: Path) -> None:
    named_templates(target)
    (target / "chat_template.jinja").write_text("{{ messages }}")
    assert {} == load_target_missing_here(LoadTarget(checkpoint=str(target)))
    (target / "chat_template.jinja").unlink()
    templates = [{"name": name, "template": "{{ messages }}"} for name in ("default", "rag")]
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert {} == load_target_missing_here(LoadTarget(checkpoint=str(target)))


def test_every_field_that_names_a_checkpoint_or_a_processor_is_checked(target: Path) -> None:
    without_template(target)
    (target / "model.safetensors").unlink()
    answers = {"samples": Ref("s"), "backend": "endpoint", "endpoint": "http://host:1/v1", "model": "m"}
    of_a_processor = f"processor {target}: {NO_TEMPLATE}"
    assert {"init"} == set(finetune_vlm_missing_here(FinetuneVlm(tokens=Ref("tokens"), init=str(target))))
    assert {} == finetune_vlm_missing_here(FinetuneVlm(tokens=Ref("tokens")))
    assert {"processor": of_a_processor} == tokenize_chat_missing_here(
        TokenizeChat(samples=Ref("s"), processor=str(target))
    )
    found = regenerate_answers_missing_here(RegenerateAnswers(processor=str(target), **answers))
    assert {"processor": of_a_processor} == found
    (target / "tokenizer.json").write_text(POINTER)
    pointed = tokenize_chat_missing_here(TokenizeChat(samples=Ref("s"), processor=str(target)))["processor"]
    assert pointed.startswith(f"{target}: pointers of git-lfs in place of tokenizer.json; run `git lfs pull`")


def test_a_mask_token_that_is_unknown_or_outside_the_vocabulary_is_refused_with_ids_that_can_serve(
    target: Path,
) -> None:
    can_serve = "set mask_token_id to an id that no text gives, such as {} (an embedding without a token of the"

    def told(**fields: Any) -> str:
        return load_target_missing_here(LoadTarget(checkpoint=str(target), **fields)).get("mask_token_id", "")

    assert f"mask_token_id 400 is outside the vocabulary of 400 in {target}; {can_serve.format(2)}" in told(
        mask_token_id=400
    )
    assert "outside the vocabulary" in told(mask_token_id=-1)
    assert "" == told(mask_token_id=399)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    change(target / "tokenizer.json", model=tokenizer["model"] | {"vocab": {"[UNK]": 0}})
    assert f"{target}: no mask token is known for this model; {can_serve.format(1)}" in told()
    trained = FinetuneVlm(tokens=Ref("tokens"), init=str(target))
    assert {"mask_token_id": told()} == finetune_vlm_missing_here(trained)
    assert {} == finetune_vlm_missing_here(FinetuneVlm(tokens=Ref("tokens"), init=str(target), mask_token_id=399))
    change(target / "config.json", vocab_size=200_000)
    assert "" == told()  # the family's
    change(target / "tokenizer.json", model={"type": "Unigram", "vocab": [["a", 0.0], ["<|mask|>", 0.0]]})
    change(target / "config.json", vocab_size=10)
    assert "" == told()


def test_a_mask_token_that_texts_give_is_told_at_plan(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 == main(["plan", "one.toml", "-s", "target.mask_token_id=0"])
    said = " ".join(capsys.readouterr().out.split())
    assert "mask_token_id 0 is the id that the tokenizer gives to the text '[UNK]'" in said
    assert 0 == main(["plan", "one.toml", "-s", "target.mask_token_id=7"])
    assert "mask_token_id" not in capsys.readouterr().out


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_ids_beyond_the_vocabulary_at_which_texts_end_are_refused(target: Path, file: str) -> None:
    (target / "generation_config.json").write_text("{}")
    change(target / file, eos_token_id=[399, 151_645], bos_token_id=400)
    told = load_target_missing_here(LoadTarget(checkpoint=str(target)))["checkpoint"]
    wrong = f"bos_token_id 400 of {file}, eos_token_id 151645 of {file}"
    assert told.startswith(f"{target}: outside the model's vocabulary of 400: {wrong}; correct the ids")
    change(target / file, eos_token_id=[399, 398], bos_token_id=None)
    assert {} == load_target_missing_here(LoadTarget(checkpoint=str(target)))


def test_a_chat_template_with_a_mistake_is_refused_before_anything_is_loaded(target: Path) -> None:
    wrong = target.parent / "wrong.jinja"
    wrong.write_text("{{ messages }}\n{% if %}")
    sentence = f"{wrong}:2: not a chat template: "
    assert load_target_missing_here(LoadTarget(checkpoint=str(target), chat_template=str(wrong)))[
        "chat_template"
    ].startswith(sentence)
    given: dict[str, Any] = {"samples": Ref("s"), "processor": str(target), "chat_template": str(wrong)}
    answers = {"backend": "endpoint", "endpoint": "http://host:1/v1", "model": "m"}
    assert tokenize_chat_missing_here(TokenizeChat(**given))["chat_template"].startswith(sentence)
    assert regenerate_answers_missing_here(RegenerateAnswers(**given, **answers))["chat_template"].startswith(sentence)
    without_template(target)
    shutil.copy(wrong, target / "chat_template.jinja")
    told = load_target_missing_here(LoadTarget(checkpoint=str(target)))["checkpoint"]
    assert told.startswith(f"{target / 'chat_template.jinja'}:2: not a chat template: ")
    assert told.endswith("; correct it, or copy the template again from the model's source")
    without_template(target)
    settings = {"chat_template": [{"name": "default", "template": "{% if %}"}]}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    told = load_target_missing_here(LoadTarget(checkpoint=str(target)))["checkpoint"]
    assert told.startswith(f"{target / 'tokenizer_config.json'}, chat_template:1: not a chat template: ")


def test_answers_longer_than_the_context_of_a_processor_s_model_are_refused(target: Path) -> None:
    change(target / "config.json", max_position_embeddings=4096)
    given: dict[str, Any] = {"samples": Ref("s"), "processor": str(target), "backend": "endpoint", "model": "m"}
    given |= {"endpoint": "http://host:1/v1", "max_new_tokens": 1024}
    assert {} == regenerate_answers_missing_here(RegenerateAnswers(**given, max_prompt_tokens=3072))
    found = regenerate_answers_missing_here(RegenerateAnswers(**given, max_prompt_tokens=3073))
    assert {"max_prompt_tokens"} == set(found)
    assert "3073 + 1024 = 4097 tokens, and the target has 4096 positions" in found["max_prompt_tokens"]
    assert "set max_prompt_tokens = 3072 or less" in found["max_prompt_tokens"]


def test_a_link_to_a_file_elsewhere_is_refused_unread(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (target / "tokenizer_config.json").symlink_to("/dev/zero")
    sentence = f"{target / 'tokenizer_config.json'}: a link out of the checkpoint, to /dev/zero; replace it by the file"
    assert 1 == main(["init", "chat.jsonl", "--target", str(target)])
    assert sentence in capsys.readouterr().err
    context = PlanContext(launch=Launch(), inputs={}, artifact=None, root=target.parent, free_disk=0)
    assert () == load_target_estimate(LoadTarget(checkpoint=str(target), mask_token_id=0), context).notes
    assert [True] == [
        sentence in line for line in load_target_missing_here(LoadTarget(checkpoint=str(target))).values()
    ]


def test_code_without_trust_is_refused_at_plan_and_not_at_init(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(target / "config.json", auto_map={"AutoModelForCausalLM": "own.Model"})
    assert 2 == main(["plan", "one.toml", "--json"])
    assert "auto_map names code of the checkpoint's own" in json.loads(capsys.readouterr().out)["missing_here"][0]
    assert 0 == main(["plan", "one.toml", "-s", "target.trust_remote_code=true"])
    assert 0 == main(["init", "chat.jsonl", "--target", str(target)])


def test_code_of_another_repository_in_a_trusted_tokenizer_is_refused_at_plan(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = {"auto_map": {"AutoTokenizer": [None, "other/repo--tok.Tok"]}}
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert 2 == main(["plan", "one.toml", "--json", "-s", "target.trust_remote_code=true"])
    [mistake] = json.loads(capsys.readouterr().out)["missing_here"]
    assert "auto_map of tokenizer_config.json names code of another repository (other/repo--tok.Tok)" in mistake
