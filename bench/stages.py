"""The stages of bench/qualify.py: each is a function that measures, and returns a page's text and its figures."""

from __future__ import annotations

import functools
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

import train
from bench import timing
from bench.output import markdown_table
from bench.timing import ROOT, Contestant
from configurator import build, read_settings
from deskgpt.compute import compiling
from deskgpt.compute.inference import InferenceEngine
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate.memory import Step, memory
from deskgpt.kernels import verify
from deskgpt.run.log import git_commit, versions
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import in_tera
from deskgpt.system.wheels import answer
from model import GPT, MODERN_CHOICES, GPTConfig

# GPT-2 124M, the model of stages 1 and 4 to 8, and the toy that stands for it on a CPU.
CARD_MODEL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}
TOY_MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64}
CARD_SEQUENCES = 512  # of a step: 524,288 tokens, as config/train_fineweb_125m.py has it
CONFIGS = ("train_shakespeare_char", "train_fineweb_40m", "train_fineweb_125m", "train_fineweb_125m_fast")
TESTS = "tests/test_gpu.py"
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
TOY_BATCH_SIZES = (2, 4, 8)
MARGIN = 1.3  # of the longest case so far: with less time left, no other begins
T = TypeVar("T")


@dataclass
class Session:
    """One call of bench/qualify.py: what the stages share."""

    device: torch.device
    folder: Path  # for what is needed while it runs; removed at the end
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # figures by stage, from earlier calls too
    deadline: float = 0.0  # time.perf_counter() at which the stage that runs should end

    @property
    def is_toy(self) -> bool:
        """Without a card, or with one that bench/pretend_card.py pretends, a CPU computes."""
        return self.device.type != "cuda" or "DESKGPT_PRETEND_CARD" in os.environ

    @property
    def vocab_size(self) -> int:
        return 512 if self.is_toy else 50304

    @property
    def model_settings(self) -> dict[str, Any]:
        return TOY_MODEL if self.is_toy else CARD_MODEL

    def config(self, **more: Any) -> GPTConfig:
        return GPTConfig(**({"vocab_size": self.vocab_size} | self.model_settings | more))

    def best_batch(self) -> int:
        """The micro-batch that stage 4 has found. Raises ValueError where it has found none."""
        best = self.results.get(4, {}).get("best")
        if best is None:
            raise ValueError("no micro-batch is known: --stages=4 finds it")
        return best

    def while_there_is_time(self, cases: Iterable[T]) -> Iterator[T]:
        """The first case, and the next as long as one that takes as long as the longest so far would end in time."""
        longest_s = 0.0
        for number, case in enumerate(cases):
            if number and self.deadline - time.perf_counter() < MARGIN * longest_s:
                return
            t0 = time.perf_counter()
            yield case
            longest_s = max(longest_s, time.perf_counter() - t0)

    def tokens(self, vocab_size: int) -> Path:
        """A folder of random tokens."""
        folder = self.folder / str(vocab_size)
        if not folder.exists():
            timing.write_data(folder, vocab_size)
        return folder

    def given(self, batch_size: int, micro_batches: int) -> list[str]:
        """Settings of train.py for the session's model."""
        settings = self.model_settings | {"batch_size": batch_size, "gradient_accumulation_steps": micro_batches}
        settings |= {"device": self.device, "compile": "False" if self.is_toy else "auto"}
        return [f"--{name}={value}" for name, value in settings.items()]

    def time(self, runs: list[Contestant], steps: int = 0, seconds: float = 8.0) -> tuple[str, dict[str, Any]]:
        """Times each run once, while there is time; returns their table, and its rows with what is missing."""
        hardware.release_memory(self.device)  # they are processes of their own, on the same device
        done = []
        for x in self.while_there_is_time(runs):
            timing.in_turns([x], 1, steps, 0.0 if self.is_toy else seconds)
            done.append(x)
        rows = timing.table(done)
        failed = [f"{x.name}: {x.status}" for x in done if x.status]
        found = {"rows": rows, "failed": failed, "unfinished": [x.name for x in runs[len(done) :]]}
        return f"{timing.as_markdown(rows)}\n\n{timing.peaks_in_words(rows)}.", found


