"""The image processors that resize with torchvision: the only module that needs it, so it is loaded by name."""

from __future__ import annotations

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

TWINS = {Qwen2VLImageProcessorPil: Qwen2VLImageProcessor}
