"""Decodes prompts with a draft in vLLM, in a process of its own: python decode.py REQUEST ANSWER, both JSON files.

REQUEST: {"target", "model_impl", "draft", "algorithm", "block_size", "prompts": [[id, ...], ...], "tokens",
"stop": [id, ...]}
ANSWER: [{"tokens": [...], "accepted": [...]}, ...]
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

from ops.lib.sglang.serve_command import DraftOption
from ops.lib.vllm.serve_command import speculative_config


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=request["target"],
        model_impl=request["model_impl"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        disable_log_stats=False,
        per_request_spec_decode_metrics="detailed",
        speculative_config=speculative_config(
            DraftOption(path=request["draft"], block_size=request["block_size"], algorithm=request["algorithm"])
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=request["tokens"], stop_token_ids=request["stop"])
    answers = []
    for output in llm.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], params):
        (one,) = output.outputs
        metrics = one.spec_decode_metrics
        answers.append({"tokens": list(one.token_ids), "accepted": metrics.per_step_accepted if metrics else []})
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
