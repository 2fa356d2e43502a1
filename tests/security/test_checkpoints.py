"""Checkpoints of strangers: whatever their files name or hold, nothing of it runs, is fetched, or is copied unasked."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from stranger import Makes
from transformers import dynamic_module_utils

from dsl.errors import DataError
from ops.artifacts import TargetModel
from ops.finetune_vlm.op import FinetuneVlm
from ops.finetune_vlm.start import start_target
from ops.lib.data.checkpoint_code import check_code
from ops.lib.data.files import read_json, write_json
from ops.lib.data.sample_account import Unusable
from ops.lib.drafts.backbone.config import to_serving
from ops.lib.drafts.backbone.load import load_draft, random_draft
from ops.lib.sglang.serve_command import Served
from ops.lib.target.checkpoint_files import trusts_own_code
from ops.lib.target.model import Target, read_config, target_info
from ops.lib.target.sizes import TargetSizes
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.tokenize_chat.op import TokenizeChat
from ops.tokenize_chat.run import prepare_processor
from ops.tokenize_chat.template import Template
from ops.tools.init.target import read_target

OWN, ELSEWHERE = "own_code.Own", "stranger/repo--own_code.Own"
KERNEL = "stranger/kernel:attention"
HELLO = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]


def set_json(file: Path, **values: object) -> None:
    write_json(file, (read_json(file) if file.exists() else {}) | values)


def map_of(*names: str, place: str) -> dict[str, object]:
    return {name: [place, place] if name == "AutoTokenizer" else place for name in names}


MODEL = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText")


def of_the_model(folder, place=OWN):
    set_json(folder / "config.json", auto_map=map_of(*MODEL, "AutoTokenizer", "AutoProcessor", place=place))


def of_an_unknown_model(folder):
    of_the_model(folder)
    set_json(folder / "config.json", model_type="own", architectures=["OwnForCausalLM"])


def of_the_tokenizer(folder, place=OWN):
    set_json(
        folder / "tokenizer_config.json", auto_map=map_of("AutoTokenizer", place=place), tokenizer_class="OwnTokenizer"
    )


def of_the_tokenizer_in_the_model(folder):
    set_json(folder / "config.json", tokenizer_class="OwnTokenizer")
    of_the_model(folder)
    of_the_tokenizer(folder)


def of_the_processors(folder, place=OWN):
    for name in ("processor_config", "preprocessor_config", "video_preprocessor_config"):
        names = map_of("AutoProcessor", "AutoImageProcessor", "AutoVideoProcessor", "AutoFeatureExtractor", place=place)
        set_json(folder / f"{name}.json", auto_map=names, processor_class="OwnProcessor")
    set_json(folder / "preprocessor_config.json", image_processor_type="Qwen2VLImageProcessor")


def of_generation(folder):
    set_json(folder / "generation_config.json", custom_generate=str(folder), auto_map=map_of("AutoModel", place=OWN))


def a_kernel(folder):
    set_json(folder / "config.json", _attn_implementation=KERNEL, attn_implementation=KERNEL)


def a_kernel_of_a_part(folder):
    config = folder / "config.json"
    set_json(config, text_config=read_json(config) | {"_attn_implementation": KERNEL})


def an_adapter(folder):
    write_json(folder / "adapter_config.json", {"base_model_name_or_path": "stranger/base", "peft_type": "LORA"})


def pickled_weights(folder):
    """Rename the safetensors file, so that transformers would find only the checkpoint's pickles."""
    (folder / "model.safetensors").rename(folder / "weights.safetensors")


def a_template_that_reaches_out(folder):
    command = f"touch {folder.parent / 'canary' / 'template'}"
    (folder / "chat_template.jinja").write_text(
        f"{{{{ cycler.__init__.__globals__.os.system('{command}') }}}}"
        f"{{{{ ''.__class__.__mro__[1].__subclasses__() }}}}{{{{ messages }}}}"
    )


def without_end(folder):
    (folder / "config.json").write_text('{"a":' * 100_000)


ATTACKS = {
    "own code of the model": of_the_model,
    "code of another repository": lambda folder: of_the_model(folder, ELSEWHERE),
    "an unknown model": of_an_unknown_model,
    "own code of the tokenizer": of_the_tokenizer,
    "a tokenizer of another repository": lambda folder: of_the_tokenizer(folder, ELSEWHERE),
    "a tokenizer named by the model": of_the_tokenizer_in_the_model,
    "own code of processors": of_the_processors,
    "processors of another repository": lambda folder: of_the_processors(folder, ELSEWHERE),
    "own generation": of_generation,
    "a kernel": a_kernel,
    "a kernel of a part": a_kernel_of_a_part,
    "an adapter": an_adapter,
    "pickled weights": pickled_weights,
    "a template": a_template_that_reaches_out,
    "brackets without end": without_end,
}


