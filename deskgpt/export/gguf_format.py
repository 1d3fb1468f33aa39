"""Our models as GGUF files, for llama.cpp and the programs that are built on it, such as Ollama.

Which of llama.cpp's architectures computes what our settings say is read in its source (src/models/*.cpp).

Shape legend: C channels (n_embd), H heads, D = C // H, V vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deskgpt.kernels.verify import SAME_LOGITS, distance
from model import GPT, GPTConfig

ROOT = Path(__file__).resolve().parents[2]

# Our settings, by the architecture that computes them. llama.cpp has one GELU, from a table of 16 bits: what it rounds
# is as large as the difference between our two (docs/export.md).
GELU = ("gelu_tanh", "gelu")
ARCHITECTURES: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"position": ("learned",), "norm": ("layer",), "activation": GELU},
    "starcoder2": {"position": ("rope",), "norm": ("layer",), "activation": GELU},
    "nemotron": {"position": ("rope",), "norm": ("layer",), "activation": ("relu2",)},
    "arcee": {"position": ("rope",), "norm": ("rms",), "activation": ("relu2",), "bias": (False,)},
    "apertus": {
        "position": ("rope",),
        "norm": ("rms",),
        "activation": ("relu2",),
        "bias": (False,),
        "qk_norm": (True,),
    },
}
OTHERWISE = {"qk_norm": (False,), "token_shift": (False,)}
HAVE_OWN_HEAD = ("nemotron", "apertus")  # these do not take the embedding for a tied head

NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

# How far llama.cpp's logits may be from ours, as distance() has it. The largest that was seen without GELU is 4e-6. Its
# GELU made 6e-4 in models of up to 24 layers, and 7e-3 in one of absurdly large weights.
SAME_WITH_GELU = 0.02


def architecture_of(c: GPTConfig) -> str:
    """The architecture of llama.cpp that computes what a GPT of c does. Raises ValueError where there is none."""
    lacking = {}
    for name, settings in ARCHITECTURES.items():
        wanted = OTHERWISE | settings
        lacking[name] = {k: values[0] for k, values in wanted.items() if getattr(c, k) not in values}
    nearest = min(lacking, key=lambda name: len(lacking[name]))
    if lacking[nearest]:
        here = ", ".join(f"{k}={getattr(c, k)}" for k in lacking[nearest])
        there = " ".join(f"--{k}={value}" for k, value in lacking[nearest].items())
        raise ValueError(
            f"llama.cpp computes no model with {here} and the other settings of this one; train one with {there}, or "
            "export a folder (--to=my-model)"
        )
    return nearest


# ---- the file ------------------------------------------------------------------------------------------------


def write(path: Path, c: GPTConfig, weights: dict[str, Tensor], tokenizer: dict[str, Any], chat: str | None) -> None:
    """Writes the file. tokenizer: as tokenizer.json; chat: the template of dialogues for Jinja.

    Raises ValueError for a model or a vocabulary that llama.cpp does not have; OSError.
    """
    import gguf

    architecture = architecture_of(c)
    if tokenizer["model"]["type"] != "BPE":
        raise ValueError(
            "llama.cpp has no vocabularies of characters; prepare the data with --tokenizer=bpe, bytes or gpt2 and "
            "train on that, or export a folder (--to=my-model)"
        )
    vocab = tokenizer["model"]["vocab"]
    (end_of_text,) = [token["id"] for token in tokenizer["added_tokens"]]
    kinds: list[int] = [gguf.TokenType.NORMAL] * len(vocab)
    kinds[end_of_text] = gguf.TokenType.CONTROL
    merges = [" ".join(pair) for pair in tokenizer["model"]["merges"]]

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(c.block_size)
    writer.add_embedding_length(c.n_embd)
    writer.add_block_count(c.n_layer)
    writer.add_feed_forward_length(4 * c.n_embd)
    writer.add_head_count(c.n_head)
    writer.add_head_count_kv(c.n_head)
    if c.norm == "rms":
        writer.add_layer_norm_rms_eps(1e-5)
    else:
        writer.add_layer_norm_eps(1e-5)
    if c.position == "rope":
        writer.add_rope_dimension_count(c.n_embd // c.n_head)
        writer.add_rope_freq_base(10000.0)
    if architecture == "apertus":  # its xIELU is relu2 where softplus(alpha_p) = 1 and softplus(alpha_n) = beta = 0
        writer.add_xielu_alpha_p([math.log(math.e - 1)] * c.n_layer)
        writer.add_xielu_alpha_n([-100.0] * c.n_layer)
        writer.add_xielu_beta([0.0] * c.n_layer)
        writer.add_xielu_eps([-1e-6] * c.n_layer)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.__getitem__))
    writer.add_token_types(kinds)
    writer.add_token_merges(merges or ["ÿ ÿ"])  # llama.cpp wants one; UTF-8 has no byte 255, which ÿ spells
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_text)
    writer.add_add_bos_token(False)
    if chat is not None:
        writer.add_chat_template(chat)

    for name, w in tensors_of(c, weights, len(vocab)).items():
        writer.add_tensor(name, w.contiguous().numpy())
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def tensors_of(c: GPTConfig, weights: dict[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Our state_dict in llama.cpp's names and shapes, without the padding of the vocabulary.

    Raises ValueError for weights that it does not have, as after a change of model.py.
    """
    architecture = architecture_of(c)
    found: dict[str, Tensor] = {}
    for key, w in weights.items():
        module, _, kind = key.rpartition(".")
        block = ""
        if module.startswith("transformer.h."):
            _, _, layer, module = module.split(".", 3)
            block = f"blk.{layer}."
        if module not in NAMES or kind not in ("weight", "bias"):
            raise ValueError(f"llama.cpp's {architecture} has no {key}, which model.py has; nothing was exported")
        if module == "lm_head" and c.tie_weights and architecture not in HAVE_OWN_HEAD:
            continue
        if module in ("transformer.wte", "lm_head"):
            w = w[:vocab_size]
        parts = {NAMES[module]: w}
        if module == "attn.c_attn" and architecture != "gpt2":
            q, k, v = w.chunk(3)
            if architecture == "arcee":
                q, k = in_pairs(q, c.n_head), in_pairs(k, c.n_head)
            parts = {"attn_q": q, "attn_k": k, "attn_v": v}
        for name, part in parts.items():
            found[f"{block}{name}.{kind}"] = part
            if c.norm == "layer" and not c.bias and (block or name == "output_norm"):
                found[f"{block}{name}.bias"] = torch.zeros(len(part))  # which it wants
    if c.qk_norm:
        for i in range(c.n_layer):
            for name in ("attn_q_norm", "attn_k_norm"):
                found[f"blk.{i}.{name}.weight"] = torch.ones(c.n_embd // c.n_head)
    return found


def in_pairs(w: Tensor, n_head: int) -> Tensor:
    """Rows (C, C) of queries or keys for rotary positions that turn (2i, 2i + 1) together, not (i, i + D / 2)."""
    C = w.size(1)
    return w.view(n_head, 2, -1, C).transpose(1, 2).reshape(C, C)


# ---- what llama.cpp computes ---------------------------------------------------------------------------------


@torch.inference_mode()
def compare(path: Path, ours: GPT, vocab_size: int) -> str:
    """Compares what llama.cpp makes of the file with model.py, after a full context; says how.

    Raises ValueError where they differ.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        return "xllamacpp (llama.cpp as a package) is not installed: nothing was compared with model.py"
    block_size = ours.config.block_size
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, max(1, block_size - 1)), generator=draw)
    command = [sys.executable, "-m", "deskgpt.export.llama_cpp", str(path.resolve()), str(block_size)]
    prompt = json.dumps(tokens[0].tolist())
    brief = os.environ | {"GGML_NO_BACKTRACE": "1"}  # a defect is then one line, too
    done = subprocess.run(command, input=prompt, capture_output=True, text=True, cwd=ROOT, env=brief)
    if done.returncode:
        reason = (done.stderr.strip() or f"it ended with status {done.returncode}").splitlines()[-1]
        raise ValueError(
            f"llama.cpp does not run the file: {reason[:160]}; nothing was exported. Without the package xllamacpp "
            "(pip uninstall xllamacpp) a file is written and not compared"
        )
    found = json.loads(done.stdout)
    theirs = torch.tensor(list(found.values()))
    expected = ours(tokens)[0][0, -1].log_softmax(0)[list(map(int, found))]
    off = distance(theirs - theirs.mean(), expected - expected.mean())
    if not off <= (SAME_WITH_GELU if ours.config.activation in GELU else SAME_LOGITS):
        raise ValueError(
            f"llama.cpp's {architecture_of(ours.config)} does not compute what model.py does: its logits differ by "
            f"{off:.3g}; nothing was exported. A model.py that was changed in other ways than docs/export.md lists "
            "needs a program of its own"
        )
    return f"llama.cpp computes the same logits as model.py after {tokens.numel():,} tokens, within {off:.1g}"