def seconds_of(call: Callable[[], object]) -> float:
    """The median seconds of a call, of several that are queued one after the other."""
    return Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=0.2).median


# ---- 0: facts ------------------------------------------------------------------------------------------------


def facts(s: Session) -> tuple[str, dict[str, Any]]:
    """What the card is, and with which driver, libraries and compilers torch uses it."""
    memory_bytes = hardware.memory_bytes(s.device)
    found: dict[str, Any] = {"device": hardware.device_name(s.device)}
    found["memory"] = f"{memory_bytes / 2**30:.5g} GiB" if memory_bytes else None
    if s.device.type == "cuda":
        properties = torch.cuda.get_device_properties(s.device)
        found["free memory"] = f"{torch.cuda.mem_get_info(s.device)[0] / 2**30:.5g} GiB"
        found["compute capability"] = f"{properties.major}.{properties.minor}"
        found["SMs"] = properties.multi_processor_count
        query = ("--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader")
        found["driver, highest clock, power"] = answer("nvidia-smi", f"--id=GPU-{properties.uuid}", *query).strip()
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None
    found |= {"cuDNN": torch.backends.cudnn.version(), "compiler": compiling.compiler_name(s.device)}
    found |= versions() | {"commit": git_commit()}
    q = torch.zeros(1, 2, 64, 64, device=s.device)  # (B, H, T, D)
    for name, dtype in hardware.DTYPES.items():
        peak = peaks.published_flops(s.device, name)
        found[f"published peak, {name}"] = f"{in_tera(peak[0])} TFLOP/s ({peak[1]})" if peak else None
        same = q.to(dtype).requires_grad_()
        found[f"attention in {name}"] = SDPBackend(torch._fused_sdp_choice(same, same, same, is_causal=True)).name
    rows = [[name, "n/a" if value is None else str(value)] for name, value in found.items()]
    return markdown_table(["fact", "value"], rows, left_columns=2), found


# ---- 1: roofs ------------------------------------------------------------------------------------------------