def by_load_target(folder, tmp_path):
    stage = FakeStage(tmp_path / "stage")
    load_target(LoadTarget(checkpoint=str(folder)), stage)
    target = stage.artifact(TargetModel)
    assert not [file for file in target.path.rglob("*") if file.suffix in (".py", ".bin", ".pkl")]
    Target.load(target)


def by_finetune_vlm(folder, tmp_path):
    info = {"vocab_size": 1, "eos_token_ids": [2], "mask_token_id": 7}
    reader = SimpleNamespace(info=info, records=[], tokens=SimpleNamespace(path=tmp_path))
    start_target(FinetuneVlm(tokens="@tokens", init=str(folder)), reader, FakeStage(tmp_path / "stage"))


def by_tokenize_chat(folder, tmp_path):
    (tmp_path / "processor").mkdir()
    config = TokenizeChat(samples="@samples", processor=str(folder))
    processor = prepare_processor(config, None, tmp_path / "samples.jsonl", tmp_path / "processor")
    assert "hello" in Template(processor).render(HELLO, prompt=True)


def by_regenerate_answers(folder, tmp_path):
    server = {"backend": "endpoint", "endpoint": "http://localhost:1", "model": "served"}
    prompts = Prompts.load(RegenerateAnswers(samples="@samples", processor=str(folder), **server), None, tmp_path)
    assert prompts.encoder.prompt(HELLO).numel() > 0


def as_an_artifact(folder, tmp_path):
    """Load a target artifact of a received store, whose target.json claims that no code is trusted."""
    info = {"trust_remote_code": False, "eos_token_ids": [2], "model_type": "qwen3", "vision": False}
    (tmp_path / "target").mkdir()
    shutil.copytree(folder, tmp_path / "target" / "model")
    write_json(tmp_path / "target" / "target.json", info)
    target = TargetModel(tmp_path / "target", "digest")
    served = Served.as_trained(info, read_config(target.path / "model"), {}, target.path / "model")
    assert not served.trust_remote_code
    Target.load(target)
    load_processor(
        str(target.path / "model"), trust_remote_code=trusts_own_code(target.path / "model", target_info(target))
    )


def by_init_and_plan(folder, tmp_path):
    target = read_target(str(folder))
    TargetSizes.of(target.config)


LOADING, RENDERING = (by_load_target, by_finetune_vlm, as_an_artifact), (by_tokenize_chat, by_regenerate_answers)
WAYS = (*LOADING, *RENDERING, by_init_and_plan)
AUTO_MAP = "auto_map names code of the checkpoint's own"
A_KERNEL = "attn_implementation = .* is a kernel of another repository"
# By which ways, and with which message; the others do not use what was changed, and succeed.
REFUSED = {
    "own code of the model": (LOADING, AUTO_MAP),
    "code of another repository": (LOADING, AUTO_MAP),
    "an unknown model": (LOADING, AUTO_MAP),
    "a tokenizer named by the model": (LOADING, AUTO_MAP),
    "a kernel": (LOADING, A_KERNEL),
    "a kernel of a part": (LOADING, A_KERNEL),
    "an adapter": ((*LOADING, by_init_and_plan), "this is an adapter, not a model"),
    "pickled weights": ((*LOADING, by_init_and_plan), "no model.safetensors and no model.safetensors.index.json"),
    "a template": (RENDERING, "refused by the chat template.* is unsafe"),
    "brackets without end": (WAYS, "config.json.*nested too deeply"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("sound") / "checkpoint", num_hidden_layers=2)


@pytest.fixture
def canary(tmp_path, monkeypatch):
    """The folder in which code of a checkpoint would leave a file. A question at the terminal or a connection leaves
    one too.
    """
    folder = tmp_path / "canary"
    folder.mkdir()

    def no(kind: str):
        def use(*arguments: object, **values: object) -> None:
            (folder / kind).touch()
            raise OSError("no network here")

        return use

    monkeypatch.setattr("builtins.input", no("asked"))
    monkeypatch.setattr(socket.socket, "connect", no("connected"))
    monkeypatch.setattr(socket, "getaddrinfo", no("looked up"))
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    return folder


@pytest.fixture
def checkpoint(sound, canary, tmp_path):
    """A sound checkpoint with pickles and a code file under each name that transformers could look for."""
    return trapped(shutil.copytree(sound, tmp_path / "checkpoint"), canary)


def trapped(folder, canary):
    code = f"from pathlib import Path\nPath({str(canary / 'ran')!r}).touch()\n"
    for name in ("own_code", "modeling_own", "configuration_own", "tokenization_own", "custom_generate/generate"):
        file = folder / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(code)
    for name in ("pytorch_model.bin", "model.pt", "tokenizer.pkl", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Makes(canary / "unpickled")))
    return folder


