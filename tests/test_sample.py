"""sample.py: the texts that were asked for, the same ones however they are generated, and faults in one line."""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_one_line, needs_bpe, raises_one_line, tiny
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import BytesTokenizer
from deskgpt.checkpoint import store
from deskgpt.generate.engine import InferenceEngine
from deskgpt.generate.text import Sample
from sample import SampleConfig, main
from train import main as train


@pytest.fixture(scope="module")
def run(chars, tmp_path_factory) -> Path:
    """The out_dir of a run of a few steps on characters."""
    out_dir = tmp_path_factory.mktemp("run")
    train(tiny(chars, out_dir, eval_interval=6))
    return out_dir


def samples(run: Path, **settings: object) -> list[str]:
    options: dict = {"out_dir": str(run), "num_samples": 2, "max_new_tokens": 40, "start": "the "} | settings
    return main(SampleConfig(**options))


def test_first_text_appears_while_it_is_written_and_those_that_ended_follow_in_their_order(run, capsys, monkeypatch):
    write = InferenceEngine.write
    printed = ""
    seen: list[str] = []

    def watched(self: InferenceEngine, prompts: torch.Tensor, texts: list[Sample], *args: Any) -> Any:
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


def test_checkpoint_of_weights_alone_is_sampled_from_with_the_tokenizer_of_its_data(run, chars, tmp_path):
    saved = store.load(run)
    content = {"model": store.weights_of(saved), "model_args": saved.model_args, "config": {"dataset": str(chars)}}
    torch.save(content, tmp_path / "ckpt.pt")
    assert samples(tmp_path) == samples(run)


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
        ("--device=cuda:99", "device=cuda:99"),
        ("--init_from=no-such-model", "init_from=no-such-model"),
    ],
)
def test_faults_are_one_line(run, script, setting, named):
    done = script("sample.py", f"--out_dir={run}", setting)
    assert done.code in (1, 2)
    assert_one_line(done.err, "error: ", named)
    assert done.out == ""


# ---- tokens that are parts of characters ---------------------------------------------------------------------


@given(st.text(max_size=40).map(lambda text: text.encode("utf-8", "ignore")) | st.binary(), st.text(max_size=3))
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


# ---- GPT-2 ---------------------------------------------------------------------------------------------------


@needs_bpe
@pytest.mark.slow
def test_weights_in_hugging_faces_format_are_sampled_from(tmp_path, script):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, n_positions=32))
    folder = tmp_path / "gpt2"
    theirs.save_pretrained(folder)
    options = ("--start=Hello 🧀", "--num_samples=2", "--max_new_tokens=50")
    done = script("sample.py", f"--init_from={folder}", *options)
    assert done.code == 0, done.err
    assert done.out.count("Hello 🧀") == 2

    theirs.transformer.ln_f.bias.data.fill_(torch.nan)
    theirs.save_pretrained(folder)
    done = script("sample.py", f"--init_from={folder}", *options)
    assert done.code == 1
    assert_one_line(done.err, folder, "NaN")
