"""Runs a GGUF file in llama.cpp (the package xllamacpp), and prints what it computes for a text.

    echo '[1, 2, 3]' | python -m deskgpt.export.llama_cpp model.gguf 1024

reads the text's token ids as JSON. Prints {"hidden": the final hidden states after all tokens (T, C), "next": the
log-probabilities of the likeliest tokens after the last one, by their ids}. llama.cpp has a process of its own because
it ends the process on a processor for which it was not built.
"""

from __future__ import annotations

import json
import secrets
import sys
import urllib.request
from typing import Any

COMPARED = 1000  # of the likeliest tokens: llama.cpp takes 13 s to write down all of GPT-2's


class Llama:
    """llama.cpp with a model, in float32 throughout, silent; asked over its server's own interface."""

    def __init__(self, path: str, block_size: int) -> None:
        import xllamacpp

        self.key = secrets.token_urlsafe()
        params = xllamacpp.CommonParams()
        params.model.path = path
        params.n_ctx = params.n_batch = params.n_ubatch = block_size
        params.n_parallel = 1
        params.n_gpu_layers = 0
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.embedding = True
        params.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_NONE  # hidden states of each token
        params.fit_params = False
        params.warmup = False
        params.verbosity = -1
        params.api_keys = [self.key]
        self.server = xllamacpp.Server(params)

    def ask(self, what: str, **request: Any) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        address = f"{self.server.listening_address}/{what}"
        asked = urllib.request.Request(address, json.dumps(request).encode(), headers)
        with urllib.request.urlopen(asked) as reply:
            return json.load(reply)


def computed(llama: Llama, tokens: list[int]) -> dict[str, Any]:
    hidden = llama.ask("embedding", content=tokens, embd_normalize=-1)[0]["embedding"]
    # Token 33 is drawn, a letter or a sign: llama.cpp answers with whole characters only.
    request = {"prompt": tokens, "max_tokens": 1, "logprobs": COMPARED, "logit_bias": [[33, 1e9]]}
    drawn = llama.server.handle_completions(request)["choices"][0]["logprobs"]["content"][0]
    return {"hidden": hidden, "next": {entry["id"]: entry["logprob"] for entry in drawn["top_logprobs"]}}


if __name__ == "__main__":
    json.dump(computed(Llama(sys.argv[1], int(sys.argv[2])), json.load(sys.stdin)), sys.stdout)
