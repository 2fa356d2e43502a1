"""Prints the shapes of the tensors of a model without weights, as JSON, by the config.json on standard input.

A process of its own, since it loads torch, which a plan does not: `python -m ops.lib.target.meta_model < config.json`.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoConfig

from ops.lib.target.small_copy import with_floats
from ops.lib.vision.families import family_of


def main() -> None:
    """Print {name: shape}; a tied head is not among them."""
    content = with_floats(json.load(sys.stdin))
    content.pop("quantization_config", None)
    config = AutoConfig.for_model(**content)
    with torch.device("meta"):
        model = family_of(content).auto_class.from_config(config)
    json.dump({name: list(tensor.shape) for name, tensor in model.named_parameters()}, sys.stdout)


if __name__ == "__main__":
    main()