def roofs(s: Session) -> tuple[str, dict[str, Any]]:
    """TFLOP/s of the model's linear layers and attention, forward and backward, in each dtype; and copies."""
    c = s.config()
    B = 4 if s.is_toy else 8
    tokens = B * c.block_size
    shapes = {"qkv": (c.n_embd, 3 * c.n_embd), "mlp": (c.n_embd, 4 * c.n_embd), "head": (c.n_embd, c.vocab_size)}
    kernels = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    rates: dict[str, dict[str, float | None]] = {}
    for way, dtype in hardware.DTYPES.items():
        options: dict[str, Any] = {"dtype": dtype, "device": s.device}
        cases: dict[str, tuple[float, Callable[[], object]]] = {}
        for name, (n_in, n_out) in shapes.items():
            x = torch.randn(tokens, n_in, **options, requires_grad=True)
            weight = torch.randn(n_out, n_in, **options, requires_grad=True)
            cases[name] = (6 * tokens * n_in * n_out, both_passes(F.linear, x, weight))
        qkv = torch.randn(3, B, c.n_head, c.block_size, c.n_embd // c.n_head, **options).unbind()
        q, k, v = (t.requires_grad_() for t in qkv)
        attention_flops = 12 * c.n_embd * c.block_size * tokens  # counted as MFU does: as if it were not causal
        for kernel in kernels:
            attention = functools.partial(attention_by, getattr(SDPBackend, kernel))
            cases[f"attention, {kernel.lower()}"] = (attention_flops, both_passes(attention, q, k, v))
        for name, (flops, call) in cases.items():
            try:
                rates.setdefault(name, {})[way] = flops / seconds_of(call)
            except RuntimeError:  # no such kernel for this card and dtype, or too little memory
                rates.setdefault(name, {})[way] = None
        hardware.release_memory(s.device)
    source = torch.zeros(1 << (24 if s.is_toy else 29), dtype=torch.uint8, device=s.device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / seconds_of(lambda: target.copy_(source))
    rows = [[name, *(in_tera(of_way[way]) for way in hardware.DTYPES)] for name, of_way in rates.items()]
    text = f"TFLOP/s at {tokens} tokens, forward and backward; medians. float32 is TF32 where the card has it.\n\n"
    text += markdown_table(["layer", *hardware.DTYPES], rows, left_columns=1)
    text += f"\n\nCopies within memory: {copied / 1e9:.4g} GB/s, read and written."
    return text, {"rates": rates, "copy_bytes_per_s": copied}


def both_passes(forward: Callable[..., Tensor], *operands: Tensor) -> Callable[[], object]:
    def call() -> object:
        out = forward(*operands)
        return torch.autograd.grad(out, operands, out.detach())

    return call


def attention_by(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, T, D) each
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


# ---- 2: parity -----------------------------------------------------------------------------------------------


def parity(s: Session) -> tuple[str, dict[str, Any]]:
    """Loss and every gradient on the device against float32 on the CPU; for GPT-2 and the modern choices."""
    size: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64 if s.is_toy else 256}
    recipe = build(train.TrainConfig, read_settings(train.TrainConfig, ["config/train_shakespeare_char_fast.py"]))
    modern = {name: getattr(recipe, name) for name in MODERN_CHOICES}
    models = {"GPT-2": s.config(**size), "modern": s.config(**(size | modern))}
    compiled = (False,) if s.is_toy else (False, True)  # compiling takes most of the time, so it comes last
    cases = [(name, Variant(way, c)) for c in compiled for way in hardware.DTYPES for name in models]
    verdicts: dict[str, str] = {}
    for name, variant in s.while_there_is_time(cases):
        try:
            compare(models[name], variant, s.device)
            verdict = "right"
        except Exception as e:  # the other cases may be right
            verdict = " ".join(f"{type(e).__name__}: {e}".split())[:300]
        verdicts[f"{name}, {variant}"] = verdict
        hardware.release_memory(s.device)
    failed = [f"{case}: {verdict}" for case, verdict in verdicts.items() if verdict != "right"]
    unfinished = [f"{name}, {variant}" for name, variant in cases[len(verdicts) :]]
    text = markdown_table(["case", "verdict"], [*verdicts.items()], left_columns=2)
    return text, {"verdicts": verdicts, "failed": failed, "unfinished": unfinished}


def compare(config: GPTConfig, variant: Variant, device: torch.device) -> None:
    """Raises Mismatch where a pass of this variant on the device is not what float32 on the CPU computes."""
    torch.manual_seed(0)
    model = GPT(config)
    ids = torch.randint(0, config.vocab_size, (4, config.block_size + 1))
    batch = (ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    with verify.nothing_is_zero(model), verify.full_float32():  # without TF32, which would hide defects
        loss, expected, _ = Runner(model, Variant()).measured(batch, 1)
        runner = Runner(model.to(device), variant)
        found_loss, found, _ = runner.measured((batch[0].to(device), batch[1].to(device)), 1)
    found = [g.cpu() for g in found]
    verify.compare_passes(str(variant), variant.dtype, runner.names, (found_loss, found), (loss, expected))


# ---- 3: tests ------------------------------------------------------------------------------------------------


def tests(s: Session) -> tuple[str, dict[str, Any]]:
    """The tests of tests/test_gpu.py, in a process of their own. On a CPU those that compile are left out."""
    command = [sys.executable, "-m", "pytest", TESTS, "-n", "0", "-rfEs", "--tb=short"]
    if s.is_toy:
        command += ["-k", "not compiled and not True"]  # True: a test's parameter `compiled`
    env = os.environ | {"DESKGPT_TEST_DEVICE": str(s.device)}
    try:
        limit_s = max(1.0, s.deadline - time.perf_counter())
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=limit_s, stdout=subprocess.PIPE, text=True)
    except subprocess.TimeoutExpired:
        return f"`{TESTS}` took too long.", {"unfinished": [f"all of them: pytest {TESTS}"]}
    if done.returncode > 1:
        raise ValueError(f"pytest {TESTS} ended with status {done.returncode}; is requirements-dev.txt installed?")
    outcomes = re.findall(r"^(FAILED|ERROR|SKIPPED) (.+)", done.stdout, re.M)
    lines = [f"{outcome} {test}" for outcome, test in outcomes]
    failed = [line for line in lines if not line.startswith("SKIPPED")]
    return "\n\n".join([f"`{TESTS}`: {done.stdout.strip().splitlines()[-1]}", *lines]), {"failed": failed}


# ---- 4 to 7: runs of train.py ----------------------------------------------------------------------------------


def batches(s: Session) -> tuple[str, dict[str, Any]]:
    """Memory, predicted and real, and speed by micro-batch: from the largest that should fit until it gets slower."""
    variant = Variant(peaks.fast_dtype(s.device), compiled=not s.is_toy)
    usable = hardware.usable_memory_bytes(s.device) or float("inf")
    runs: dict[int, Contestant] = {}
    for size in TOY_BATCH_SIZES if s.is_toy else BATCH_SIZES:
        predicted = sum(memory(Step(s.config(), size, variant, s.device.type)).values())
        if predicted < usable or not runs:
            name = f"micro-batch {size}, predicted {predicted / 1e9:.2f} GB"
            runs[size] = timing.ours(name, s.given(size, 2), s.tokens(s.vocab_size))
    done: list[Contestant] = []
    rates: dict[int, float] = {}
    for size in s.while_there_is_time(sorted(runs, reverse=True)):
        done.append(runs[size])
        timing.in_turns(done[-1:], 1, 0, 0.0 if s.is_toy else 4.0)
        if not runs[size].status:
            rates[size] = timing.table(done[-1:])[0]["tokens_per_s"]
            if rates[size] < 0.97 * max(rates.values()):
                break
    rows = timing.table(done)
    close = [size for size, rate in rates.items() if rate >= 0.97 * max(rates.values())]
    return timing.as_markdown(rows), {"best": min(close), "rows": rows}


def ways(s: Session) -> tuple[str, dict[str, Any]]:
    """Other ways to run the best micro-batch beside the usual one."""
    options = ["--compile=False", "--dtype=float32", "--activation_checkpoint=full", "--optimizer=muon"]
    given = s.given(s.best_batch(), 2)
    runs = [timing.ours("the usual way", given, s.tokens(s.vocab_size))]
    runs += [timing.ours(option, [*given, option], s.tokens(s.vocab_size)) for option in options]
    return s.time(runs)


def steps(s: Session) -> tuple[str, dict[str, Any]]:
    """Whole steps of four configs, the large ones at the best micro-batch."""
    runs = []
    for name in CONFIGS:
        given = [f"config/{name}.py", f"--device={s.device}"]
        if s.is_toy:
            given += s.given(2, 2)
        elif "125m" in name:
            accumulation = CARD_SEQUENCES // s.best_batch()
            given += [f"--batch_size={s.best_batch()}", f"--gradient_accumulation_steps={accumulation}"]
        runs.append(timing.ours(name, given, s.tokens(65 if name.endswith("_char") else s.vocab_size)))
    return s.time(runs, steps=3)


# ---- 8: sampling ---------------------------------------------------------------------------------------------


def sampling(s: Session) -> tuple[str, dict[str, Any]]:
    """ms per token until its id is on the host, after a prompt, for one text and for ten."""
    torch.manual_seed(0)
    model = GPT(s.config()).to(s.device).eval()
    dtype = peaks.fast_dtype(s.device)
    n = 16 if s.is_toy else 256
    rows = []
    for texts in (1, 10):
        prompts = torch.arange(8, device=s.device).expand(texts, -1)
        times = []
        with InferenceEngine(model, prompts, dtype).replacing():
            t0 = time.perf_counter()
            for token in model.generate(prompts, n, temperature=0.8, top_k=200):
                token.tolist()
                times.append((time.perf_counter() - t0) * 1e3)
                t0 = time.perf_counter()
        rows.append([str(texts), f"{statistics.median(times[4:]):.3f}", f"{max(times[4:]):.1f}"])
    hardware.release_memory(s.device)
    return f"ms per token in {dtype}.\n\n{markdown_table(['texts', 'median', 'longest'], rows)}", {"rows": rows}
