"""Makes the parts of prepare.py through an executor of Hugging Face's datatrove: on this machine, by Slurm or by Ray.

    python data/fineweb_edu/cluster.py --executor local --tasks 14 --workers 4 --out data/mine
    python data/fineweb_edu/cluster.py --executor slurm --sbatch partition=cpu time=8:00:00 --tasks 140 --workers 32 \\
        --subset sample-100BT --out /scratch/fineweb

Takes prepare.py's options too; task i of n makes --part=i/n, and the last step is --merge. Working directory and --out
are ones that all machines share. Logs are in --out/.datatrove. The same command, given again, makes what is missing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository; Python adds only this folder

from data.fineweb_edu import prepare
from deskgpt.machine.errors import ConfigError, one_line_errors

ROOT = Path(__file__).resolve().parents[2]
MEMORY_GB = 4  # of a task


def main(argv: list[str]) -> None:
    c, rest = arguments(argv)
    args = prepare.arguments(["--num_proc=1", *rest, "--merge"])
    os.environ.update(prepare.ENVIRONMENT | os.environ | {"PYTHONPATH": str(ROOT)})  # which tasks inherit
    logs = args.out.resolve() / ".datatrove"
    cwd = os.getcwd()
    parts = executor(c, partial(make_part, args, cwd), c.tasks, logs / "parts")
    if c.executor == "slurm":
        executor(c, partial(merge, args, cwd), 1, logs / "merge", depends=parts).run()
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the executor's processes too
    try:
        parts.run()
    except (ValueError, OSError) as e:
        raise ValueError(f"a task failed: {e}; all of it is in {logs}/parts/logs") from None
    merge(args, cwd)


def make_part(args: argparse.Namespace, cwd: str, data: Any, rank: int, world_size: int) -> None:
    """The step of datatrove's pipeline, which no documents pass through."""
    os.chdir(cwd)
    prepare.main(argparse.Namespace(**(vars(args) | {"part": (rank, world_size)})))


def merge(args: argparse.Namespace, cwd: str, *_: Any) -> None:
    """The step after all of those."""
    os.chdir(cwd)
    prepare.main(args)


def executor(c: argparse.Namespace, step: Any, tasks: int, logs: Path, **options: Any) -> Any:
    """The executor that c asks for."""
    executors = importlib.import_module("datatrove.executor")
    # Never skip_completed: prepare.py itself sees what is made, whatever the number of tasks was then.
    options |= {"tasks": tasks, "workers": min(c.workers, tasks), "logging_dir": str(logs), "skip_completed": False}
    if c.executor == "local":
        return executors.LocalPipelineExecutor([step], **options)
    options["mem_per_cpu_gb"] = MEMORY_GB
    if c.executor == "ray":
        variables = {name: os.environ[name] for name in ("PYTHONPATH", *prepare.ENVIRONMENT)}
        importlib.import_module("ray").init(runtime_env={"env_vars": variables})
        return executors.RayPipelineExecutor([step], **options)
    options |= {"partition": c.sbatch["partition"], "time": c.sbatch["time"], "qos": None, "sbatch_args": c.sbatch}
    path = f"export PATH={Path(sys.executable).parent}:$PATH"  # of datatrove's own commands
    return executors.SlurmPipelineExecutor([step], job_name="fineweb", env_command=path, **options)


def arguments(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this script, and the rest, which are prepare.py's. Raises ConfigError."""
    of_help = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=of_help, allow_abbrev=False)
    add = parser.add_argument
    add("--executor", choices=["local", "slurm", "ray"], required=True)
    add("--tasks", type=prepare.whole_number, required=True, help="parts; at most as many as the source has files")
    add("--workers", type=prepare.whole_number, required=True, help="tasks at a time")
    add("--sbatch", nargs="+", default=[], metavar="KEY=VALUE", help="options of sbatch: partition and time at least")
    c, rest = parser.parse_known_args(argv)
    c.sbatch = {key: value for key, _, value in (option.partition("=") for option in c.sbatch)}
    if c.executor == "slurm" and not {"partition", "time"} <= c.sbatch.keys():
        raise ConfigError("--executor slurm needs --sbatch partition=NAME time=HH:MM:SS")
    return c, rest


if __name__ == "__main__":
    from data.fineweb_edu import cluster  # tasks find its functions by this name, not in __main__

    with one_line_errors():
        cluster.main(sys.argv[1:])
