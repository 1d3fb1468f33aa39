"""Benchmarks of a trained model through lm_eval, the harness that published figures come from.

The model is exported into a temporary folder, whose logits are compared with model.py's, and answers through lm_eval's
own backend for Hugging Face's format.

    python bench/evaluate.py --out_dir=out --tasks=lambada_openai,hellaswag
    python bench/evaluate.py --init_from=gpt2 --tasks=lambada_openai --device=cuda --json=gpt2.json

Needs `pip install -e .[eval]`; lm_eval downloads the data of a task once. Prints a table in Markdown; --json=FILE
writes its figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch

import export
from bench import output
from configurator import configure
from deskgpt.checkpoint import folders
from deskgpt.export.gpt2_weights import download_gpt2
from deskgpt.run.log import git_commit, versions
from deskgpt.sampling.trained import Trained, load
from deskgpt.system import hardware
from deskgpt.system.errors import one_line_errors
from deskgpt.system.files import write_atomically
from deskgpt.system.settings import AtLeast1, FilePath, check_fields

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

HERE = Path(__file__).resolve().parent
# Resamplings for a standard error without a formula, such as perplexity's: exact to 1 / sqrt(2 * 1000) = 2%.
BOOTSTRAP = 1000


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
    json: FilePath = ""  # a file for the figures

    def __post_init__(self) -> None:
        check_fields(self)


def main(c: EvaluateConfig) -> None:
    """Evaluates as c says; prints and writes the results."""
    # Some tasks import the package "evaluate", which in this folder would be this very file.
    sys.path = [folder for folder in sys.path if Path(folder).resolve() != HERE]
    os.environ["DISABLE_MULTIPROC"] = "1"  # resample in this process: forks of a process with torch's threads may hang
    import lm_eval  # which takes seconds
    from lm_eval.models.huggingface import HFLM
    from lm_eval.utils import make_table

    tasks, manager = find_tasks(c.tasks)
    trained = load(c.init_from, c.out_dir, torch.device("cpu"))
    about_model = describe_model(c, trained)  # at once: a run that goes on would soon replace the file
    tokenizer = trained.tokenizer
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "model"
        export.write_folder(trained, folder, "model")  # raises ValueError where it is not the same model
        model = HFLM(
            pretrained=str(folder),
            trust_remote_code=True,
            device=str(hardware.resolve_device(c.device)),
            dtype=c.dtype,
            batch_size=c.batch_size,
            max_length=trained.model.config.block_size,
            # What an empty context becomes. Characters have no end of text: the first of them stands for it.
            prefix_token_id=0 if tokenizer.end_of_text is None else tokenizer.end_of_text,
        )
        found = lm_eval.simple_evaluate(
            model,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=c.num_fewshot,
            limit=c.limit or None,
            bootstrap_iters=BOOTSTRAP,
            log_samples=False,
        )
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": output.command_line("evaluate.py"),
        "model": about_model,
        "device": hardware.device_name(hardware.resolve_device(c.device)),
        "versions": versions() | {"lm_eval": lm_eval.__version__},
        "git_commit": git_commit(),
        "settings": asdict(c),
    }
    print(f"{output.about(result)}. Matmuls in {c.dtype}.")
    print(", ".join(f"{name} {value}" for name, value in about_model.items() if name != "model_args"))
    if c.limit:
        print("Only the first items of each task: not a figure to compare.")
    print(f"\n    {result['command']}\n\n{make_table(found).strip()}")
    if c.json:
        for name in ("results", "groups", "versions", "n-shot", "n-samples", "higher_is_better"):
            result[name] = found.get(name)
        write_atomically(Path(c.json), json.dumps(result, default=str).encode())


def find_tasks(names: str) -> tuple[list[str], TaskManager]:
    """Names of lm_eval's tasks, groups and tags, and paths of YAML files; and what loads them.

    Raises ValueError where there is no such task, or its data cannot be had.
    """
    from lm_eval.tasks import TaskManager

    wanted = names.split(",")
    files = [name for name in wanted if name.endswith((".yaml", ".yml")) and Path(name).is_file()]
    manager = TaskManager(include_defaults=len(files) < len(wanted))  # to list its thousands takes half a minute
    found: list[str] = []
    for name in wanted:
        matching = [name] if name in files else manager.match_tasks([name])
        if not matching:
            raise ValueError(f"tasks={names}: lm_eval has no task {name!r}; `lm_eval ls tasks` lists them")
        found += matching
    try:
        manager.load(found)
    except ModuleNotFoundError:
        raise
    except Exception as e:  # from datasets, the hub, the network or YAML
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(
            f"tasks={names}: a task cannot be loaded ({reason[:200]}); the data of lm_eval's own tasks are downloaded "
            "once, from the Hugging Face hub: connect, or name a YAML file with local data"
        ) from None
    return found, manager


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


if __name__ == "__main__":
    with one_line_errors("lower --batch_size"):
        main(configure(EvaluateConfig, sys.argv[1:]))
