"""Generation: the cache computes what the forward pass does, tokens are drawn as asked, texts are
the same however they are generated, also while a model is trained; faults are one line.
"""

from __future__ import annotations

import codecs
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gloo
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    assert_equal,
    assert_one_line,
    events,
    needs_bpe,
    raises_one_line,
    tiny,
    trajectory,
    weights,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import MODERN, MODERN_SETTINGS, SMALL, make, tokens
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from data.text.prepare import prepare
from data.tokenizer import BytesTokenizer
from deskgpt.compute import autocast
from deskgpt.engine import GenerationConfig, InferenceEngine, Sample, Sampler
from deskgpt.kernels import masked_attention, matmul_attention
from deskgpt.kv_cache import KVCache
from model import GPT, MLP, activation, sample_tokens
from sample import SampleConfig, main
from train import main as train


def drawn(model: GPT, idx: Tensor, n: int, cached: bool, **options: Any) -> Tensor:
    """Return the next n tokens (n, B)."""
    cache = KVCache(model.config.block_size) if cached else None
    return torch.stack(list(model.generate(idx, n, cache=cache, **options)))


def text_of(engine: InferenceEngine, idx: Tensor, n: int, on_logits: Any = None) -> list[str]:
    """Return what the engine writes after each row of idx."""
    samples = [Sample(BytesTokenizer(), "") for _ in idx]
    for _ in engine.write(idx, samples, GenerationConfig(max_new_tokens=n), on_logits):
        pass
    return [sample.text for sample in samples]


# ---- the cache -----------------------------------------------------------------------------------


def test_tokens_on_cuda_are_not_computed_by_cudnns_attention():
    engine = InferenceEngine(make().eval(), tokens(1, 4), "float32")
    engine.device = torch.device("cuda")
    with engine.mode():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("config", [SMALL, MODERN])
@pytest.mark.parametrize("prompt", [1, 40])
def test_generation_with_kv_cache_equals_full_recompute_token_for_token(prompt, config):
    model, idx = make(config).eval(), tokens(3, prompt)
    n = max(6, 38 - prompt)  # past block_size=32
    # The rest is padding
    options: dict[str, Any] = {"temperature": 5.0, "seed": 5, "vocab_size": 7}
    found = drawn(model, idx, n, cached=True, **options)
    assert found.max() == 6
    assert torch.equal(found, drawn(model, idx, n, cached=False, **options))
    found = drawn(model, idx, n, cached=True, temperature=0.0)
    text = torch.cat((idx, found.t()), 1)
    for t in range(prompt, prompt + n):
        context = text[:, max(0, t - 32) : t]
        assert torch.equal(model(context)[0][:, -1].argmax(1), text[:, t])


def over_time(self: MLP, x: Tensor, context: Any) -> Tensor:
    """An MLP with a mean over the tokens of the pass so far, without those in the cache."""
    n = torch.arange(1, x.size(1) + 1)[:, None]
    return self.c_proj(activation(self.c_fc(x.cumsum(1) / n), self.activation))


def complete_texts(self: MLP, x: Tensor, context: Any) -> Tensor:
    """An MLP that fails if the pass does not begin with the text."""
    if int(context.positions[0]):
        raise ValueError("no earlier tokens")
    return self.c_proj(activation(self.c_fc(x), self.activation))


@pytest.mark.parametrize(
    ("change", "named"), [(over_time, "relative error"), (complete_texts, "no earlier tokens")]
)
@pytest.mark.parametrize("prompt", [1, 32])
def test_cache_that_computes_something_else_is_left_out_and_one_line_names_it(
    prompt, change, named, monkeypatch, capsys
):
    monkeypatch.setattr(MLP, "forward", change)
    model, idx = make().eval(), tokens(2, prompt)
    engine = InferenceEngine(model, idx, "float32")
    assert engine.cache_type is None
    assert_one_line(capsys.readouterr().err, "cache", "slower", named)
    options: dict[str, Any] = {"temperature": 0.8, "seed": 1337, "vocab_size": 100}
    expected = drawn(model, idx, 12, cached=False, **options)
    assert text_of(engine, idx, 12) == [bytes(row.tolist()).decode() for row in expected.t()]


