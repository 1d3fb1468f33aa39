"""Generation: the cache computes what the forward pass does, tokens are drawn as asked, texts are
the same however they are generated, also while a model is trained; faults are one line.
"""

import codecs
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU, assert_one_line, assert_same_run, events, raises_one_line, run_tiny, slow
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_export import saved
from tiny_models import MODERN, MODERN_SETTINGS, SMALL, make, tokens
from torch import Tensor

import model as definition
from data.text.prepare import prepare
from data.tokenizer import END_OF_TEXT, BytesTokenizer, from_meta
from deskgpt.compute import autocast
from deskgpt.engine import GenerationConfig, InferenceEngine, Sample, generate, sample_tokens
from deskgpt.gpt2_weights import load_gpt2
from deskgpt.kernels import masked_attention, matmul_attention
from deskgpt.kv_cache import GraphedKVCache, KVCache
from model import MLP, GPTConfig, activation
from sample import SampleConfig, main


def text_of(engine, idx, n):
    """Return what the engine writes after each row of idx, and its first logits."""
    samples = [Sample(BytesTokenizer(), "") for _ in idx]
    (_, logits), *_ = engine.write(idx, samples, GenerationConfig(max_new_tokens=n))
    assert logits is not None
    return [sample.text for sample in samples], logits


def drawn(*args):
    """Return the tokens (B, n) that `generate` yields."""
    return torch.stack([new for new, _ in generate(*args)], 1)


# ---- the cache -----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("prompt", [1, 40])
def test_generation_with_kv_cache_equals_full_recompute_token_for_token(prompt, config):
    model, idx = make(config).eval(), tokens(3, prompt)
    n = max(6, 38 - prompt)  # past block_size=32
    for temperature in (5.0, 0.0):
        settings = GenerationConfig(max_new_tokens=n, temperature=temperature)
        found = drawn(model, idx, settings, 7, KVCache(32))
        full = drawn(model, idx, settings, 7)
        assert torch.equal(found, full)
        assert found.max() < 7  # the rest is padding
    assert torch.equal(full[:, 0], model(idx[:, -32:])[0][:, -1, :7].argmax(1))


usual_mlp = MLP.forward


def over_time(self, x, context):
    """An MLP with a mean over the tokens of the pass so far, without those in the cache. Its
    effect is small: 16 bits round as much.
    """
    n = torch.arange(1, x.size(1) + 1)[:, None]
    return usual_mlp(self, x + 0.01 * x.cumsum(1) / n, context)


def complete_texts(self, x, context):
    """An MLP that fails if the pass does not begin with the text."""
    if int(context.positions[0]):
        raise ValueError("no earlier tokens")
    return usual_mlp(self, x, context)


def in_window(q, k, v, dropout):
    """Attention to the last 100 tokens, on the line that training calls."""
    i = torch.arange(q.size(2))
    near = (i[:, None] >= i) & (i[:, None] - i < 100)
    return masked_attention(q, k, v, near, dropout)


END = 4999  # no prompt has it, and none of the random tokens is one
usual_attention = definition.attention


def within_documents(q, k, v, context, dropout):
    """Attention within a document, which forgets them with a cache."""
    if context.cache is not None:
        return usual_attention(q, k, v, context, dropout)
    documents = (context.tokens == END).cumsum(1)  # (B, T)
    same = documents[:, :, None] == documents[:, None]
    return masked_attention(q, k, v, same[:, None].tril(), dropout)


@pytest.mark.parametrize(
    ("changed", "change", "named"),
    [
        ("MLP.forward", over_time, "relative error"),
        ("MLP.forward", complete_texts, "no earlier tokens"),
        ("causal_attention", in_window, "relative error"),
        ("attention", within_documents, "relative error"),
    ],
)
@pytest.mark.parametrize(("prompt", "dtype"), [(1, "float32"), (300, "float32"), (9, "bfloat16")])
def test_cache_that_computes_something_else_is_left_out_and_one_line_names_it(
    prompt, dtype, changed, change, named, monkeypatch, capsys
):
    monkeypatch.setattr(f"model.{changed}", change)
    model = make(replace(SMALL, block_size=300, vocab_size=END + 1)).eval()
    idx = tokens(2, prompt)
    engine = InferenceEngine(model, idx, dtype, end_of_text=END)
    assert not engine.has_cache
    assert_one_line(capsys.readouterr().err, "cache", "slower", named)
    assert all(text_of(engine, idx, 5)[0])


