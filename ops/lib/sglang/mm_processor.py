"""SGLang's own preprocessing of chat messages to token ids, pixels and positions, as in its server.

It follows SGLang's OpenAI endpoint: the content of the messages is adapted to the chat template, the template is
rendered, tokenised and decoded again, and the multimodal processor gets that text and the encoded images.

    S tokens, R pixel rows, P patch_dim, I images
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from attrs import define, frozen
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.multimodal_processor import get_mm_processor, import_processors
from sglang.srt.managers.tokenizer_manager import get_processor_wrapper
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format,
    process_content_for_template_format,
)
from sglang.srt.runtime_context import publish, reset_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.hf_transformers_utils import get_tokenizer_from_processor
from torch import Tensor

from dsl.errors import DataError
from ops.lib.sglang.adapter import adapter
from ops.lib.sglang.serve_command import IMAGE_BACKENDS
from ops.lib.sglang.version import require_sglang
from ops.lib.vision.processor import ImageBackend


@frozen(eq=False)
class ServedPrompt:
    """A prompt in the form in which SGLang's scheduler receives it.

    input_ids int64 [S], image tokens expanded; pixel_values float32 [R, P]; image_grid_thw int64 [I, 3];
    mrope_positions int64 [3, S] and mrope_position_delta int64 [1, 1]. Without an image R = I = 0, and the last two are
    None. output: SGLang's own object, None without an image.
    """

    input_ids: Tensor
    pixel_values: Tensor
    image_grid_thw: Tensor
    mrope_positions: Tensor | None
    mrope_position_delta: Tensor | None
    output: Any


@define(eq=False)
class ServedPrompts:
    """SGLang's tokenizer side for one checkpoint; a context manager, not usable while a SglangRuntime is open."""

    tokenizer: Any
    mm_processor: Any
    content_format: str

    @classmethod
    def open(
        cls,
        model_dir: Path,
        image_backend: ImageBackend = "pillow",
        device: str = "cpu",
        server_args: Mapping[str, Any] | None = None,
    ) -> Self:
        """Load the processor of a vision-language checkpoint as SGLang's server does, with further server arguments.

        Raises DataError if SGLang is missing or unsupported, and for a text model.
        """
        require_sglang("SGLang's preprocessing")
        arguments = ServerArgs(
            model_path=str(model_dir),
            device=device,
            image_processor_backend=IMAGE_BACKENDS[image_backend],
            mm_feature_transport="cpu",
            disable_radix_cache=True,  # its device requirements are checked even though it is unused
            **({"attention_backend": "torch_native", "mm_attention_backend": "sdpa"} if device == "cpu" else {}),
            **(server_args or {}),
        )
        publish(arguments, role="tokenizer")
        with ExitStack() as undo:
            undo.callback(reset_context)
            config = ModelConfig.from_server_args(arguments)
            if not config.is_multimodal:
                raise DataError(f"{model_dir}: SGLang has no multimodal processor for a text model")
            import_processors("sglang.srt.multimodal.processors")
            processor = get_processor_wrapper()
            mm_processor = get_mm_processor(
                config.hf_config, arguments, processor, adapter().tensor_transport(), model_config=config
            )
            undo.pop_all()
        tokenizer = get_tokenizer_from_processor(processor)
        return cls(tokenizer, mm_processor, detect_jinja_template_content_format(tokenizer.chat_template))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        self.mm_processor.shutdown()
        reset_context()

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], template_options: Mapping[str, Any] = {}
    ) -> ServedPrompt:
        """The prompt made from chat messages; the i-th image part, over all turns, shows images[i].

        template_options: such as enable_thinking. Raises ValueError for images that SGLang rejects.
        """
        text, urls = self._render(messages, images, template_options)
        if not urls:
            ids = torch.tensor(self.tokenizer.encode(text), dtype=torch.int64)
            return ServedPrompt(ids, torch.empty(0, 0), torch.empty(0, 3, dtype=torch.int64), None, None, None)
        request = GenerateReqInput(text=text, image_data=urls, sampling_params={})
        request.normalize_batch_and_arguments()
        output = asyncio.run(
            self.mm_processor.process_mm_data_async(
                image_data=urls, audio_data=None, input_text=text, request_obj=request, max_req_input_len=None
            )
        )
        items = output.mm_items
        return ServedPrompt(
            input_ids=torch.tensor(output.input_ids, dtype=torch.int64),
            pixel_values=torch.cat([item.feature for item in items]),
            image_grid_thw=torch.cat([item.model_specific_data["image_grid_thw"].view(-1, 3) for item in items]),
            mrope_positions=output.mrope_positions,
            mrope_position_delta=output.mrope_position_delta,
            output=output,
        )

    def _render(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], options: Mapping[str, Any]
    ) -> tuple[str, list[Any]]:
        """The prompt's text, and the images in the form in which SGLang's endpoint passes them."""
        remaining = iter(images)
        urls: list[Any] = []
        shown = []
        for message in messages:
            content = [part if part["type"] == "text" else _image_url(next(remaining)) for part in message["content"]]
            message = {**message, "content": content}
            shown.append(process_content_for_template_format(message, self.content_format, urls, [], [], []))
        text = self.tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True, **options)
        return self.tokenizer.decode(self.tokenizer.encode(text)), urls


def _image_url(encoded: bytes) -> dict[str, Any]:
    """An image part of an OpenAI message; SGLang does not need the image's type."""
    url = f"data:image/png;base64,{base64.b64encode(encoded).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}