@pytest.mark.parametrize(("context", "is_noticed"), [(128, True), (512, True), (40, False)])
def test_window_on_the_line_of_attention_that_training_calls_is_noticed_by_sampling(
    context, is_noticed, monkeypatch, capsys
):
    """A window of 100 tokens, from a prompt of one; a context of 40 has no window."""

    def in_window(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        i = torch.arange(q.size(2))
        near = (i[:, None] >= i) & (i[:, None] - i < 100)
        return masked_attention(q, k, v, near, dropout)

    monkeypatch.setattr("model.causal_attention", in_window)
    engine = InferenceEngine(
        make(replace(SMALL, block_size=context)).eval(), tokens(1, 1), "float32"
    )
    assert (engine.cache_type is None) == is_noticed
    assert ("relative error" in capsys.readouterr().err) == is_noticed


def test_each_token_is_one_pass_over_itself(monkeypatch):
    model, idx = make().eval(), tokens(2, 9)
    engine = InferenceEngine(model, idx, "float32")
    assert engine.cache_type is KVCache
    lengths = []
    model.transformer.register_forward_pre_hook(
        lambda module, args: lengths.append(args[0].size(1))
    )
    text_of(engine, idx, 20)
    assert lengths == [9] + [1] * 19


def test_weights_are_cast_once_for_a_text_in_16_bits_and_logits_are_autocasts_own():
    model, idx = make().eval(), tokens(2, 9)
    with torch.inference_mode(), autocast(torch.device("cpu"), "bfloat16"):
        expected = model.next_logits(idx)
    shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    layers = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
    found: list[Tensor] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as p:
        engine = InferenceEngine(model, idx, "bfloat16")
        text_of(engine, idx, 10, on_logits=found.append)
    casts = [
        e
        for e in p.key_averages(group_by_input_shape=True)
        if e.key == "aten::_to_copy" and e.input_shapes
    ]
    assert sum(e.count for e in casts if tuple(e.input_shapes[0]) in shapes) <= layers
    assert torch.equal(found[0], expected.float())


def test_cache_serves_only_a_text_that_continues_its_own():
    model = make().eval()
    cache = KVCache(SMALL.block_size)
    first, other = tokens(1, 8), tokens(1, 8).flip(1)
    with torch.no_grad():
        model.next_logits(first, cache)
        for text in (
            torch.cat((first, other), 1),
            other,
            torch.cat((other, first[:, :1]), 1),
            first,
        ):
            torch.testing.assert_close(model.next_logits(text, cache), model.next_logits(text))


@pytest.mark.parametrize("T", [30, 1])
def test_attention_of_apple_gpus_is_torchs(T):
    """Torch's own is wrong there (pytorch issues 181133 and 195910)."""
    q, k, v = torch.randn(3, 2, 4, 30, 8, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(30, 30, dtype=torch.bool).tril() if T > 1 else None
    expected = F.scaled_dot_product_attention(q[:, :, -T:], k, v, attn_mask=mask)
    torch.testing.assert_close(matmul_attention(q[:, :, -T:], k, v, mask, 0.0), expected)


def counts(p: torch.Tensor, n: int = 10_000, **kwargs: object) -> torch.Tensor:
    """How often each token is drawn from probabilities p over n evenly spaced u."""
    u = (torch.arange(n, dtype=torch.float64)[:, None] + 0.5) / n
    options: dict = {"temperature": 1.0, "top_k": None, "top_p": 1.0} | kwargs
    picked = sample_tokens(p.log().expand(n, -1), u, **options)
    return torch.bincount(picked[:, 0], minlength=len(p))


def test_tokens_are_drawn_with_their_probabilities_of_the_likeliest_or_of_those_that_reach_top_p():
    p = torch.tensor([0.1, 0.4, 0.2, 0.3])
    torch.testing.assert_close(counts(p).double(), p.double() * 10_000, rtol=0, atol=1.5)
    sharper = (p**2 / (p**2).sum()).double()
    torch.testing.assert_close(
        counts(p, temperature=0.5).double(), sharper * 10_000, rtol=0, atol=1.5
    )
    assert counts(p, temperature=0).tolist() == [0, 10_000, 0, 0]
    assert (counts(p, top_k=2) > 0).tolist() == [False, True, False, True]
    assert (counts(p, top_p=0.69) > 0).tolist() == [False, True, False, True]
    assert (counts(p, top_p=0.71) > 0).tolist() == [False, True, True, True]
    assert (counts(p, top_p=1e-9) > 0).tolist() == [False, True, False, False]
    assert (counts(p, top_k=3, top_p=0.5) > 0).tolist() == [False, True, False, True]
    assert (counts(p, top_k=99) > 0).all()


# ---- sample.py -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(chars, tmp_path_factory) -> Path:
    """The out_dir of a run of a few steps on characters."""
    out_dir = tmp_path_factory.mktemp("run")
    train(tiny(chars, out_dir, eval_interval=6))
    return out_dir


def samples(run: Path, **settings: object) -> list[str]:
    options: dict = {
        "out_dir": str(run),
        "num_samples": 2,
        "max_new_tokens": 40,
        "start": "the ",
    } | settings
    return main(SampleConfig(**options))


def test_first_text_appears_while_it_is_written_and_those_that_ended_follow_in_their_order(
    run, capsys, monkeypatch
):
    write = InferenceEngine.write
    printed = ""
    seen: list[str] = []

    def watched(
        self: InferenceEngine, prompts: torch.Tensor, texts: list[Sample], *args: Any
    ) -> Any:
        nonlocal printed
        for shown in write(self, prompts, texts, *args):
            yield shown
            printed += capsys.readouterr().out
            seen.append(printed)
            n_ended = printed.count("---------------")
            assert all(text.done for text in texts[:n_ended])
            assert printed.endswith(texts[n_ended].text[: texts[n_ended].shown])

    monkeypatch.setattr(InferenceEngine, "write", watched)
    texts = samples(run, num_samples=3, stop="e", max_new_tokens=60)
    assert len(seen[9]) > len("the ")
    printed += capsys.readouterr().out
    assert printed == "".join(f"{text}\n---------------\n" for text in texts)


def test_same_seed_same_text_whatever_the_number_of_samples(run):
    five = samples(run, num_samples=5, out_dir="nowhere", init_from=str(run / "ckpt.pt"))
    assert samples(run, num_samples=2) == five[:2]
    assert samples(run, num_samples=1, seed=1337 + 3) == five[3:4]
    assert len(set(five)) == 5
    assert all(text.startswith("the ") and len(text) == 44 for text in five)  # 44 > block_size=16


def test_prompt_from_a_file(run, tmp_path):
    (tmp_path / "marked.txt").write_bytes(codecs.BOM_UTF8 + b"and\nso ")
    assert samples(run, start=f"FILE:{tmp_path / 'marked.txt'}") == samples(run, start="and\nso ")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with raises_one_line("UTF-8", tmp_path / "latin.txt", "line 1"):
        samples(run, start=f"FILE:{tmp_path / 'latin.txt'}")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("--start=thé ☃", "'é', '☃'"),
        ("--start=", "start=''"),
        ("--start=FILE:/no/such.txt", "/no/such.txt"),
        ("--start=\udcff", "UTF-8"),
        ("--top_p=0", "top_p=0.0"),
        ("--out_dir=/no/such", "/no/such/ckpt.pt"),
        ("--init_from=no-such-model", "init_from=no-such-model"),
    ],
)
def test_faults_are_one_line(run, script, setting, named):
    done = script("sample.py", f"--out_dir={run}", setting)
    assert done.code in (1, 2)
    assert_one_line(done.err, "error: ", named)
    assert done.out == ""