@pytest.mark.parametrize("way", WAYS)
def test_every_way_takes_a_checkpoint_that_names_none_of_the_code_in_it(way, checkpoint, canary, tmp_path):
    way(checkpoint, tmp_path)
    assert list(canary.iterdir()) == []


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_checkpoint_runs(way, attack, checkpoint, canary, tmp_path):
    ATTACKS[attack](checkpoint)
    refusing, message = REFUSED.get(attack, ((), ""))
    with pytest.raises((DataError, Unusable), match=message) if way in refusing else nullcontext():
        way(checkpoint, tmp_path)
    assert list(canary.iterdir()) == []


@pytest.mark.parametrize("attack", ["a kernel", "a kernel of a part", "an adapter", "code of another repository"])
def test_what_a_trusted_checkpoint_names_elsewhere_is_refused_too(attack, checkpoint, canary):
    ATTACKS[attack](checkpoint)
    with pytest.raises(DataError, match=r"another repository|an adapter"):
        trusts_own_code(checkpoint, {"trust_remote_code": True})
    assert list(canary.iterdir()) == []


def test_the_own_code_of_a_trusted_checkpoint_may_run(checkpoint):
    of_the_model(checkpoint)
    assert trusts_own_code(checkpoint, {"trust_remote_code": True})
    with pytest.raises(DataError, match="only runs with trust_remote_code = true"):
        trusts_own_code(checkpoint, {"trust_remote_code": False})


def test_nothing_of_a_draft_runs(canary, tmp_path):
    import random

    from draft_cases import random_config

    config = random_config(random.Random(0), {})
    draft = random_draft(config, 0)
    folder = tmp_path / "draft"
    folder.mkdir()
    save_file(draft.state_dict(), folder / "model.safetensors")
    trapped(folder, canary)
    write_json(folder / "config.json", to_serving(config) | {"auto_map": map_of(*MODEL, place=ELSEWHERE)})
    loaded = load_draft(folder)
    assert loaded.state_dict().keys() == load_file(folder / "model.safetensors").keys()
    with pytest.raises(DataError, match="auto_map names code"):
        check_code(folder, trust_remote_code=False)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"model.safetensors is missing"):
        load_draft(folder)
    assert list(canary.iterdir()) == []


@pytest.mark.parametrize("name", ["tokenizer_more.txt", "chat_template.jinja", "generation_config.json"])
def test_a_link_out_of_a_checkpoint_brings_no_private_file_along(name, checkpoint, tmp_path):
    private = tmp_path / "private"
    private.write_text(json.dumps({"chat_template": "private"}))
    (checkpoint / name).unlink(missing_ok=True)
    (checkpoint / name).symlink_to(private)
    with pytest.raises(DataError, match=rf"{name}: a link out of the checkpoint"):
        by_load_target(checkpoint, tmp_path)


def test_links_of_hugging_faces_cache_are_followed(sound, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("c" * 40), tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(sound, blobs)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    by_load_target(snapshot, tmp_path)


UNREADABLE = [
    ("config.json", {"base_model_tp_plan": 5}, "'int' object has no attribute 'copy'"),
    ("config.json", {"hidden_act": 5}, "Field 'hidden_act' expected str, got int"),
    ("config.json", {"hidden_act": "../x"}, "KeyError: '../x'"),
    ("config.json", {"num_attention_heads": 0}, "ZeroDivisionError: "),
    ("config.json", {"rope_parameters": [1]}, "rope_parameters must be an object"),
    ("config.json", {"id2label": 5}, "Field 'id2label' with value"),
    ("generation_config.json", {"eos_token_id": "a"}, "eos_token_id 'a' of generation_config.json"),
    ("generation_config.json", {"cache_implementation": 5}, "Invalid `cache_implementation`"),
    ("tokenizer_config.json", {"tokenizer_class": "AutoTokenizer"}, "RecursionError: "),
    ("tokenizer_config.json", {"tokenizer_class": ["a"]}, "AttributeError: "),
    ("tokenizer_config.json", {"tokenizer_class": "XLMTokenizer"}, "You need to install sacremoses"),
]


@pytest.mark.parametrize(("name", "values", "said"), UNREADABLE, ids=[said for *_, said in UNREADABLE])
def test_values_that_transformers_does_not_expect_are_refused_in_words(name, values, said, sound, tmp_path):
    """Before, a traceback: some by load_target, the others when the target is loaded for the capture."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(sound, folder)
    set_json(folder / name, **values)
    with pytest.raises(DataError) as refused:
        stage = FakeStage(tmp_path / "stage")
        load_target(LoadTarget(checkpoint=str(folder)), stage)
        Target.load(TargetModel(stage.out_dir, "digest"))
    assert said in str(refused.value)
