"""bench/evaluate.py: what lm_eval finds of a model is what model.py computes."""

from __future__ import annotations

import json
import math
import random
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_one_line, flags, tiny

import train
from deskgpt.sampling.trained import load

pytestmark = pytest.mark.nightly

WORDS = ["the", "old", "sea", "was", "calm", "and", "no", "one", "on", "board", "knew", "what", "had", "seen"]
LAST_WORD: dict[str, Any] = {
    "output_type": "loglikelihood",
    "doc_to_text": "{{start}}",
    "doc_to_target": "{{word}}",
    "metric_list": [{"metric": "perplexity", "higher_is_better": False}, {"metric": "acc"}],
}


def documents() -> list[dict[str, str]]:
    draw = random.Random(1)
    return [{"start": " ".join(draw.choices(WORDS, k=2)), "word": " " + draw.choice(WORDS)} for _ in range(20)]


def write_task(folder: Path, **changes: Any) -> Path:
    """A task's YAML file (JSON is YAML) and its data."""
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in documents()))
    files = dict.fromkeys(("test", "train"), str(folder / "items.jsonl"))
    own = {"task": "last_word", "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
    own |= {"fewshot_split": "train", "metadata": {"version": 1.0}}
    (folder / "task.yaml").write_text(json.dumps(LAST_WORD | own | changes))
    return folder / "task.yaml"


@pytest.fixture(scope="module")
def trained(chars, tmp_path_factory) -> Path:
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    out_dir = tmp_path_factory.mktemp("run") / "out"
    train.main(tiny(chars, out_dir, block_size=32))
    return out_dir


def test_figures_are_those_of_model_py_and_the_results_say_which_weights_and_tasks(trained, tmp_path, script):
    file = tmp_path / "a" / "r.json"
    named = {"tasks": write_task(tmp_path), "limit": 7}
    done = script("bench/evaluate.py", *flags(out_dir=trained, device="cpu", json=file, **named))
    assert done.code == 0, done.err
    result = json.loads(file.read_text())
    own = load("resume", str(trained), torch.device("cpu"))
    sums, hits = [], []
    for item in documents()[:7]:
        context = own.tokenizer.encode(item["start"]).tolist()
        target = own.tokenizer.encode(item["word"]).tolist()
        logits = own.model.eval()(torch.tensor([context + target[:-1]]))[0][0, -len(target) :]
        log_p = logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])
        sums.append(log_p.sum().item())
        hits.append(logits.argmax(1).tolist() == target)
    found = result["results"]["last_word"]
    assert found["perplexity,none"] == pytest.approx(math.exp(-sum(sums) / 7), rel=1e-4)
    assert found["acc,none"] == pytest.approx(sum(hits) / 7)
    assert result["model"]["sha256"] == sha256((trained / "ckpt.pt").read_bytes()).hexdigest()
    assert result["model"]["step"] == 6
    assert result["versions"]["lm_eval"]
    assert result["n-samples"]["last_word"]["effective"] == 7
    assert result["model"]["sha256"] in done.out
    assert "last_word" in done.out


@pytest.mark.parametrize(
    ("tasks", "named"), [("last_wrod.yaml", "last_wrod"), ("task.yaml", "EleutherAI/lambada_openai"), (" ,", "tasks=")]
)
def test_a_task_that_cannot_run_is_one_line(trained, tmp_path, script, tasks, named):
    write_task(tmp_path, dataset_path="EleutherAI/lambada_openai", dataset_kwargs={})
    path = tmp_path / tasks if tasks != " ," else tasks
    done = script("bench/evaluate.py", *flags(out_dir=trained, device="cpu", tasks=path))
    assert done.code == 1
    assert_one_line(done.err.splitlines()[-1], named)