def test_each_token_is_one_pass_over_itself_in_training_too():
    model, idx = make().eval(), tokens(2, 9)
    transformer = model.transformer
    transformer.residual_dtype = torch.bfloat16
    engine = InferenceEngine(model, idx, "bfloat16", is_trained=True)
    assert engine.has_cache
    assert transformer.residual_dtype == torch.bfloat16
    lengths = []
    transformer.register_forward_pre_hook(lambda module, args: lengths.append(args[0].size(1)))
    text_of(engine, idx, 20)
    assert lengths == [9] + [1] * 19


def partly_in_float32(self, x, context):
    """An MLP whose first layer computes in float32 on purpose, and the second for its bias."""
    with torch.autocast("cpu", enabled=False):
        x = activation(self.c_fc(x.float()), self.activation)
    return F.linear(x, self.c_proj.weight) + self.c_proj.bias


@pytest.mark.parametrize(
    ("mlp", "dtype"), [(usual_mlp, torch.bfloat16), (partly_in_float32, torch.float32)]
)
def test_weights_are_held_in_16_bits_where_autocast_casts_them_and_logits_are_its_own(
    mlp, dtype, monkeypatch
):
    monkeypatch.setattr(MLP, "forward", mlp)
    model, idx = make().eval(), tokens(2, 9)
    with torch.inference_mode(), autocast(CPU, "bfloat16"):
        expected = model.next_logits(idx)
    _, found = text_of(InferenceEngine(model, idx, "bfloat16"), idx, 10)
    assert torch.equal(found, expected.float())
    block: Any = model.transformer.h[0]
    assert block.attn.c_attn.weight.dtype == model.lm_head.weight.dtype == torch.bfloat16
    assert model.transformer.wte.weight.dtype == torch.float32
    assert block.mlp.c_fc.weight.dtype == dtype


@pytest.mark.parametrize("config", [SMALL, MODERN])
def test_cache_serves_only_a_text_that_continues_its_own(config):
    model = make(config).eval()
    cache = KVCache(SMALL.block_size)
    first, other = tokens(1, 8), tokens(1, 8).flip(1)
    longer = torch.cat((first, other), 1)
    with torch.no_grad():
        model.next_logits(first, cache)
        for text in (longer, other, other, longer, first, tokens(2, 8)):
            torch.testing.assert_close(model.next_logits(text, cache), model.next_logits(text))
    cache = GraphedKVCache(9)
    new = repr(vars(cache))
    vars(cache).update(dict.fromkeys(vars(cache), 9))  # whatever it held
    cache.clear()
    assert repr(vars(cache)) == new


