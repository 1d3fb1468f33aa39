"""llama.cpp, from the package xllamacpp: what it computes for a GGUF file, in float32 throughout."""

from __future__ import annotations

import json
import secrets
import urllib.request
from typing import Any

COMPARED = 1000  # of the likeliest tokens: llama.cpp takes 13 s to write down all of GPT-2's


class Llama:
    """llama.cpp with a model, silent; asked over its server's own interface. Raises ValueError if it cannot load it."""

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
        params.load_mode = xllamacpp.llama_load_mode.LLAMA_LOAD_MODE_NONE  # not mapped: Windows renames no open file
        params.fit_params = False
        params.warmup = False
        params.verbosity = -1
        params.api_keys = [self.key]
        try:
            self.server = xllamacpp.Server(params)
        except RuntimeError as e:
            raise ValueError(f"llama.cpp cannot load the file: {str(e)[:160]}; nothing was exported") from None

    def ask(self, what: str, **request: Any) -> Any:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        address = f"{self.server.listening_address}/{what}"
        asked = urllib.request.Request(address, json.dumps(request).encode(), headers)
        try:
            with urllib.request.urlopen(asked) as reply:
                return json.load(reply)
        except OSError as e:
            raise ValueError(f"llama.cpp does not run the file: {e}; nothing was exported") from None

    def hidden_states(self, tokens: list[int]) -> list[list[float]]:
        """Return what follows the final norm, for each of the tokens (T, C)."""
        return self.ask("embedding", content=tokens, embd_normalize=-1)[0]["embedding"]

    def next_tokens(self, tokens: list[int]) -> dict[int, float]:
        """Return log-probabilities of the likeliest tokens after the last one, by their ids."""
        # Token 33 is drawn, a letter or a sign: llama.cpp answers with whole characters only.
        request = {"prompt": tokens, "max_tokens": 1, "logprobs": COMPARED, "logit_bias": [[33, 1e9]]}
        drawn = self.server.handle_completions(request)["choices"][0]["logprobs"]["content"][0]
        return {entry["id"]: entry["logprob"] for entry in drawn["top_logprobs"]}