@needs_bpe
@pytest.mark.slow
def test_gpt2_weights_of_others_are_sampled_from_but_not_if_they_are_nan(tmp_path, script):
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=32))
    command = (
        "sample.py",
        f"--init_from={tmp_path}",
        "--start=Hello 🧀",
        "--num_samples=2",
        "--max_new_tokens=50",
    )
    theirs.save_pretrained(tmp_path)
    done = script(*command)
    assert done.code == 0, done.err
    assert done.out.count("Hello 🧀") == 2
    theirs.transformer.ln_f.bias.data.fill_(torch.nan)
    theirs.save_pretrained(tmp_path)
    done = script(*command)
    assert done.code == 1
    assert_one_line(done.err, tmp_path, "NaN")


@given(
    st.text(max_size=40).map(lambda text: text.encode("utf-8", "ignore")) | st.binary(),
    st.text(max_size=3),
)
def test_text_that_comes_in_pieces_is_shown_whole_up_to_the_stop_text(content, stop):
    content = content.replace(b"\xff", b"")  # the end of a text
    text = content.decode("utf-8", "replace")
    sample = Sample(BytesTokenizer(), "prompt", stop)
    shown = "".join(sample.add(b) for b in content) + sample.finish()
    expected = text[: text.find(stop)] if stop and stop in text else text
    assert shown == expected
    assert sample.text == "prompt" + expected


