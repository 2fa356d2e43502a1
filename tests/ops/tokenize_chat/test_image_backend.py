"""Which library resizes images: in the key, told to whoever reads the tokens, and refused where it is not there."""

import sys

import pytest
from chat_samples import conversation, png, run_tokenize, write_samples
from fake_stage import FakeStage
from family_checkpoints import make_checkpoint

from dsl.compile import compile_pipeline
from dsl.errors import ConfigError
from dsl.op import Ref
from dsl.pipeline import Pipeline
from executor.keys.node_key import Sources, graph_parts, key_config
from ops.artifacts import TargetModel, TokenShards
from ops.ingest.op import Ingest
from ops.inject_images.op import InjectImages
from ops.lib.data.token_shards import TokenReader
from ops.lib.target.feature_shards import feature_info
from ops.lib.vision.processor import load_processor
from ops.load_target.op import LoadTarget
from ops.load_target.run import load_target
from ops.regenerate_answers.conversations import Prompts
from ops.regenerate_answers.op import RegenerateAnswers
from ops.tokenize_chat.op import TokenizeChat


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> TargetModel:
    checkpoint = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("checkpoint"), num_hidden_layers=4)
    stage = FakeStage(tmp_path_factory.mktemp("load"))
    load_target(LoadTarget(checkpoint=str(checkpoint)), stage)
    return stage.artifact(TargetModel)


@pytest.fixture
def samples(tmp_path):
    turns = ("user", "What is it?"), ("assistant", "There are three of them.")
    return write_samples(tmp_path / "in", [conversation(*turns, image=png(40, 24))])


@pytest.fixture
def no_torchvision(monkeypatch):
    """Pretend that torchvision is not installed."""
    for name in [name for name in sys.modules if name.startswith("torchvision")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    twin = "transformers.models.qwen2_vl.image_processing_qwen2_vl"
    monkeypatch.delitem(sys.modules, twin, raising=False)


def pipeline(**config):
    p = Pipeline("p")
    images = p.node("inject", InjectImages(samples=p.node("ingest", Ingest(source="builtin:digits"))))
    p.node("tokenize", TokenizeChat(samples=images, **config))
    return compile_pipeline(p)


def test_the_image_backend_is_in_the_key_and_torchvisions_version_only_where_it_is_chosen():
    pillow = pipeline().nodes["tokenize"]
    torchvision = pipeline(image_backend="torchvision").nodes["tokenize"]
    assert "pillow" == key_config(pillow)["image_backend"]
    assert "torchvision" == key_config(torchvision)["image_backend"]
    libraries = [
        graph_parts(pipeline(**chosen), Sources.now(None))["tokenize"].libraries
        for chosen in ({}, {"image_backend": "torchvision"})
    ]
    assert {"torchvision"} == set(libraries[1]) - set(libraries[0])
    regeneration = {"samples": Ref("inject"), "target": Ref("target")}
    assert () == RegenerateAnswers(**regeneration).chosen_libraries()
    assert ("torchvision",) == RegenerateAnswers(**regeneration, image_backend="torchvision").chosen_libraries()


def test_an_unknown_image_backend_is_refused_when_the_pipeline_is_made():
    with pytest.raises(ConfigError, match="image_backend"):
        TokenizeChat(samples=Ref("inject"), image_backend="opencv")


def test_torchvision_where_it_is_not_installed_is_refused_with_the_way_out(no_torchvision, target, samples, tmp_path):
    message = 'image_backend = "torchvision": torchvision cannot be imported here .* or set image_backend = "pillow"'
    with pytest.raises(ConfigError, match=message):
        run_tokenize(tmp_path / "a", samples, processor=str(target.path / "model"), image_backend="torchvision")
    with pytest.raises(ConfigError, match=message):
        run_tokenize(tmp_path / "b", samples, image_backend="torchvision")
    asked = RegenerateAnswers(samples=Ref("inject"), target=Ref("target"), image_backend="torchvision")
    with pytest.raises(ConfigError, match=message):
        Prompts.load(asked, target, samples.path)


def test_a_text_model_needs_no_image_backend(no_torchvision, tmp_path):
    checkpoint = make_checkpoint("qwen3", tmp_path / "checkpoint", num_hidden_layers=4)
    assert load_processor(str(checkpoint), image_backend="torchvision").image_backend is None
    turns = ("user", "What is it?"), ("assistant", "There are three of them.")
    samples = write_samples(tmp_path / "in", [conversation(*turns)])
    stage = run_tokenize(tmp_path, samples, processor=str(checkpoint), min_loss_tokens=1)
    assert TokenReader(stage.artifact(TokenShards)).info["image_backend"] is None


def test_the_image_backend_is_told_from_the_tokens_to_the_features(target, samples, tmp_path):
    stage = run_tokenize(tmp_path, samples, processor=str(target.path / "model"), min_loss_tokens=1)
    tokens = stage.artifact(TokenShards)
    assert "pillow" == TokenReader(tokens).info["image_backend"]
    assert "pillow" == feature_info(target, tokens, (1, 2), "float32", final_hidden=False)["image_backend"]
