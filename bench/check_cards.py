"""Compiles what inductor makes of our configs for NVIDIA cards that are not there, and counts its work and memory.

    make check-cards                                                   # all cards and configs: minutes each
    python bench/check_cards.py --cards "RTX 4070" --configs train_fineweb_125m --kernels

For torch's CPU build, on Linux; triton is downloaded (0.2 GB) into ~/.cache/deskgpt. On a pretended card
(pretend_card.py) inductor writes its Triton kernels of a training step, of the loss's softmax, of evaluation and of
decoding; ptxas, which triton brings, compiles every configuration that autotuning would try. Then inductor's own
wrapper runs on fake tensors: its kernels' bytes, the FLOPs of matmuls and the bytes alive are counted. Exit status 1
where a kernel does not compile, wants more shared memory than the card has, or spills registers in all configurations.

The time of a step is a roofline: no card has measured it. Results are kept under a digest of the code and of the
versions of torch and triton, so that only what has changed is checked again.
"""
# ruff: noqa: E402 (torch comes after the card that it is to see)

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the repository; Python adds only this folder

from bench import pretend_card

IS_CHILD = __name__ == "__main__" and sys.argv[1:2] == ["--one"]
if IS_CHILD:
    pretend_card.pretend(backend="inductor")  # before torch is imported

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import train
from bench.output import markdown_table
from configurator import build, read_settings
from deskgpt.compute.runner import Runner, Variant
from deskgpt.estimate import plan
from deskgpt.estimate.memory import Live, Step, memory
from deskgpt.kernels import replacements
from deskgpt.kernels.kv_cache import Decoder
from deskgpt.kernels.overridable import replacing
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.cache import digest_of_code
from model import GPT, GPTConfig

CONFIGS = ("train_shakespeare_char", "train_fineweb_125m", "train_fineweb_125m_fast")
TRITON = "triton==3.7.1"  # which torch 2.13 requires

# Shares of the published peaks that cuBLAS's large matmuls, flash attention and kernels bound by memory are taken to
# reach. Assumptions: see docs/figures.md for the one known run.
OF_MATMULS = 0.8
OF_ATTENTION = 0.5
OF_MEMORY = 0.9

# Operators that move no bytes, and those that touch as much of their first tensor as they return.
WITHOUT_WORK = ("empty", "empty_like", "empty_strided", "new_empty", "_unsafe_view", "detach", "alias", "device")
READ_IN_PART = ("embedding", "index", "index_put_", "gather")

# ---- in a process that pretends a card -----------------------------------------------------------------------