def test_text_ends_at_the_first_of_several_stop_texts():
    sample = Sample(BytesTokenizer(), "b", "abcd", "", "bc", "x")
    assert [sample.add(b) for b in b"bab.abcd"] == ["", "b", "", "ab.", "", "", "a", ""]
    assert (sample.text, sample.done) == ("bbab.a", True)


# ---- --sample_interval: texts in log.jsonl as the model learns -----------------------------------


@pytest.mark.slow
def test_samples_leave_training_bit_for_bit_as_it_is(chars, tmp_path):
    for out, n in (("without", 0), ("with", 1)):
        train(tiny(chars, tmp_path / out, dropout=0.1, sample_interval=n, **MODERN_SETTINGS))
    assert_equal(weights(tmp_path / "without"), weights(tmp_path / "with"))
    assert trajectory(tmp_path / "without") == trajectory(tmp_path / "with")
    assert events(tmp_path / "without", "sample") == []
    found = events(tmp_path / "with", "sample")
    assert [e["iter"] for e in found] == [0, 3, 6]  # at its evaluations
    for e in found:
        # No more than the context
        assert [len(text) for text in e["texts"]] == [16] * Sampler.TEXTS
        assert all(text.startswith("\n") for text in e["texts"])


def test_cache_is_compared_once_in_a_run(chars, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(MLP, "forward", over_time)
    train(tiny(chars, tmp_path, sample_interval=1))
    printed = [line for line in capfd.readouterr().err.splitlines() if "with a cache" in line]
    assert len(printed) == 1
    assert [e["iter"] for e in events(tmp_path, "sample")] == [0, 3, 6]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs fork")
def test_same_weights_write_the_same_texts_and_only_the_first_rank_samples(chars, tmp_path, capfd):
    still: dict[str, Any] = {"learning_rate": 0.0, "dropout": 0.5, "gradient_accumulation_steps": 2}
    gloo.run(2, tiny(chars, tmp_path, eval_interval=1, sample_interval=4, **still))
    found = events(tmp_path, "sample")
    assert [e["iter"] for e in found] == [0, 4, 6]  # and at the last step
    assert found[0]["texts"] == found[1]["texts"] == found[2]["texts"]
    assert found[0]["texts"][0] != found[0]["texts"][1]
    assert found[0]["texts"][0][:8] not in capfd.readouterr().out


@pytest.mark.slow
def test_run_continues_without_samples_if_the_tokenizer_does_not_know_the_prompt(tmp_path, capfd):
    prepare("abc " * 1000, tmp_path / "data", "char", "a text in one line")
    train(tiny(tmp_path / "data", tmp_path / "out", sample_interval=1))
    [printed] = [line for line in capfd.readouterr().out.splitlines() if "sample_interval" in line]
    assert_one_line(printed, "no samples", "tokenizer")
    assert events(tmp_path / "out", "sample") == []
    assert len(events(tmp_path / "out", "end")) == 1
