"""Times ways to turn documents into token files: data/fineweb_edu/prepare.py, its parts, and the plain way.

    python bench/tokenizing.py                                  # on the modules of Python's standard library
    python bench/tokenizing.py --source=folder/ --copies=10

Every way runs in a process of its own on the same files, each read --copies times; the ways take turns. Prints medians
of MB/s of text and of tokens/s, without the imports, and the peak memory of the process. (This file is not named
tokenize.py, because then no script in this folder could import Python's own module of that name.)
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the repository; Python adds only this folder

from configurator import configure
from data import tokenizer
from data.fineweb_edu.prepare import arguments, local_source
from data.fineweb_edu.prepare import main as prepare
from data.python_char.prepare import standard_library
from deskgpt.machine.errors import one_line_errors

Way = Callable[[list[str], Path], tuple[int, float]]  # (files, folder to write to) -> (tokens, seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizingConfig:
    source: str = ""  # a file or folder of documents; empty = Python's standard library, 20 kB each
    copies: int = 10  # how often the files are read: some seconds of work for the fastest way
    rounds: int = 5
    only: str = ""  # the name of one way: run it once and print its figures


# ---- the ways ------------------------------------------------------------------------------------------------


def texts(files: list[str]) -> list[str]:
    rows = local_source([Path(f) for f in files], "text").rows(0, 0)
    return [text for *_, text in rows]


def reading(files: list[str], out: Path) -> tuple[int, float]:
    """Reads the documents and does nothing with them."""
    t0 = time.perf_counter()
    for _ in local_source([Path(f) for f in files], "text").rows(0, 0):
        pass
    return 0, time.perf_counter() - t0


def plain(files: list[str], out: Path) -> tuple[int, float]:
    """Encodes one document at a time with tiktoken, and writes all tokens at the end."""
    import tiktoken

    t0 = time.perf_counter()
    encoding = tiktoken.get_encoding("gpt2")
    rows = local_source([Path(f) for f in files], "text").rows(0, 0)
    documents = [np.array([encoding.eot_token, *encoding.encode_ordinary(text)], np.uint16) for *_, text in rows]
    ids = np.concatenate(documents)
    ids.tofile(out / "train.bin")
    return len(ids), time.perf_counter() - t0


def ours(threads: int | None, fast: bool = True) -> Way:
    """prepare.py with this many threads, None for one per core; fast=False: without fastokens."""

    def run(files: list[str], out: Path) -> tuple[int, float]:
        if not fast:
            sys.modules["fastokens"] = None  # type: ignore[assignment]  # to Python, it is not installed
        t0 = time.perf_counter()
        options = ["--source", *files, "--out", str(out)]
        if threads:
            options += ["--num_proc", str(threads)]
        with redirect_stdout(sys.stderr):
            prepare(arguments(options))
        seconds = time.perf_counter() - t0
        meta = json.loads((out / "meta.json").read_text())
        return sum(entry["tokens"] for entry in meta["files"].values()), seconds

    return run


def encoder(encode: str) -> Way:
    """An encoder alone, in one thread, on texts in memory: tiktoken's encode_ordinary, our encode or encode_batch."""

    def run(files: list[str], out: Path) -> tuple[int, float]:
        import tiktoken

        documents = texts(files)
        gpt2 = tokenizer.from_meta({"name": "gpt2"})
        gpt2.encode_batch(["a first text, for which it builds its tables"])
        encode_one = tiktoken.get_encoding("gpt2").encode_ordinary if encode == "encode_ordinary" else gpt2.encode
        n = 0
        t0 = time.perf_counter()
        for i in range(0, len(documents), 100):
            part = documents[i : i + 100]
            if encode == "encode_batch":
                n += sum(map(len, gpt2.encode_batch(part)))
            else:
                n += sum(len(encode_one(text)) for text in part)
        return n, time.perf_counter() - t0

    return run


