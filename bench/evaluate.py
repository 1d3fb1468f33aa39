"""Benchmarks of a trained model through lm_eval, the harness that published figures come from.

    python bench/evaluate.py --out_dir=out --tasks=lambada_openai,hellaswag
    python bench/evaluate.py --init_from=gpt2 --tasks=lambada_openai --device=cuda --save=gpt2-lambada

Needs the package lm_eval, which downloads the data of a task once. Prints a table; --save=NAME writes it to
bench/results/DATE-NAME.md and .json, --md=FILE and --json=FILE write it elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import numpy as np
import torch

from bench import output
from bench.output import markdown_table
from configurator import configure
from deskgpt.checkpoint import folders
from deskgpt.compute.inference import InferenceEngine
from deskgpt.export.gpt2_weights import download_gpt2
from deskgpt.run.log import git_commit, versions
from deskgpt.sampling.trained import Trained, load
from deskgpt.system import hardware
from deskgpt.system.errors import one_line_errors
from deskgpt.system.files import write_atomically
from deskgpt.system.settings import AtLeast1, FilePath, check_fields

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    # model
    init_from: FilePath = "resume"  # resume (a checkpoint in out_dir), gpt2[-medium|-large|-xl], a checkpoint, a folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model (to resume); or a file: out/ckpt_best.pt, the best (to use)
    # tasks
    tasks: str = "lambada_openai,hellaswag"  # names of lm_eval's tasks, groups and tags, or paths of YAML files
    limit: int = 0  # items of each task, its first ones; 0 = all, which figures to compare need
    num_fewshot: int | None = None  # examples before each question; None = the task's own number
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the matmuls; the others are faster on most GPUs
    batch_size: AtLeast1 = 16  # rows at a time; lower this if memory runs out
    use_cache: bool = True  # where text is generated: keep keys and values instead of computing them again
    # results, beside those on the terminal
    save: str = ""  # a name: bench/results/DATE-NAME.md and .json
    md: FilePath = ""  # a file
    json: FilePath = ""  # a file

    def __post_init__(self) -> None:
        check_fields(self)
        output.check_name(self.save or None)


def main(c: EvaluateConfig) -> dict[str, Any]:
    """Evaluates as c says; prints, writes and returns the results."""
    # Some tasks import the package "evaluate", which in this folder would be this very file.
    sys.path = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    from bench import harness  # imports lm_eval, which takes seconds

    random.seed(0)  # lm_eval's own seeds
    np.random.seed(harness.SEED)
    torch.manual_seed(harness.SEED)
    device = hardware.resolve_device(c.device)
    hardware.forbid_spilling(device)
    tasks = harness.load_tasks(c.tasks, c.num_fewshot)
    trained = load(c.init_from, c.out_dir, device)
    about_model = describe_model(c, trained)  # at once: a run that goes on would soon replace the file
    model = trained.model.eval().to(device)
    backend = harness.Backend(model, trained.tokenizer, batch_size=c.batch_size)
    prompt = torch.tensor([[backend.prefix_token_id]], device=device)
    backend.replacing = InferenceEngine(model, prompt, c.dtype, cached=c.use_cache).replacing
    t0 = time.perf_counter()
    found = harness.evaluate_tasks(backend, tasks, c.limit)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": output.command_line("evaluate.py"),
        "model": about_model,
        "device": hardware.device_name(device),
        "dtype": c.dtype,
        "versions": versions() | {"lm_eval": metadata.version("lm_eval")},
        "git_commit": git_commit(),
        "seconds": time.perf_counter() - t0,
        "truncated": backend.n_truncated,
        "results": harness.figures(found),
        "tasks": {
            name: {
                "version": found["versions"].get(name),
                "num_fewshot": found["n-shot"].get(name),
                "items": found["n-samples"].get(name, {}).get("effective"),
            }
            for name in found["results"]
        },
        "settings": asdict(c),
    }
    text = as_markdown(result)
    print(text, end="")
    page = f"# Benchmarks: {c.save or about_model['source']}\n\n{text}"
    if c.save:
        output.save(c.save, page, result)
    if c.md:
        write_atomically(Path(c.md), page.encode())
    if c.json:
        write_atomically(Path(c.json), json.dumps(result).encode())
    return result


def describe_model(c: EvaluateConfig, trained: Trained) -> dict[str, Any]:
    """Which weights these are: their file, its SHA-256, the step, and the code that trained them."""
    saved = trained.checkpoint
    path = Path(trained.source)
    if saved is None:
        path = (path if path.is_dir() else download_gpt2(c.init_from)) / "model.safetensors"
    else:
        path = saved.path or path
        path = path / folders.MANIFEST if path.is_dir() else path
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "source": trained.source,
        "file": path.name,
        "sha256": sha256,
        "step": saved.iter_num if saved else None,
        "trained_by": ((saved.facts if saved else None) or {}).get("code"),  # a commit
        "parameters": trained.model.num_params(),
        "model_args": asdict(trained.model.config),
        "tokenizer": trained.tokenizer.meta()["name"],
    }


def as_markdown(result: dict[str, Any]) -> str:
    """The results as a page without its heading."""
    rows = []
    for task, values in result["results"].items():
        about = result["tasks"][task]
        cells = ["n/a" if about[name] is None else str(about[name]) for name in ("version", "num_fewshot", "items")]
        for name, value in values.items():
            if not name.endswith("_stderr"):
                rows.append([task, *cells, name, number(value), number(values.get(f"{name}_stderr"))])
    head = ["task", "version", "n-shot", "items", "metric", "value", "standard error"]
    model = result["model"]
    at_step = "" if model["step"] is None else f" of step {model['step']:,}"
    lines = [
        f"{output.about(result)}. Matmuls in {result['dtype']}.",
        f"{model['source']}: {model['file']}{at_step}, {model['parameters']:,} parameters, SHA-256 {model['sha256']}.",
    ]
    if result["truncated"]:
        lines.append(
            f"Requests longer than the context of {model['model_args']['block_size']} tokens, which lost their "
            f"beginning: {result['truncated']:,}."
        )
    if result["settings"]["limit"]:
        lines.append("Only the first items of each task: not a figure to compare.")
    text = "\n".join(lines)
    return f"{text}\n\n```sh\n{result['command']}\n```\n\n{markdown_table(head, rows, left_columns=5)}\n"


def number(value: float | None) -> str:
    """Four decimals of a share, four digits of anything larger."""
    if value is None:
        return "n/a"
    if abs(value) < 10:
        return f"{value:.4f}"
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


if __name__ == "__main__":
    with one_line_errors("lower --batch_size"):
        main(configure(EvaluateConfig, sys.argv[1:]))