def test_attention_of_apple_gpus_is_torchs():
    """Torch's own is wrong there (pytorch issues 181133 and 195910)."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 30, 8)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(matmul_attention(q, k, v, mask, 0.0), expected)


# ---- tokens --------------------------------------------------------------------------------------


P = [0.1, 0.4, 0.2, 0.3]


@pytest.mark.parametrize(
    ("p", "settings", "expected"),
    [
        (P, {"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        (P, {"temperature": 0}, [0, 1, 0, 0]),
        (P, {"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        (P, {"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        (P, {"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        # Of equal ones those with the smallest ids.
        ([0.25] * 4, {"top_k": 3, "top_p": 0.6}, [0.5, 0.5, 0, 0]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities_of_k_or_of_those_that_reach_top_p(
    p, settings, expected
):
    n = 10_000
    u = torch.arange(n, dtype=torch.float64)[:, None] / n  # evenly spaced, the first one is 0
    logits = torch.tensor(p).log().expand(n, -1)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | settings
    picked = sample_tokens(logits, u, **settings)
    shares = torch.bincount(picked[:, 0], minlength=len(p)) / n
    assert shares.tolist() == pytest.approx(expected, abs=1.5e-4)
    assert (shares > 0).tolist() == [share > 0 for share in expected]


def test_tokens_of_a_large_vocabulary_are_drawn_evenly_to_the_last():
    ids = torch.arange(0, 50_304, 997)[:, None]
    u = (ids.double() + 0.001) / 50_304
    picked = sample_tokens(torch.zeros(len(ids), 50_304), u, temperature=1.0, top_k=0, top_p=1.0)
    assert torch.equal(picked, ids)


# ---- texts ---------------------------------------------------------------------------------------


@given(
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "ignore")) | st.binary(),
    st.text(max_size=3),
)
@example(b"aaab", "aab")
def test_text_that_comes_in_pieces_is_shown_whole_up_to_the_stop_text(content, stop):
    text = content.replace(b"\xff", END_OF_TEXT.encode()).decode("utf-8", "replace")
    sample = Sample(BytesTokenizer(), "prompt", stop)
    shown = "".join(sample.add(b) for b in content) + sample.finish()
    expected = text[: text.find(stop)] if stop and stop in text else text
    assert shown == expected
    assert sample.text == "prompt" + expected


def test_text_ends_at_the_first_of_several_stop_texts():
    sample = Sample(BytesTokenizer(), "b", "abcd", "", "c", "b\ufffd")  # which end in one token
    assert [sample.add(b) for b in b"bab.ab\xe9cx"] == ["", "b", "", "ab.", "", "", "", "a", ""]
    assert (sample.text, sample.done) == ("bbab.a", True)


@pytest.mark.parametrize("meta", [{"name": "bytes"}, {"name": "bpe", "merges": "a b"}])
def test_end_of_text_has_its_name_in_prompts_texts_and_stops_whatever_the_tokenizer(meta):
    tokenizer = from_meta(meta)
    end: Any = tokenizer.end_of_text
    ids = tokenizer.encode_prompt(f"{END_OF_TEXT}So{END_OF_TEXT}")
    assert ids.tolist() == [end, *b"So", end]
    assert end not in tokenizer.encode(END_OF_TEXT)  # a text that mentions it
    sample = Sample(tokenizer, "", END_OF_TEXT)
    assert [sample.add(token) for token in (*b"So", end)] == ["S", "o", ""]
    assert sample.done
    assert tokenizer.decode_bytes([end]).decode() == END_OF_TEXT


# ---- sample.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(chars, tmp_path_factory):
    """The out_dir of a run of a few steps on characters."""
    out_dir = tmp_path_factory.mktemp("run")
    run_tiny(chars, out_dir, eval_interval=6, dropout=0.3)
    return out_dir


def samples(run: Path, **settings: object) -> list[str]:
    options: dict = {"out_dir": str(run), "num_samples": 2, "max_new_tokens": 40, "start": "the "}
    return main(SampleConfig(**options | settings))


def test_first_text_appears_while_it_is_written_and_the_others_after_it(run, capsys, monkeypatch):
    write = InferenceEngine.write
    seen = [""]

    def watched(self, *args):
        for shown in write(self, *args):
            yield shown
            seen.append(seen[-1] + capsys.readouterr().out)

    monkeypatch.setattr(InferenceEngine, "write", watched)
    texts = samples(run, num_samples=3)
    assert "the " < seen[9] < texts[0]
    printed = seen[-1] + capsys.readouterr().out
    assert printed == "".join(f"{text}\n---------------\n" for text in texts)


def test_text_of_the_likeliest_tokens_has_three_names(run):
    likeliest = samples(run, temperature=0.0)
    assert samples(run, temperature=50.0, top_k=1) == likeliest
    assert samples(run, temperature=50.0, top_p=1e-6) == likeliest


def test_same_seed_same_text_whatever_the_number_of_samples(run):
    five = samples(run, num_samples=5, out_dir="nowhere", init_from=str(run / "ckpt.pt"))
    assert samples(run, num_samples=2) == five[:2]
    assert samples(run, num_samples=1, seed=1337 + 3) == five[3:4]
    assert len(set(five)) == 5
    assert all(text.startswith("the ") and len(text) == 44 for text in five)  # 44 > block_size=16


def test_prompt_is_read_from_a_file_and_typed_line_breaks_are_line_breaks(tmp_path):
    saved(tmp_path, SMALL, {"name": "char", "chars": "\n\t\\na"})
    settings = {"num_samples": 1, "max_new_tokens": 100}
    typed = r"\n\t\\na"
    [text] = samples(tmp_path, start=typed, **settings)
    assert text.startswith("\n\t\\na")
    end = text.index("\n", 5)
    assert samples(tmp_path, start=typed, stop=r"\n", **settings) == [text[:end]]
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(codecs.BOM_UTF8 + b"\n\t\\na")  # a file is read as it is
    assert samples(tmp_path, start=f"FILE:{prompt}", **settings) == [text]
    saved(tmp_path, SMALL, {"name": "bytes"})
    with raises_one_line("has 100 tokens", "another model's"):
        samples(tmp_path)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("--start=thé ☃", "'é'"),
        ("--start=", "start=''"),
        ("--start=FILE:/no/such.txt", "/no/such.txt"),
        ("--out_dir=/no/such", "/no/such"),
        ("--init_from=no-such-model", "init_from=no-such-model"),
        ("--device=cuda:200", "device='cuda:200'"),  # to torch it is -56
    ],
)
def test_faults_are_one_line(run, script, setting, named):
    done = script("sample.py", f"--out_dir={run}", setting)
    assert done.code in (1, 2)
    assert_one_line(done.err, "error: ", named)
    assert done.out == ""


GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8}
GPT2 |= {"vocab_size": 20}


def folder_of_others(folder: Path, weights: dict[str, Tensor], **changes: Any) -> str:
    """Write a GPT-2 in Hugging Face's format; return its folder."""
    usual = {"wte.weight": torch.ones(20, 8), "wpe.weight": torch.ones(8, 8)}
    save_file(usual | weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(GPT2 | changes))
    return str(folder)


