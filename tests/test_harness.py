"""The backend for lm_eval: item by item the same answers as lm_eval's own `hf` gives with the same weights."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import events, shell, tiny, weights

import train
from data.tokenizer import BytesTokenizer, CharTokenizer
from deskgpt.gpt2_weights import load_gpt2
from model import GPT, GPTConfig

pytestmark = pytest.mark.slow

lm_eval = pytest.importorskip("lm_eval")
from deskgpt import harness  # noqa: E402 (it imports lm_eval)

BLOCK_SIZE = 96
WORDS = "the old sea was calm and no one on board knew what Zoë had seen that night".split()

# By name: lm_eval's own description of a task, but for its data.
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}\nAnswer:",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{answer}}",
        "num_fewshot": 1,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "letters": {  # answers of one token, which share a row
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}} ",
        "doc_to_choice": ["A", "B", "C", "D"],
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{start}}",
        "doc_to_target": "{{word}}",
        "metric_list": [{"metric": "perplexity", "higher_is_better": False}, {"metric": "acc"}],
    },
    "whole_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "until": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{word}}",
        "generation_kwargs": {"until": ["<stop>", "\n\n"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def documents(n: int = 20) -> list[dict[str, Any]]:
    """Questions and texts of 0 to twice BLOCK_SIZE bytes."""
    draw = random.Random(1)
    out = []
    for i in range(n):
        words = draw.choices(WORDS, k=i * 2)
        start = " ".join(words)
        out.append(
            {
                "question": start or "why?",
                "start": start,
                "word": " " + draw.choice(WORDS),
                "text": " ".join(words * 2),
                "options": [" ".join(draw.choices(WORDS, k=k)) for k in (1, 2, 4)],
                "answer": i % 3,
            }
        )
    return out


def write_items(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def write_task(folder: Path, name: str, **changes: Any) -> Path:
    """A task's YAML file (JSON is YAML) with its data beside it."""
    data = folder / "items.jsonl"
    if not data.exists():
        write_items(data, documents())
    files = {"test": str(data), "train": str(data)}
    own = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    own |= {"fewshot_split": "train", "metadata": {"version": 1.0}}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(TASKS[name] | own | changes))
    return path


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> tuple[Any, Any, Path]:
    """(model, tokenizer, their folder) of a tiny GPT-2 of bytes that is sure of its guesses."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letter = {bytes_letter(b): b for b in range(255)} | {"<|endoftext|>": 255}
    coder = tokenizers.Tokenizer(tokenizers.models.BPE(letter, []))
    coder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coder.decoder = tokenizers.decoders.ByteLevel()
    end = "<|endoftext|>"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=coder, bos_token=end, eos_token=end)

    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": BLOCK_SIZE, "vocab_size": 256}
    config = transformers.GPT2Config(**sizes, initializer_range=0.4, bos_token_id=255, eos_token_id=255)
    model = transformers.GPT2LMHeadModel(config).eval()
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


def bytes_letter(byte: int) -> str:
    """The letter that stands for a byte in GPT-2's vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in visible]
    return chr(byte) if byte in visible else chr(256 + hidden.index(byte))


@pytest.fixture(scope="module")
def gpt(hugging_face) -> GPT:
    model_args, state = load_gpt2(str(hugging_face[2]))
    return GPT.from_state(GPTConfig(**model_args), state, "test").eval()


@pytest.fixture(scope="module")
def tasks(gpt, tmp_path_factory) -> harness.Tasks:
    """All of TASKS; "<stop>" becomes a text that the model writes, and some words are its own guesses."""
    folder = tmp_path_factory.mktemp("tasks")
    backend = harness.Backend(gpt, BytesTokenizer())

    def guess(prompt: str, n: int) -> str:
        [text] = backend.continuations([backend.tok_encode(prompt)[-BLOCK_SIZE + n :]], harness.Generation((), n), [0])
        return text

    text = guess("why?", 24)
    items = documents()
    for item in items[1:]:
        own = guess(item["start"], 1)
        if own.isprintable() and own.isascii():
            item["word"] = own
    write_items(folder / "items.jsonl", items)
    until = TASKS["until"]["generation_kwargs"] | {"until": [text[6:8], "\n\n"]}
    paths = [write_task(folder, name) for name in TASKS if name != "until"]
    paths.append(write_task(folder, "until", generation_kwargs=until))
    return harness.Tasks(",".join(map(str, paths)))


@pytest.fixture(scope="module")
def theirs(hugging_face, tasks) -> dict[str, Any]:
    """The results of lm_eval's own backend."""
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    model, tokenizer, _ = hugging_face
    backend = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3)
    with tasks.seeded(), harness.one_process():
        return lm_eval.evaluate(backend, tasks.loaded, bootstrap_iters=1000, log_samples=True)


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """Of all items of a task, in their order."""
    samples = sorted(results["samples"][task], key=lambda s: s["doc_id"])
    return [answer for s in samples for [answer] in s["resps"]]


def known(results: dict[str, Any], task: str) -> dict[str, float]:
    """A task's figures, -1 where there is none."""
    return {name: -1 if value is None else value for name, value in harness.figures(results)[task].items()}


@pytest.mark.parametrize(("batch_size", "use_cache"), [(4, True), (7, False)])
def test_every_answer_is_that_of_lm_evals_own_hf_backend(gpt, tasks, theirs, batch_size, use_cache):
    backend = harness.Backend(gpt, BytesTokenizer(), batch_size=batch_size, use_cache=use_cache)
    ours = tasks.evaluate(backend, log_samples=True)
    for name in ("choices", "letters", "last_word"):
        found = answers(ours, name)
        expected = answers(theirs, name)
        assert len(found) >= 20
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        np.testing.assert_allclose([p for p, _ in found], [p for p, _ in expected], atol=1e-4)
    np.testing.assert_allclose(answers(ours, "whole_text"), answers(theirs, "whole_text"), atol=1e-3, rtol=1e-6)
    assert {greedy for _, greedy in answers(ours, "last_word")} == {True, False}
    texts = answers(ours, "until")
    assert texts == answers(theirs, "until")
    assert len(texts[0]) <= 6  # the stop text has ended it
    assert max(len(text) for text in texts) > 12  # and not others
    assert ours["truncated"] > 20
    for name in TASKS:
        assert known(ours, name) == pytest.approx(known(theirs, name), rel=1e-4)
