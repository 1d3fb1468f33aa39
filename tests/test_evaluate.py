"""bench/evaluate.py: what lm_eval finds of a model is what model.py computes."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import flags, tiny

import train
from deskgpt.generate.trained import load

WORDS = ["the", "old", "sea", "was", "calm", "and", "no", "one", "on", "board", "knew", "what", "had", "seen"]


def write_task(folder: Path, documents: list[dict[str, str]]) -> Path:
    """A task's YAML file (JSON is YAML) and its data."""
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in documents))
    task: dict[str, Any] = {"task": "last_word", "output_type": "loglikelihood", "test_split": "test"}
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "items.jsonl")}}}
    task |= {"doc_to_text": "{{start}}", "doc_to_target": "{{word}}"}
    task["metric_list"] = [{"metric": "perplexity", "higher_is_better": False}, {"metric": "acc"}]
    (folder / "task.yaml").write_text(json.dumps(task))
    return folder / "task.yaml"


@pytest.mark.nightly
def test_lm_evals_figures_are_those_of_model_py(chars, tmp_path, script):
    pytest.importorskip("lm_eval")
    pytest.importorskip("transformers")
    train.main(tiny(chars, tmp_path / "out", block_size=32))
    draw = random.Random(1)
    documents = [{"start": " ".join(draw.choices(WORDS, k=2)), "word": " " + draw.choice(WORDS)} for _ in range(7)]
    files = {"tasks": write_task(tmp_path, documents), "output_path": tmp_path / "found.json"}
    done = script("bench/evaluate.py", *flags(out_dir=tmp_path / "out", device="cpu", **files))
    assert done.code == 0, done.err
    assert "last_word" in done.out
    (file,) = tmp_path.glob("found*.json")
    own = load("resume", str(tmp_path / "out"), torch.device("cpu"))
    sums, hits = [], []
    for item in documents:
        context = own.tokenizer.encode(item["start"]).tolist()
        target = own.tokenizer.encode(item["word"]).tolist()
        logits = own.model.eval()(torch.tensor([context + target[:-1]]))[0][0, -len(target) :]
        log_p = logits.log_softmax(-1).gather(1, torch.tensor(target)[:, None])
        sums.append(log_p.sum().item())
        hits.append(logits.argmax(1).tolist() == target)
    found = json.loads(file.read_text())["results"]["last_word"]
    assert found["perplexity,none"] == pytest.approx(math.exp(-sum(sums) / 7), rel=1e-4)
    assert found["acc,none"] == pytest.approx(sum(hits) / 7)
