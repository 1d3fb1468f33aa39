"""Run benchmarks of a trained model through lm_eval, the harness that published figures come from.

    python bench/evaluate.py --out_dir=out --tasks=lambada_openai,hellaswag
    python bench/evaluate.py --init_from=gpt2 --tasks=lambada_openai --device=cuda --output_path=gpt2.json

The model is exported into a temporary folder, whose logits are compared with model.py's, and answers through lm_eval's
own backend for Hugging Face's format. All other options are lm_eval's: `lm_eval run --help` lists them.

Needs `pip install -e .[eval]`; lm_eval downloads the data of a task once.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

import torch

import export
from configurator import configure
from deskgpt.generate.trained import load
from deskgpt.run.log import git_commit
from deskgpt.system.errors import one_line_errors
from deskgpt.system.settings import FilePath, check_fields

OURS = ("--init_from=", "--out_dir=", "--dtype=", "--help")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateConfig:
    init_from: FilePath = "resume"  # resume (a checkpoint in out_dir), gpt2[-medium|-large|-xl], a checkpoint, a folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model (to resume); or a file: out/ckpt_best.pt, the best (to use)
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # of the matmuls; the others are faster on most GPUs

    def __post_init__(self) -> None:
        check_fields(self)


def main(argv: list[str]) -> int:
    """Print lm_eval's table; return its exit status."""
    c = configure(EvaluateConfig, [word for word in argv if word.startswith(OURS)])
    import lm_eval  # noqa: F401 (if it is missing, a line says so before the export)

    trained = load(c.init_from, c.out_dir, torch.device("cpu"))
    # What an empty context becomes. Characters have no end of text: the first of them stands for it.
    prefix = trained.tokenizer.end_of_text or 0
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "model"
        export.write_folder(trained, export.without_embedding_norm(trained.model), folder)  # compares both
        print(f"{trained.source}: {trained.model.num_params():,} parameters; commit {git_commit()}", flush=True)
        arguments = f"pretrained={folder},trust_remote_code=True,dtype={c.dtype},prefix_token_id={prefix}"
        options = [word for word in argv if not word.startswith(OURS)]
        command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, *options]
        return subprocess.run(command).returncode


if __name__ == "__main__":
    with one_line_errors():
        raise SystemExit(main(sys.argv[1:]))
