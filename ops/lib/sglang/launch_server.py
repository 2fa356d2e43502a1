"""SGLang's server for targets that lack a method for DFLASH: python -m ops.lib.sglang.launch_server ARGUMENTS.

The arguments are those of `python -m sglang.launch_server`, which this runs unchanged. Before that it enters
`patch` into SGLang's registry of plugin hooks, which calls it before a model's layers are set. SGLang applies the
registry in every process of the server; those are spawned, and a spawned process imports the main module, this one,
before anything else.
"""

from __future__ import annotations

import runpy
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from ops.lib.sglang.adapter import adapter

PLACE = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture"


def patch(*, model: Any, dflash_use_aux_hidden_state: bool, **_options: Any) -> None:
    """A hook of SGLang's server that adds a method which DFLASH needs to a model without it, and logs that.

    It takes the arguments of the hooked function.
    """
    if dflash_use_aux_hidden_state and adapter().patch_setter(model):
        print(f"{type(model).__name__} lacks a method for DFLASH: dflow added it", flush=True)


HookRegistry.register(PLACE, patch, HookType.BEFORE)

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
