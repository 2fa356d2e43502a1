"""Scores chats in vLLM, in a process of its own: python score.py REQUEST ANSWER, both JSON files.

REQUEST: {"target", "mm_processor_kwargs", "chats": [[message, ...], ...]}
ANSWER: [{"ids": [...], "log_probs": [...]}, ...]: those of ids[1:], each given all that stands before it
"""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(
        model=request["target"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=8,
        limit_mm_per_prompt={"image": 2, "video": 0},
        mm_processor_kwargs=request["mm_processor_kwargs"],
    )
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    answers = []
    for output in llm.chat(request["chats"], params, add_generation_prompt=False):
        ids = list(output.prompt_token_ids)
        rows = output.prompt_logprobs[1:]
        answers.append(
            {"ids": ids, "log_probs": [row[token].logprob for row, token in zip(rows, ids[1:], strict=True)]}
        )
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
