"""How SGLang refuses to serve drafts on a device. Loads neither torch nor sglang."""

from __future__ import annotations

import re

# DFLASH; DSPARK; any model.
REFUSAL = re.compile(
    r"^.*(?:speculative decoding (?:is not supported by|only supports CUDA)|No accelerator \(CUDA).*$", re.MULTILINE
)
