"""Runs a GGUF file in llama.cpp (the package xllamacpp), and says which tokens may follow a prompt.

    echo '[1, 2, 3]' | python -m deskgpt.export.llama_cpp model.gguf 1024

reads the prompt's ids as JSON, and prints the log-probabilities of the likeliest next tokens, by their ids, as JSON.
llama.cpp has a process of its own because it ends the process on a processor for which it was not built.
"""

from __future__ import annotations

import json
import secrets
import sys
from typing import Any

COMPARED = 1000  # of the likeliest tokens: llama.cpp takes 13 s to write down all of GPT-2's


def server(path: str, block_size: int, key: str) -> Any:
    """llama.cpp with this model, in float32 throughout, silent. It listens on a local port, for who knows the key."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = block_size
    params.n_parallel = 1
    params.n_gpu_layers = 0
    params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.fit_params = False
    params.warmup = False
    params.verbosity = -1
    params.api_keys = [key]
    return xllamacpp.Server(params)


def next_log_probabilities(llama: Any, prompt: list[int]) -> dict[int, float]:
    """Of the likeliest tokens that may follow the prompt, by their ids, before any sampling."""
    # Id 33 is drawn, a letter or a sign: llama.cpp answers with whole characters only.
    request = {"prompt": prompt, "max_tokens": 1, "logprobs": COMPARED, "logit_bias": [[33, 1e9]]}
    drawn = llama.handle_completions(request)["choices"][0]["logprobs"]["content"][0]
    return {entry["id"]: entry["logprob"] for entry in drawn["top_logprobs"]}


if __name__ == "__main__":
    llama = server(sys.argv[1], int(sys.argv[2]), secrets.token_urlsafe())
    print(json.dumps(next_log_probabilities(llama, json.load(sys.stdin))))
