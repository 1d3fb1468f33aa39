"""export.py --to=model.gguf: llama.cpp computes what our model does, and reads and writes texts as
it does.
"""

import json
import math
import sys
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_one_line, files_of_at_most, raises_one_line, slow
from test_export import (
    DIALOGUE,
    ODD,
    each_tokenizer,
    exported,
    prompt_of_dialogue,
    saved,
    tokenizer_and_text,
)
from test_sample import over_time
from tiny_models import MODERN_SETTINGS, make

from data.chat import template
from data.tokenizer import END_OF_TEXT, BytesTokenizer, CharTokenizer
from deskgpt import export_gguf
from deskgpt.engine import GenerationConfig, encode_prompt, generate
from export import ExportConfig, main
from model import GPTConfig

pytest.importorskip("gguf")
needs_llama = pytest.mark.skipif(
    find_spec("xllamacpp") is None, reason="xllamacpp, which is llama.cpp, is missing"
)
BYTES = {"name": "bytes"}
# The last two rows are padding
SMALL = GPTConfig(block_size=64, vocab_size=258, n_layer=2, n_head=2, n_embd=32)


def ask(server: Any, what: str, **request: Any) -> Any:
    """Return the answer of llama.cpp's server."""
    asked = urllib.request.Request(f"{server.listening_address}/{what}")
    asked.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(asked, json.dumps(request).encode()) as reply:
        return json.load(reply)


@needs_llama
@slow
@pytest.mark.parametrize("architecture", export_gguf.ARCHITECTURES)
def test_llama_cpp_writes_the_same_greedy_tokens(tmp_path, capsys, architecture):
    settings = export_gguf.ARCHITECTURES[architecture]
    prompt = "To be, or ñot"
    for n, tokenizer in enumerate((BytesTokenizer(), CharTokenizer.of(prompt + ODD))):
        choices = {"bias": bool(n)} | settings
        if choices["bias"]:
            choices["activation"] = "gelu"
        config = replace(
            SMALL, n_head=4, vocab_size=tokenizer.vocab_size + 2, tie_weights=not n, **choices
        )
        model, path = exported(tmp_path / str(n), config, tokenizer.meta(), to="a.gguf")
        named = f"llama.cpp's {architecture}\nxllamacpp computes the same"
        assert named in capsys.readouterr().out
        options = {"temperature": 0.0, "ignore_eos": True, "return_tokens": True}
        server = export_gguf.loaded(path, 64)
        theirs = ask(server, "completion", prompt=prompt, n_predict=40, **options)["tokens"]
        ids = encode_prompt(prompt, tokenizer)
        n_tokens = tokenizer.vocab_size - (tokenizer.end_of_text is not None)
        greedy = GenerationConfig(max_new_tokens=40, temperature=0)
        assert theirs == [int(new) for new, _ in generate(model, ids, greedy, n_tokens)]


def by_length(q, k, v, dropout):
    """Scores grow with the length of the text, by nothing at that of a whole context."""
    scale = math.log(q.size(2) + 1) / math.log(64)
    return F.scaled_dot_product_attention(q * scale, k, v, is_causal=True)


@needs_llama
@pytest.mark.parametrize(
    ("function", "change"), [("causal_attention", by_length), ("MLP.forward", over_time)]
)
def test_model_that_llama_cpp_computes_otherwise_is_not_exported(
    tmp_path, monkeypatch, function, change
):
    monkeypatch.setattr(f"model.{function}", change)
    with raises_one_line("model.py", "logits differ", "nothing was exported"):
        exported(tmp_path, SMALL, BYTES, to="a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@needs_llama
@slow
@each_tokenizer
def test_llama_cpp_reads_and_writes_our_tokens_and_dialogues(text, tmp_path, kind):
    tokenizer, odd = tokenizer_and_text(kind, text)
    _, path = exported(
        tmp_path,
        replace(SMALL, vocab_size=tokenizer.vocab_size),
        tokenizer.meta(),
        template.NAME,
        to="a.gguf",
    )
    server = export_gguf.loaded(path, 64)
    whole = {"add_special": True, "parse_special": True}
    for sample in (odd, ODD):
        ids = ask(server, "tokenize", content=sample, **whole)["tokens"]
        assert ids == tokenizer.encode(sample).tolist()
    assert ask(server, "detokenize", tokens=ids)["content"] == ODD
    if kind != "char":
        ended = ask(server, "tokenize", content=f"a{END_OF_TEXT}", **whole)["tokens"]
        assert ended[1:] == [tokenizer.end_of_text]
    if kind == "bytes":
        rendered = ask(server, "apply-template", messages=DIALOGUE)["prompt"]
        ids = ask(server, "tokenize", content=rendered, **whole)["tokens"]
        assert ids == prompt_of_dialogue()


def test_all_that_llama_cpp_lacks_is_named_with_what_to_change():
    config = replace(SMALL, **MODERN_SETTINGS | {"norm": "layer"})
    with raises_one_line("llama.cpp", "token_shift=True", "--token_shift=False", "--norm=rms"):
        export_gguf.architecture_of(config)
    config = replace(SMALL, **export_gguf.ARCHITECTURES["apertus"])
    weights = make(config).state_dict()
    found = export_gguf.tensors_of(config, weights, 256)
    parts = [found[f"blk.1.attn_{letter}.weight"] for letter in "qkv"]
    assert torch.equal(torch.cat(parts), weights["transformer.h.1.attn.c_attn.weight"])
    model = make(SMALL)
    found = export_gguf.tensors_of(SMALL, model.state_dict(), 258)
    assert sum(map(torch.numel, found.values())) == sum(map(torch.numel, model.parameters()))
    model.transformer.h[0].register_parameter("gain", torch.nn.Parameter(torch.zeros(3)))
    with raises_one_line("transformer.h.0.gain", "nothing was exported"):
        export_gguf.tensors_of(SMALL, model.state_dict(), 256)


def test_full_disk_and_a_missing_package_are_one_line_and_leave_nothing(
    tmp_path, script, monkeypatch
):
    saved(tmp_path / "out", SMALL, BYTES)
    with files_of_at_most(20), raises_one_line("a.GGUF", "free some disk space", kind=OSError):
        main(ExportConfig(out_dir=str(tmp_path / "out"), to=str(tmp_path / "a.GGUF")))
    monkeypatch.setitem(sys.modules, "gguf", None)
    done = script("export.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / 'b.gguf'}")
    assert_one_line(done.err, "pip install gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
