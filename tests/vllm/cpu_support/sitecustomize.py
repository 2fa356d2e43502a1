"""Lets torchvision's CUDA build be imported without CUDA: Python imports this at its start where the folder is on
PYTHONPATH, so that the processes which vLLM starts have it too.
"""

import importlib.abc
import sys

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)


class BeforeTorchvision(importlib.abc.MetaPathFinder):
    """A finder that defines the operators that torchvision's import asks for, as its C library does not load here."""

    library = None

    def find_spec(self, fullname, path, target=None):
        if fullname == "torchvision" and self.library is None:
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            for operator in OPERATORS:
                self.library.define(operator)


sys.meta_path.insert(0, BeforeTorchvision())
