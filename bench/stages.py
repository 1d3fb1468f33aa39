"""The stages of bench/qualify.py: each is a function that measures, and returns a page's text and its figures."""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import train
from bench import speed, timing
from bench.output import markdown_table
from bench.timing import ROOT, Contestant
from configurator import build, read_settings
from deskgpt.compute import compiling
from deskgpt.compute.inference import InferenceEngine
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate.memory import Step, memory
from deskgpt.run.log import git_commit, versions
from deskgpt.system import hardware, peaks
from deskgpt.system.terminal import in_tera
from model import GPT, MODERN_CHOICES, GPTConfig

# GPT-2 124M, the model of stages 1 and 4 to 10, and the toy that stands for it on a CPU.
CARD_MODEL = {"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024}
TOY_MODEL = {"n_layer": 2, "n_head": 2, "n_embd": 64, "block_size": 64}
CARD_SEQUENCES = 512  # of a step: 524,288 tokens, as config/train_fineweb_125m.py has it
CONFIGS = ("train_shakespeare_char", "train_fineweb_40m", "train_fineweb_125m", "train_fineweb_125m_fast")
TESTS = "tests/test_gpu.py"
BATCH_SIZES = (4, 8, 16, 32, 64, 128)
TOY_BATCH_SIZES = (2, 4, 8)
MARGIN = 1.3  # of the longest case so far: with less time left, no other begins
# What rounding explains of a parameter's gradient, relative to it, or to 1% of all gradients if that is larger.
TOLERANCE = {"float32": 2e-3, "float16": 3e-2, "bfloat16": 1e-1}  # float32 without TF32, which would hide defects
T = TypeVar("T")


@dataclass
class Session:
    """One call of bench/qualify.py: what the stages share."""

    device: torch.device
    folder: Path  # for what is needed while it runs; removed at the end
    nanogpt: Path | None = None  # an unmodified checkout of nanoGPT
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # figures by stage, from earlier calls too
    deadline: float = 0.0  # time.perf_counter() at which the stage that runs should end

    @property
    def is_toy(self) -> bool:
        return self.device.type != "cuda"

    @property
    def vocab_size(self) -> int:
        return 512 if self.is_toy else 50257

    @property
    def model_settings(self) -> dict[str, Any]:
        return TOY_MODEL if self.is_toy else CARD_MODEL

    def config(self, **more: Any) -> GPTConfig:
        vocab_size = math.ceil(self.vocab_size / 64) * 64
        return GPTConfig(**({"vocab_size": vocab_size} | self.model_settings | more))

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


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """The median seconds of a call, of several that are queued one after the other."""
    call()  # chooses a kernel, and loads it
    times = []
    for _ in range(7):
        hardware.synchronize(device)
        t0 = time.perf_counter()
        for _ in range(4):
            call()
        hardware.synchronize(device)
        times.append((time.perf_counter() - t0) / 4)
    return statistics.median(times)


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
        found |= nvidia_smi(f"GPU-{properties.uuid}")
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


def nvidia_smi(card: str) -> dict[str, str | None]:
    """What only the driver knows; nothing if there is no nvidia-smi."""
    names = ("driver_version", "clocks.sm", "clocks.max.sm", "power.limit")
    command = ["nvidia-smi", f"--id={card}", f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(names, done.stdout.strip().split(", "), strict=False))


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
        for kernel in kernels:
            cases[f"attention, {kernel.lower()}"] = (
                12 * c.n_embd * c.block_size * tokens,  # counted as MFU does: as if it were not causal
                both_passes(attention_by(getattr(SDPBackend, kernel)), q, k, v),
            )
        for name, (flops, call) in cases.items():
            try:
                rates.setdefault(name, {})[way] = flops / seconds_of(call, s.device)
            except RuntimeError:  # no such kernel for this card and dtype, or too little memory
                rates.setdefault(name, {})[way] = None
        hardware.release_memory(s.device)
    source = torch.zeros(1 << (24 if s.is_toy else 29), dtype=torch.uint8, device=s.device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / seconds_of(lambda: target.copy_(source), s.device)
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


def attention_by(backend: SDPBackend) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (B, H, T, D) each
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attention


# ---- 2: parity -----------------------------------------------------------------------------------------------


def parity(s: Session) -> tuple[str, dict[str, Any]]:
    """Loss and every gradient on the device against float32 on the CPU; for GPT-2 and the modern choices."""
    size: dict[str, Any] = {"n_layer": 2, "n_head": 2, "n_embd": 128, "block_size": 64 if s.is_toy else 256}
    recipe = build(train.TrainConfig, read_settings(train.TrainConfig, ["config/train_shakespeare_char_fast.py"]))
    modern = {name: getattr(recipe, name) for name in MODERN_CHOICES}
    models = {"GPT-2": s.config(**size), "modern": s.config(**(size | modern))}
    compiled = (False,) if s.is_toy else (False, True)  # compiling takes most of the time, so it comes last
    cases = [(name, way, is_compiled) for is_compiled in compiled for way in TOLERANCE for name in models]
    rows: list[list[str]] = []
    failed = []
    for name, way, is_compiled in s.while_there_is_time(cases):
        case = f"{name}, {way}, {'compiled' if is_compiled else 'not compiled'}"
        try:
            worst, off, loss_off = compare(models[name], way, is_compiled, s.device)
            verdict = "right" if off <= TOLERANCE[way] and loss_off <= TOLERANCE[way] else "WRONG"
            rows.append([case, verdict, worst, f"{loss_off:.2g}", f"{off:.2g}", f"{TOLERANCE[way]:g}"])
        except Exception as e:  # the other cases may be right
            rows.append([case, " ".join(f"{type(e).__name__}: {e}".split())[:300], "", "", "", ""])
        failed += [] if rows[-1][1] == "right" else [f"{case}: {rows[-1][1]}"]
        hardware.release_memory(s.device)
    head = ["case", "verdict", "worst parameter", "loss off by", "gradient off by", "allowed"]
    unfinished = [", ".join(map(str, case)) for case in cases[len(rows) :]]
    return markdown_table(head, rows, left_columns=3), {"rows": rows, "failed": failed, "unfinished": unfinished}


def compare(config: GPTConfig, way: str, compiled: bool, device: torch.device) -> tuple[str, float, float]:
    """(the worst parameter, the relative error of its gradient, that of the loss)."""
    torch.manual_seed(0)
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():  # a matrix of zeros would hide the gradients of everything before it
            p.add_(torch.randn_like(p) * 0.01)
    ids = torch.randint(0, config.vocab_size, (4, config.block_size + 1))
    x = ids[:, :-1].contiguous()
    y = ids[:, 1:].contiguous()
    results = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for place, variant in ((torch.device("cpu"), Variant()), (device, Variant(way, compiled))):
        runner = Runner(model.to(place), variant)
        loss = runner.forward_backward(x.to(place), y.to(place)).item()
        scale = runner.scaler.get_scale() if runner.scaler.is_enabled() else 1.0
        results.append((loss, [g.cpu().float() / scale for g in runner.gradients()]))
        runner.drop_gradients()
    torch.set_float32_matmul_precision(before)
    (expected_loss, expected), (found_loss, found) = results
    least = 0.01 * torch.stack([g.norm() for g in expected]).norm().item()
    errors = {}
    for name, a, b in zip(runner.names, found, expected, strict=True):
        errors[name] = (a - b).norm().item() / max(b.norm().item(), least)
    worst = max(errors, key=lambda name: errors[name])
    return worst, errors[worst], abs(found_loss / expected_loss - 1)


# ---- 3: tests ------------------------------------------------------------------------------------------------


def tests(s: Session) -> tuple[str, dict[str, Any]]:
    """The tests of tests/test_gpu.py, in a process of their own. On a CPU those that compile are left out."""
    report = s.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", TESTS, f"--junitxml={report}", "-rfEs", "--tb=short"]
    if s.is_toy:
        command += ["-k", "not compiled and not True"]  # True: a test's parameter `compiled`
    env = os.environ | {"DESKGPT_TEST_DEVICE": str(s.device)}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, timeout=max(1.0, s.deadline - time.perf_counter()))
    except subprocess.TimeoutExpired:
        return f"`{TESTS}` took too long.", {"unfinished": [f"all of them: pytest {TESTS}"]}
    if not report.exists():
        raise ValueError(f"pytest {TESTS} ended with status {done.returncode}; is requirements-dev.txt installed?")
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        bad = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        outcomes[case.attrib["name"]] = bad[0] if bad else "passed"
    counts = ", ".join(f"{count} {outcome}" for outcome, count in Counter(outcomes.values()).items())
    failed = [name for name, outcome in outcomes.items() if outcome in ("failure", "error")]
    return f"`{TESTS}`: {counts}.", {"outcomes": outcomes, "failed": failed}


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


def breakdown(s: Session) -> tuple[str, dict[str, Any]]:
    """The longest kernels (on a CPU: operators) of one step of train.py."""
    c = build(train.TrainConfig, read_settings(train.TrainConfig, s.given(s.best_batch(), 4)))
    averages = speed.profiled(c, s.tokens(s.vocab_size), 1).key_averages()
    return f"```\n{averages.table(sort_by=f'self_{s.device.type}_time_total', row_limit=30)}\n```", {}


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


# ---- 10: nanoGPT ---------------------------------------------------------------------------------------------


def nanogpt(s: Session) -> tuple[str, dict[str, Any]]:
    """train.py and an unmodified nanoGPT in turns, on the same work."""
    if s.nanogpt is None:
        return "Skipped: no checkout was named, with --nanogpt=PATH.", {}
    given = s.given(s.best_batch(), 2 if s.is_toy else 8)
    c = build(train.TrainConfig, read_settings(train.TrainConfig, given))
    folder = s.tokens(s.vocab_size)
    runs = [timing.ours("deskGPT", given, folder), speed.peer_of(f"nanogpt:{s.nanogpt}", c, given, folder)]
    timing.in_turns(runs, 2, 0, 0.0 if s.is_toy else 15.0)
    rows = timing.table(runs)
    return timing.as_markdown(rows), {"rows": rows, "failed": [f"{x.name}: {x.status}" for x in runs if x.status]}