class Kernels:
    """The Triton kernels that inductor writes for a card. They compile, but do not run."""

    def __init__(self, card: pretend_card.Card) -> None:
        from triton.backends.compiler import GPUTarget

        self.card = card
        self.target = GPUTarget("cuda", 10 * card.capability[0] + card.capability[1], 32)
        self.sources: dict[str, str] = {}  # source -> name
        self.ran: Any = None  # called with the name and bytes of a kernel that would run

    def collect(self, compiler: Any, name: str, source: str, *args: Any, **kwargs: Any) -> Any:
        """Replaces AsyncCompile.triton."""
        self.sources[source] = name
        found = re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)
        size = round(1e9 * float(found[1])) if found else 0
        return SimpleNamespace(run=lambda *args, **kwargs: self.ran(name, size))

    def compile(self) -> dict[str, Any]:
        """cubins: how many; failed: lines; kernels: what the best configuration of each takes, as `taken` says."""
        from torch._inductor.codecache import PyCodeCache

        found: dict[str, Any] = {"cubins": 0, "failed": [], "kernels": {}}
        for source, name in self.sources.items():
            kernel = getattr(PyCodeCache.load(source), name)
            best = None
            for config in kernel.configs:
                try:
                    taken = self.taken(kernel, config)
                except Exception as e:  # of no common class
                    found["failed"].append(
                        f"{name} {config.kwargs}: {' '.join(f'{type(e).__name__}: {e}'.split())[:200]}"
                    )
                    continue
                found["cubins"] += 1
                best = min(best or taken, taken)
                if taken[2] > self.card.shared_memory:
                    found["failed"].append(f"{name} {config.kwargs}: {taken[2]} bytes of shared memory")
            if best and best[0]:
                found["failed"].append(f"{name}: {best[0]} bytes of registers spill")
            found["kernels"][name] = best
        return found

    def taken(self, kernel: Any, config: Any) -> tuple[int, ...]:
        """Bytes of registers that spill, of other local memory and of shared memory; of one configuration, compiled."""
        import triton

        meta = kernel._create_compile_meta(config)
        code = triton.compiler.ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            binary = triton.compile(code, self.target, kernel._create_compile_options(config, meta))
        [(stack, spilled)] = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log.getvalue())
        return int(spilled), int(stack) - int(spilled), binary.metadata.shared

    def prepare_inductor(self) -> None:
        """Makes inductor write code for the card, and its wrappers run on fake tensors."""
        import torch._functorch.config
        import torch._inductor.async_compile
        import torch._inductor.compile_fx
        import torch._inductor.runtime.triton_helpers
        import triton.runtime
        from torch._dynamo.device_interface import CudaInterface

        driver = SimpleNamespace(get_current_target=lambda: self.target, get_current_device=lambda: 0)
        driver.get_active_torch_device = lambda: torch.device("cuda", 0)
        triton.runtime.driver.set_active(driver)
        triton.knobs.compilation.always_compile = True  # the same kernel again, too: its log is wanted
        triton.knobs.nvidia.dump_ptxas_log = True
        torch._functorch.config.force_non_lazy_backward_lowering = True
        inductor: Any = torch._inductor
        inductor.config.benchmark_kernel = True  # writes down how many bytes a kernel moves
        inductor.async_compile.AsyncCompile.triton = lambda *args, **kwargs: self.collect(*args, **kwargs)
        inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
        for name in ("get_device_properties", "current_device", "device_count", "synchronize"):
            setattr(CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
        # What wrappers call in C++, which wants real tensors.
        guards: Any = torch._C._dynamo.guards
        guards._empty_strided_cuda = lambda *args: torch.empty_strided(*args[:2], dtype=args[2], device="cuda")
        guards._reinterpret_tensor = lambda t, size, stride, n=0: t.as_strided(size, stride, t.storage_offset() + n)
        guards.assert_size_stride = guards.assert_alignment = lambda *args: None
        guards.copy_if_misaligned = lambda t: t
        vars(torch.cuda)["_DeviceGuard"] = pretend_card.Within
        for module in (inductor.utils, inductor.compile_fx, inductor.output_code):
            module.copy_misaligned_inputs = lambda *args, **kwargs: ([], [])
            module.get_input_idxs_to_check = lambda *args, **kwargs: []


class Work(Live):
    """Counts FLOPs and bytes of what runs on fake tensors, too. softmax: calls and bytes of the loss's, by kernel."""

    def __init__(self, softmax: Counter[str]) -> None:
        super().__init__()
        self.softmax = softmax
        self.begin()

    def begin(self) -> None:
        self.calls: Counter[str] = Counter()
        self.moved: Counter[str] = Counter()  # bytes by kernel or operator
        self.flops: Counter[str] = Counter()  # of matmuls and attention

    def add(self, name: str, size: int) -> None:
        self.calls[name] += 1
        self.moved[name] += size

    def softmax_(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for name, size in self.softmax.items():
            self.add(name, size)
        return torch.empty(len(logits), device="cuda")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        with self:
            if func is torch.ops.deskgpt.chunked_cross_entropy.default:  # opaque to inductor
                h, weight, targets, dtype, chunk, needs_grad, _ = args
                return replacements.chunked_cross_entropy(h, weight, targets, dtype, chunk, needs_grad, self.softmax_)
            parts = NotImplemented if name == "device" else func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if func._overloadpacket in flop_registry:
            operands = args[:3] if name == "addmm" else args  # without the dtype of its sum
            flops = flop_registry[func._overloadpacket](*operands, **kwargs, out_val=out)
            is_attention = "attention" in name
            self.flops["attention" if is_attention else "matmuls"] += flops // (1 + is_attention)  # half is masked
        elif not func.is_view and name not in WITHOUT_WORK:
            touched = (args[1:], None if name == "index_put_" else out) if name in READ_IN_PART else (args, kwargs, out)
            self.add(name, sum(t.nbytes for t in tree_leaves(touched) if isinstance(t, torch.Tensor)))
        return out


def card_attention(reference: Any, q: Any, k: Any, v: Any, *positions_and_dropout: Any) -> torch.Tensor:
    """Attention by the operator that the card takes: torch's own choice would be the CPU build's."""
    dropout = positions_and_dropout[-1]
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    is_causal = q.size(2) == k.size(2) and q.size(2) > 1
    if torch.cuda.get_device_capability() >= (8, 0) and q.dtype != torch.float32:
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout, is_causal)[0]
    return torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout, is_causal)[0]


