"""The backend for lm_eval: item by item the same answers as lm_eval's own `hf` gives with the same weights."""

from __future__ import annotations

import json
import random
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from conftest import assert_one_line, flags, tiny

import train
from data.tokenizer import BytesTokenizer, CharTokenizer
from deskgpt.compute.inference import InferenceEngine
from deskgpt.export.gpt2_weights import load_gpt2
from model import GPT, GPTConfig

if TYPE_CHECKING:
    from bench import harness

pytestmark = pytest.mark.nightly

BLOCK_SIZE = 96
WORDS = ["the", "old", "sea", "was", "calm", "and", "no", "one", "on", "board", "knew", "what", "Zoë", "had", "seen"]

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
        options = [" ".join(draw.choices(WORDS, k=k)) for k in (1, 2, 4)]
        item = {"question": start or "why?", "start": start, "word": " " + draw.choice(WORDS), "answer": i % 3}
        out.append(item | {"text": " ".join(words * 2), "options": options})
    return out


def write_items(path: Path, items: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def write_task(folder: Path, name: str, **changes: Any) -> Path:
    """A task's YAML file (JSON is YAML) for the data beside it."""
    data = folder / "items.jsonl"
    files = {"test": str(data), "train": str(data)}
    own = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    own |= {"fewshot_split": "train", "metadata": {"version": 1.0}}
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(TASKS[name] | own | changes, ensure_ascii=False))
    return path


@pytest.fixture(scope="module", autouse=True)
def _harness():
    """Imports lm_eval, which takes seconds, only if a test here runs."""
    global harness
    pytest.importorskip("lm_eval")
    from bench import harness


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory) -> tuple[Any, Any, Path]:
    """(model, tokenizer, their folder) of a tiny GPT-2 of bytes that is sure of its guesses."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte) if byte in visible else chr(256 + hidden.index(byte)): byte for byte in range(255)}
    end = "<|endoftext|>"
    coder = tokenizers.Tokenizer(tokenizers.models.BPE(letters | {end: 255}, []))
    coder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    coder.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=coder, bos_token=end, eos_token=end)

    torch.manual_seed(3)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": BLOCK_SIZE, "vocab_size": 256}
    config = transformers.GPT2Config(**sizes, initializer_range=0.4, bos_token_id=255, eos_token_id=255)
    model = transformers.GPT2LMHeadModel(config).eval()
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model, tokenizer, folder


@pytest.fixture(scope="module")
def gpt(hugging_face) -> GPT:
    model_args, state = load_gpt2(str(hugging_face[2]))
    return GPT.from_state(GPTConfig(**model_args), state, "test").eval()


@pytest.fixture(scope="module")
def tasks(gpt, tmp_path_factory) -> dict[str, Any]:
    """All of TASKS; "<stop>" becomes a text that the model writes, and some words are its own guesses."""
    folder = tmp_path_factory.mktemp("tasks")
    backend = harness.Backend(gpt, BytesTokenizer())

    def guess(prompt: str, n: int) -> str:
        return backend.continuation(backend.tok_encode(prompt)[-BLOCK_SIZE + n :], n, temperature=0.0)

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
    return harness.load_tasks(",".join(map(str, paths)))


def known(values: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None}


def answers(results: dict[str, Any], task: str) -> list[Any]:
    """The answers to all items of a task, in their order."""
    samples = sorted(results["samples"][task], key=lambda s: s["doc_id"])
    return [answer for s in samples for [answer] in s["resps"]]


def test_every_answer_is_that_of_lm_evals_own_hf_backend(gpt, tasks, hugging_face):
    pytest.importorskip("accelerate")
    from lm_eval.models.huggingface import HFLM

    def results_of(backend: Any) -> dict[str, Any]:
        for task in tasks["tasks"].values():
            task.set_fewshot_seed(harness.SEED)
        return harness.evaluate_tasks(backend, tasks, log_samples=True)

    model, tokenizer, _ = hugging_face
    theirs = results_of(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3))
    backend = harness.Backend(gpt, BytesTokenizer(), batch_size=7)
    backend.replacing = InferenceEngine(gpt, torch.tensor([[backend.prefix_token_id]]), "float32").replacing
    ours = results_of(backend)
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
    assert backend.n_truncated > 20
    for name in TASKS:
        assert known(harness.figures(ours)[name]) == pytest.approx(known(harness.figures(theirs)[name]), rel=1e-4)


@pytest.fixture
def plain_task(tmp_path) -> Path:
    """A task whose texts have letters and spaces only."""
    items = [item | {"start": f"the old {item['start']}"} for item in documents()]
    plain = json.loads(json.dumps(items, ensure_ascii=False).replace("ë", "e"))
    write_items(tmp_path / "items.jsonl", plain)
    return write_task(tmp_path, "last_word")


def test_results_say_which_weights_and_which_tasks(chars, plain_task, tmp_path, script):
    train.main(tiny(chars, tmp_path / "out"))
    files = {"json": tmp_path / "a" / "r.json", "md": tmp_path / "a" / "r.md"}
    named = {"tasks": plain_task, "limit": 7, "num_fewshot": 2}
    done = script("bench/evaluate.py", *flags(out_dir=tmp_path / "out", device="cpu", **named, **files))
    assert done.code == 0, done.err
    result = json.loads(files["json"].read_text())
    assert result["model"]["sha256"] == sha256((tmp_path / "out" / "ckpt.pt").read_bytes()).hexdigest()
    assert result["model"]["step"] == 6
    assert result["tasks"]["last_word"] == {"version": 1.0, "num_fewshot": 2, "items": 7}
    assert 0 <= result["results"]["last_word"]["acc"] <= 1
    page = files["md"].read_text()
    assert result["model"]["sha256"] in page
    assert "| last_word | 1.0 | 2 | 7 | acc | " in page
    assert done.out.endswith(page.partition("\n\n")[2])


UNFIT: list[tuple[dict[str, Any], str]] = [  # how a task is changed, and what its error names
    ({"generation_kwargs": {"max_gen_toks": 16}}, "block_size=16"),
    ({"generation_kwargs": {"min_p": 0.1}}, "'min_p': 0.1"),
    ({"dataset_path": "EleutherAI/lambada_openai"}, "EleutherAI/lambada_openai"),
]


@pytest.mark.parametrize(("changes", "named"), UNFIT, ids=[named for _, named in UNFIT])
def test_a_task_that_cannot_run_is_one_line(chars, tmp_path, plain_task, script, changes, named):
    train.main(tiny(chars, tmp_path / "out"))
    path = write_task(tmp_path, "until", **changes)
    done = script("bench/evaluate.py", *flags(out_dir=tmp_path / "out", device="cpu", tasks=path))
    assert done.code == 1
    assert_one_line(done.err.splitlines()[-1], "until", named)


def test_a_name_that_is_no_task_gets_the_nearest_ones(tmp_path, plain_task):
    manager = harness.TaskManager(include_path=str(tmp_path), include_defaults=False)
    assert harness.find_tasks(manager, ["last_*"]) == ["last_word"]
    with pytest.raises(ValueError, match="last_wrod") as e:
        harness.find_tasks(manager, ["last_wrod"])
    assert_one_line(e.value, "last_word")


def test_an_empty_context_begins_like_a_text():
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=256))
    assert harness.Backend(model, BytesTokenizer()).prefix_token_id == 255
    assert harness.Backend(model, CharTokenizer("ab\nc")).prefix_token_id == 2
    assert harness.Backend(model, CharTokenizer("abc")).prefix_token_id == 0
    assert harness.Backend(model, BytesTokenizer()).tok_encode("a<|endoftext|>b") == [97, 255, 98]