def test_weights_of_others_may_be_cut_once_they_are_read_and_are_refused_afterwards(tmp_path):
    """A file that were mapped into memory would end the process with SIGBUS."""
    exported = {"model_args": GPTConfig().as_args()}  # without biases; one that is not zero is read
    folder = folder_of_others(tmp_path, {"ln_f.bias": torch.ones(8)}, deskgpt=exported)
    state = load_gpt2(folder).model
    os.truncate(tmp_path / "model.safetensors", 100)
    assert sum(w.sum().item() for w in state.values()) == 20 * 8 * 2 + 8 * 8 + 8
    with raises_one_line("init_from", tmp_path, "model.safetensors"):
        load_gpt2(folder)


@pytest.mark.parametrize(
    ("weights", "changes", "named"),
    [
        ({}, {"activation_function": "x" * 10**6}, "'activation_function': 'xxx"),
        ({"wpe.weight": torch.ones(8, 8).to(torch.float8_e4m3fn)}, {}, "torch.float8_e4m3fn"),
        ({"lm_head.weight": torch.zeros(20, 8)}, {}, "ties the head"),
    ],
)
def test_odd_folders_of_others_are_refused_in_a_short_line(tmp_path, weights, changes, named):
    folder = folder_of_others(tmp_path, weights, **changes)
    with pytest.raises(ValueError, match="model_args|init_from") as e:
        load_gpt2(folder)
    assert_one_line(e.value, tmp_path, named)
    assert len(str(e.value)) < 1000


# ---- --sample_interval: texts in log.jsonl as the model learns -----------------------------------


def test_samples_leave_training_bit_for_bit_as_it_is(chars, tmp_path):
    runs = (tmp_path / "without", tmp_path / "with")
    for n, out_dir in enumerate(runs):
        settings = MODERN_SETTINGS | {"eval_interval": 2, "sample_interval": 2 * n}
        run_tiny(chars, out_dir, dropout=0.1, **settings)
    assert_same_run(*runs)
    without, found = (events(out_dir, "sample") for out_dir in runs)
    assert without == []
    assert [e["iter"] for e in found] == [0, 4, 6]  # each second evaluation, and the last
    same = samples(runs[1], start="\n", max_new_tokens=15, device="cpu", dtype="float32")
    assert found[-1]["texts"] == same
    for text in (text for e in found for text in e["texts"]):
        assert text.startswith("\n")
        assert len(text) == 16  # no more than the context


@slow
def test_run_continues_without_samples_if_the_tokenizer_does_not_know_the_prompt(tmp_path, capfd):
    prepare("abc " * 1000, tmp_path / "data", "char", "a text in one line")
    run_tiny(tmp_path / "data", tmp_path / "out", sample_interval=1)
    assert "sample_interval=1: no samples, since the tokenizer" in capfd.readouterr().out
    assert events(tmp_path / "out", "sample") == []
    assert len(events(tmp_path / "out", "end")) == 1