WAYS: dict[str, Way] = {
    "plain: encode_ordinary, one process": plain,
    "prepare.py, tiktoken, one thread": ours(1, fast=False),
    "prepare.py, one thread": ours(1),
    "prepare.py, all cores": ours(None),
    "only reading the files": reading,
    "only tiktoken's encode_ordinary": encoder("encode_ordinary"),
    "only our encode (tiktoken to numpy)": encoder("encode"),
    "only our encode_batch (fastokens)": encoder("encode_batch"),
}


# ---- one way in its process ----------------------------------------------------------------------------------


def peak_rss_bytes() -> int | None:
    """Peak memory of this process so far. hardware.py's function would import torch, larger than what is measured."""
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else None


def run_only(name: str) -> None:
    """Runs one way on the files that stdin lists, and prints its figures as JSON."""
    os.environ |= {"USE_TORCH": "0", "RAYON_NUM_THREADS": "1"}  # as prepare.py sets them when it runs as a script
    for module in ("datasets", "fastokens", "tiktoken"):
        import_module(module)
    with tempfile.TemporaryDirectory() as out:
        tokens, seconds = WAYS[name](json.load(sys.stdin), Path(out))
    print(json.dumps({"tokens": tokens, "seconds": seconds, "peak": peak_rss_bytes()}))


# ---- all of them ---------------------------------------------------------------------------------------------


def corpus(c: TokenizingConfig, folder: Path) -> list[str]:
    """The files to read, parquet or jsonl, each c.copies times."""
    if c.source:
        return local_source([Path(c.source)], "text").files * c.copies
    text = standard_library(20_000_000)
    documents = [text[i : i + 20_000] for i in range(0, len(text), 20_000)]
    path = folder / "modules.jsonl"
    path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return [str(path)] * c.copies


def print_table(results: dict[str, list[dict[str, Any]]], megabytes: float) -> None:
    """A line for each way. megabytes: size of the text. The plain way, the first, is the one to compare with."""
    medians = {name: statistics.median(r["seconds"] for r in of_way) for name, of_way in results.items()}
    plain_s = next(iter(medians.values()))
    print(f"{'way':<40} {'MB/s':>7} {'from':>6} {'to':>6} {'tok/s':>12} {'x plain':>8} {'peak MB':>8}")
    for name, of_way in results.items():
        times = [r["seconds"] for r in of_way]
        median_s = medians[name]
        peak = "n/a" if of_way[0]["peak"] is None else f"{max(r['peak'] for r in of_way) / 1e6:.0f}"
        print(
            f"{name:<40} {megabytes / median_s:7.1f} {megabytes / max(times):6.1f} {megabytes / min(times):6.1f} "
            f"{of_way[0]['tokens'] / median_s:12,.0f} {plain_s / median_s:8.2f} {peak:>8}"
        )


def main(c: TokenizingConfig) -> None:
    if c.only:
        return run_only(c.only)

    import torch  # not at the top: the processes of the ways do without it

    from deskgpt.machine import hardware, provenance

    with tempfile.TemporaryDirectory() as folder:
        files = corpus(c, Path(folder))
        megabytes = sum(len(text.encode()) for text in texts(files)) / 1e6
        results: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
        for _ in range(c.rounds):
            for name, of_way in results.items():
                flags = [f"--{key}={value}" for key, value in (asdict(c) | {"only": name}).items()]
                command = [sys.executable, __file__, *flags]
                child = subprocess.run(command, input=json.dumps(files), capture_output=True, text=True, check=True)
                of_way.append(json.loads(child.stdout))
    print(f"{hardware.device_name(torch.device('cpu'))}; {megabytes:.0f} MB of text, {c.rounds} rounds")
    versions = provenance.versions() | {p: version(p) for p in ("tiktoken", "fastokens", "datasets")}
    print(f"{versions}, commit {provenance.git_commit()}")
    print_table(results, megabytes)


if __name__ == "__main__":
    with one_line_errors():
        main(configure(TokenizingConfig, sys.argv[1:]))