def check(card_name: str, config_name: str) -> dict[str, Any]:
    """All that is found of one config on one card, in a process of its own."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch._subclasses.fake_tensor import FakeTensorMode

    kernels = Kernels(pretend_card.CARDS[card_name])
    kernels.prepare_inductor()
    device = torch.device("cuda")
    c: Any = build(train.TrainConfig, read_settings(train.TrainConfig, [f"config/{config_name}.py"]))
    V = 65 if "_char" in config_name else 50304
    config = GPTConfig(vocab_size=V, **{n: getattr(c, n) for n in GPTConfig.__dataclass_fields__ if n != "vocab_size"})
    variant = Variant(peaks.fast_dtype(device), compiled=True)
    replacements.register_operators()
    work = Work(Counter())
    call = CompiledFxGraph.__call__

    def call_counted(graph: Any, inputs: Any) -> Any:
        with contextlib.nullcontext() if work in _get_current_dispatch_mode_stack() else work:
            return call(graph, inputs)

    CompiledFxGraph.__call__ = call_counted  # type: ignore[assignment, method-assign]
    with FakeTensorMode(allow_non_fake_inputs=True), device:
        if c.batch_size * c.block_size * V > replacements.LOGITS_ON_CPU:  # the loss comes in chunks
            kernels.ran = lambda name, size: work.softmax.update({name: size})
            rows = replacements.tokens_per_chunk(c.batch_size * c.block_size, V, replacements.LOGITS_ON_GPU)
            logits = torch.empty(rows, V, dtype=hardware.DTYPES[variant.dtype])
            with torch.no_grad():
                replacements.compiled_softmax_()(logits, torch.zeros(rows, dtype=torch.int64))

        kernels.ran = work.add
        with work:
            model = GPT(config)
            optimizer = train.build_optimizer(c, model, variant.dtype)
            idx = torch.zeros(c.batch_size, c.block_size, dtype=torch.int64)
        runner = Runner(model, variant)
        runner.replacements["attention"] = card_attention
        for _ in range(2):  # the second step has the optimizer's states
            work.peak = work.bytes
            for _ in range(2):  # the second micro-batch adds to gradients
                work.begin()
                with runner.micro_batch():
                    loss, parts = runner.forward(idx, idx, 4)
                    with work:
                        loss.backward()
                del loss, parts
            found: dict[str, Any] = {"calls": work.calls, "bytes": work.moved, "flops": work.flops}
            work.begin()
            with work:
                torch._foreach_norm(runner.gradients())
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        found |= {"update": work.moved.total(), "peak_bytes": work.peak}

        with runner.evaluating():
            runner.loss(idx, idx)
        model.eval()
        model.transformer.compile(dynamic=True)
        decoding: dict[str, Any] = {"attention": card_attention, "GPT.next_logits": Decoder(model)}
        with torch.inference_mode(), hardware.autocast(device, variant.dtype), replacing(decoding):
            model.next_logits(torch.zeros(2, 9, dtype=torch.int64))
    step = Step(config, c.batch_size, variant, "cuda")
    peak = peaks.find_card(card_name).peak(variant.dtype)
    assert peak is not None
    found |= {"dtype": variant.dtype, "tokens": idx.numel(), "steps": c.gradient_accumulation_steps, "peak": peak[0]}
    found |= {"flops_per_token": GPT.without_storage(config).estimate_flops()}
    return found | {"predicted_bytes": sum(memory(step).values())} | kernels.compile()


# ---- the command ---------------------------------------------------------------------------------------------


def triton_folder() -> str:
    """Where triton is. In the environment itself it would change what torch.compile does on a CPU."""
    folder = cache.folder() / TRITON
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent) as new:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", f"--target={new}/triton", TRITON]
            subprocess.run(pip, check=True)
            os.replace(f"{new}/triton", folder)
    return str(folder)


def checked(card: str, config: str) -> dict[str, Any]:
    """What `check` finds in a process of its own, or has found for this code before. Raises SystemExit if it fails."""
    digest = hashlib.sha256(digest_of_code())
    for path in (Path(__file__), Path(pretend_card.__file__), pretend_card.SOURCE, ROOT / "config" / f"{config}.py"):
        digest.update(path.read_bytes())
    key = f"{card}, {config}, {digest.hexdigest()[:16]}, torch {torch.__version__}, {TRITON}"
    known = cache.read("check-cards").get(key)
    if known:
        return known
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {name: f"{folder}/{name}" for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        env |= {pretend_card.CARD: card, pretend_card.LIBRARY: str(pretend_card.build())}
        env |= {"PYTHONPATH": os.pathsep.join([triton_folder(), os.environ.get("PYTHONPATH", "")])}
        env |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
        command = [sys.executable, __file__, "--one", card, config]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: {config} cannot be checked for {card}:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    found["failed"] += re.findall(r"^W\d{4} .*$", done.stderr, re.M)  # which a user would see, too
    cache.keep("check-cards", key, found)
    return found


def row_of(name: str, found: dict[str, Any]) -> list[str]:
    """A card's row of the table, with a roofline of an optimizer step."""
    card = pretend_card.CARDS[name]
    rate, steps, flops = found["peak"], found["steps"], found["flops"]
    bytes_per_s = OF_MEMORY * card.gb_per_s * 1e9
    parts = [steps * flops["matmuls"] / OF_MATMULS / rate, steps * flops["attention"] / OF_ATTENTION / rate]
    parts += [steps * sum(found["bytes"].values()) / bytes_per_s, found["update"] / bytes_per_s]
    step_s = sum(parts)
    mfu = found["steps"] * found["tokens"] * found["flops_per_token"] / step_s / rate
    low, high, _ = plan.usual_mfu(peaks.find_card(name))
    return [
        f"{name} (sm_{card.capability[0]}{card.capability[1]}), {found['dtype']}",
        f"{len(found['kernels'])}, {found['cubins']}",
        str(len(found["failed"])),
        str(sum(bool(local) for _, local, _ in found["kernels"].values())),
        " + ".join(f"{part_s / step_s:.0%}" for part_s in parts),
        f"{mfu * rate / found['flops_per_token']:,.0f}",
        f"{mfu:.0%} ({low:.0%} to {high:.0%})",
        f"{found['peak_bytes'] / 2**30:.2f}, {found['predicted_bytes'] / 2**30:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cards", nargs="+", choices=pretend_card.CARDS, default=list(pretend_card.CARDS))
    parser.add_argument("--configs", nargs="+", metavar="NAME", default=CONFIGS, help="of config/NAME.py")
    parser.add_argument("--kernels", action="store_true", help="also list what moves bytes")
    a = parser.parse_args()
    head = ["card", "kernels, cubins", "failed", "local memory", "matmuls + attention + memory + update"]
    head += ["tokens/s", "MFU (planned)", "GiB counted, predicted"]
    problems = []
    for config in a.configs:
        rows = []
        for card in a.cards:
            found = checked(card, config)
            rows.append(row_of(card, found))
            problems += [f"{card}, {config}: {line}" for line in found["failed"]]
            if a.kernels:
                names = sorted(found["bytes"], key=lambda name: -found["bytes"][name])
                cells = [[n, str(found["calls"][n]), f"{found['bytes'][n] / 1e6:,.1f}"] for n in names]
                print(f"\n{card}:\n\n{markdown_table(['in a micro-batch', 'calls', 'MB'], cells, 1)}")
        print(f"\n## {config}: expected, not measured\n\n{markdown_table(head, rows, 1)}", flush=True)
    if problems:
        sys.exit("\n".join(["", *problems]))


if IS_CHILD:
    print("\n" + json.dumps(check(*sys.argv[2:])))
elif __name__ == "__main__":
    main()
