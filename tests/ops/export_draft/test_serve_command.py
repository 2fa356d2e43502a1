"""The command that serves a target with a draft: what each kind of target needs, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.lib.sglang.serve_command import (
    Address,
    DraftOption,
    Served,
    checkpoint_dtype,
    launch_command,
    shell_line,
)

DRAFT = DraftOption(path="draft", block_size=8)
SPECULATIVE = [
    *("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", "draft"),
    *("--speculative-num-draft-tokens", "8"),
]
AT = ["--host", "127.0.0.1", "--port", "30000"]


def served(model_type: str, **changed: object) -> Served:
    vision = model_type not in ("qwen3", "qwen3_moe")
    return Served(**{"model_type": model_type, "vision": vision, "dtype": "bfloat16", **changed})  # type: ignore[arg-type]


def test_a_text_target_is_served_by_sglangs_own_launcher():
    expected = ["python", "-m", "sglang.launch_server", "--model-path", "target", "--dtype", "bfloat16"]

    assert [*expected, *SPECULATIVE, *AT] == launch_command("target", served("qwen3"), DRAFT)


@pytest.mark.parametrize(
    ("model_type", "launcher"),
    [
        ("qwen3_vl", "ops.lib.sglang.launch_server"),
        ("qwen3_vl_moe", "sglang.launch_server"),
        ("qwen3_5", "sglang.launch_server"),
    ],
)
def test_a_vision_target_takes_the_image_backend_of_the_training(model_type: str, launcher: str):
    expected = ["python", "-m", launcher, "--model-path", "target", "--dtype", "bfloat16", *SPECULATIVE]
    command = launch_command("target", served(model_type), DRAFT)

    assert [*expected, "--image-processor-backend", "pil", *AT] == command


def test_the_text_model_of_qwen35_needs_dflows_launcher_only_in_the_older_version():
    both = served("qwen3_5_text")
    newer = served("qwen3_5_text", versions=("0.5.23",))

    assert ("0.5.21",) == both.unfit_versions
    assert () == newer.unfit_versions
    assert "ops.lib.sglang.launch_server" in launch_command("target", both, DRAFT)
    assert "sglang.launch_server" in launch_command("target", newer, DRAFT)
    assert ("0.5.21", "0.5.23") == served("qwen2_5_vl").unfit_versions


@pytest.mark.parametrize(
    ("architecture", "launcher"),
    [
        ("BailingMoeV2ForCausalLM", "ops.lib.sglang.launch_server"),
        ("SarvamMoEForCausalLM", "ops.lib.sglang.launch_server"),
        ("BailingMoeV3ForCausalLM", "sglang.launch_server"),
    ],
)
def test_a_target_without_a_type_in_transformers_has_its_launcher_by_its_class(tmp_path, architecture, launcher):
    config = {"model_type": "bailing_moe", "architectures": [architecture], "dtype": "bfloat16"}
    made = Served.as_trained({"model_type": "bailing_moe", "vision": False}, config, {}, tmp_path)
    assert launcher == launch_command("target", made, DRAFT)[2]


def test_a_target_prepared_with_torchvision_is_served_with_it():
    command = launch_command("target", served("qwen3_5", image_backend="torchvision"), DRAFT)

    assert "torchvision" == command[command.index("--image-processor-backend") + 1]


def test_images_are_resized_as_they_were_for_the_training():
    pixels = {"min_pixels": 64, "max_pixels": 1024}
    command = launch_command("target", served("qwen3_5", pixels=pixels), DRAFT)

    assert '{"image": {"min_pixels": 64, "max_pixels": 1024}}' == command[command.index("--mm-process-config") + 1]


def test_without_a_draft_sglangs_own_launcher_serves_the_target_alone():
    expected = ["python", "-m", "sglang.launch_server", "--model-path", "target", "--dtype", "bfloat16"]

    assert [*expected, "--image-processor-backend", "pil", *AT] == launch_command("target", served("qwen3_vl"), None)


def test_code_of_the_target_is_run_only_where_it_was_trusted():
    assert "--trust-remote-code" not in launch_command("target", served("qwen3"), DRAFT)
    assert "--trust-remote-code" in launch_command("target", served("qwen3", trust_remote_code=True), DRAFT)


def test_the_number_formats_of_the_capture_are_those_of_the_server_and_its_kernels_and_memory_are_not():
    given = {"quantization": "fp8", "kv_cache_dtype": "fp8_e5m2", "page_size": 16, "attention_backend": "triton"}
    command = launch_command("target", served("qwen3", server_args=given), DRAFT)

    assert ["--kv-cache-dtype", "fp8_e5m2", "--quantization", "fp8", *AT] == command[-8:]
    captured = {"backend": "sglang", "server_args": given}
    target = {"model_type": "qwen3", "vision": False, "trust_remote_code": False}
    assert given == Served.as_trained(target, {"dtype": "bfloat16"}, captured, Path("target")).server_args


def test_further_arguments_come_last_and_so_win():
    address = Address(host="0.0.0.0", port=8000)
    command = launch_command("target", served("qwen3"), DRAFT, address=address, extra=["--dtype", "float16"])

    assert ["--host", "0.0.0.0", "--port", "8000", "--dtype", "float16"] == command[-6:]
    assert "http://127.0.0.1:8000" == address.url


def test_a_convolution_state_has_the_dtype_of_the_model():
    assert {"SGLANG_MAMBA_CONV_DTYPE": "float32"} == served("qwen3_5", dtype="float32").environment
    for kind in ("lfm2", "lfm2_moe", "lfm2_vl", "nemotron_h"):
        assert {"SGLANG_MAMBA_CONV_DTYPE": "float16"} == served(kind, dtype="float16").environment
    assert {} == served("qwen3_5").environment
    assert {} == served("qwen3", dtype="float32").environment


def test_the_shell_line_quotes_what_a_shell_would_split():
    line = shell_line(["python", "-m", "x", "--model-path", "/my models/a"], {"NAME": "b c"})

    assert "NAME='b c' python -m x --model-path '/my models/a'" == line


def test_what_a_target_json_says_decides():
    target = {"model_type": "qwen3_vl", "vision": True, "trust_remote_code": False, "hidden_size": 64}

    assert served("qwen3_vl", dtype="float32") == Served.as_trained(target, {}, {}, Path("no-such-folder"))


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": None, "text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_a_checkpoint_is_served_in_the_dtype_of_its_weights(config: dict[str, object], dtype: str):
    assert dtype == checkpoint_dtype(config)
