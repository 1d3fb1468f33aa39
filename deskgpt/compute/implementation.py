"""How a model runs on this machine: the fastest variant that agrees with model.py, and a micro-batch that fits.

On a CPU the dtype of the matmuls, the kind of attention and whether to compile are timed on the run's own model and
first micro-batch. The choice is remembered (system/cache.py), so that the same run starts alike the next time. Whether
a variant is right is checked at every start (runner.py, kernels/verify.py).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Batch, Runner, Variant, count_flops, is_reference
from deskgpt.estimate.fit import VariantSettings
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.kernels.verify import Mismatch
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.cache import digest_of_code
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.terminal import clock, not_silent
from model import GPT

CODE = (Path(__file__).resolve().parents[2] / "model.py", Path(__file__))  # with all that they import of ours
CACHE = "variants"  # of the choices that are remembered

PROBE_S = 0.3  # about what a timed pass takes: as many sequences of the micro-batch as fit into it
TURNS_S = 1.0  # that variants take turns
MOST_ROUNDS = 50
HOPELESS = 4.0  # times the fastest on one sequence: bfloat16 takes 30 where no instruction multiplies it
CLEARLY_FASTER = 0.97  # of the time of a plainer variant, which comes first

# On a CPU, compiling the blocks and the loss takes about this time with an empty cache, for any number of layers, and
# saves this share of a step (docs/decisions.md). They decide whether to try; the time of a compiled step decides.
COMPILE_S = 30.0
SAVED = 0.25
SAVED_WITH_KERNELS = 0.1

SPLITS_ANEW_ON = ("cuda",)  # devices on which auto_batch chooses the micro-batch

OUTCOMES = ("fits", "left out", "out of memory")  # of a trial, from the best to the one that decides for all ranks


@dataclass(frozen=True)
class EarlierVariant:
    """The variant of the run that a checkpoint is of, as far as it is known for this device."""

    dtype: str | None = None
    compiled: bool | None = None
    attention: str | None = None
    batch_size: int | None = None

    @classmethod
    def of(cls, saved: dict[str, Any] | None, device: torch.device, batch_size: int | None = None) -> EarlierVariant:
        """From a checkpoint's `form`. What is fast on another kind of device says nothing about this one."""
        if not isinstance(saved, dict) or saved.get("device", device.type) != device.type:
            return cls()
        if isinstance(saved.get("explicit"), bool):  # as written until 2026-11-24
            saved = saved | {"attention": "explicit" if saved["explicit"] else "flash"}
        known: dict[str, Any] = {"dtype": hardware.DTYPES, "compiled": (False, True), "attention": replacements.KINDS}
        kept: dict[str, Any] = {}
        for name, values in known.items():
            value = saved.get(name)
            if isinstance(value, str | bool) and value in values:
                kept[name] = value
        return cls(**kept, batch_size=batch_size)


def saved_variant(runner: Runner) -> dict[str, Any]:
    """A variant for a checkpoint: what was chosen, so that a resumed run chooses the same."""
    v = runner.variant
    return {"dtype": v.dtype, "compiled": v.compiled, "attention": v.attention, "device": runner.device.type}


def may_split_anew(config: VariantSettings, device: torch.device) -> bool:
    """Whether the run may take another micro-batch than the given one, at least where that does not fit."""
    return device.type in SPLITS_ANEW_ON if config.auto_batch == "auto" else bool(config.auto_batch)


@dataclass
class Tuner:
    """What variants are tried on: a model, with the first micro-batches of its run. All ranks try the same ones."""

    model: GPT
    config: VariantSettings
    batching: Batching  # becomes one whose micro-batches fit
    ranks: DistContext
    batch_of: Callable[[int], Batch]  # the first micro-batch of a number of sequences
    # The batching to go on with where memory runs out; raises ValueError where there is none.
    smaller: Callable[[Batching, Variant, float], Batching]
    # A larger micro-batch of the same training that is predicted to fit, or the same one.
    larger: Callable[[Batching, Variant], Batching] = lambda batching, variant: batching
    # How many times the memory a micro-batch surely takes, 0 if that is not known.
    times_memory: Callable[[Batching, Variant], float] = lambda batching, variant: 0.0
    earlier: EarlierVariant = EarlierVariant()
    steps: int = 0  # how long the run may last
    seconds: float = math.inf
    # Names of replacements that are wrong here, by dtype.
    refused: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def timed(self) -> bool:
        """Whether variants are timed. Ranks that share weights wait for each other, so their clocks show nothing."""
        return not sharding.is_sharded(self.model) and not self.config.eval_only

    def compiles(self) -> bool | None:
        """Whether to compile; None if that depends on whether it pays."""
        if isinstance(self.config.compile, bool):
            return self.config.compile
        if self.device.type == "cpu" and not self.config.eval_only:
            return self.earlier.compiled
        return self.device.type == "cuda" and hardware.has_triton_code(self.device)

    def micro_batch(self) -> Batch:
        return self.batch_of(self.batching.batch_size)

    def variant(self, dtype: str, attention: str) -> Variant:
        refused = self.refused["float32"] | self.refused[dtype]
        return Variant(dtype, False, attention, self.config.activation_checkpoint, tuple(sorted(refused)))


def choose_implementation(s: Tuner) -> tuple[Runner, Batching]:
    """The Runner that trains as wanted in the fastest variant, and in micro-batches that fit.

    Leaves the model as it was, and no gradients. Raises ValueError where what the user asks for is wrong or fails, or
    memory runs out.
    """
    with verify.undisturbed(s.model):
        kinds = kinds_of_attention(s)
        dtypes = dtypes_to_try(s)
        check_replacements(s, kinds, dtypes)
        variant = fastest(s, [s.variant(dtype, kind) for dtype in dtypes for kind in kinds])
        compiles = s.compiles()
        print_price(s, variant)
        if may_enlarge(s):
            enlarge(s, replace(variant, compiled=bool(compiles)))
        runner = try_variant(s, compiled(s, variant)) if compiles else None
        runner = runner or try_variant(s, variant)
        if runner is None and sharding.is_sharded(s.model):
            s.model = sharding.float32_copy(s.model)
        runner = runner or try_variant(s, s.variant("float32", variant.attention))
        assert runner is not None  # leave_out raises ValueError for float32
        if compiles is None and s.timed and s.steps > 0:
            runner = compiled_where_it_pays(s, runner)
    if not s.config.eval_only:
        runner.flops_per_token = count_flops(s.model, *s.batch_of(1))
    runner.last = None
    hardware.forget_peak(s.device)  # what was tried and compared may have taken more than the run does
    return runner, s.batching


# ---- what is possible and right ------------------------------------------------------------------------------


def dtypes_to_try(s: Tuner) -> list[str]:
    if sharding.is_sharded(s.model):
        return [dtype_of_shards(s.config.dtype, s.earlier, s.ranks)]
    dtype = s.config.dtype if s.config.dtype != "auto" else s.earlier.dtype
    if dtype is None and s.timed and s.device.type == "cpu":
        return ["float32", "bfloat16"]
    return [dtype or peaks.fast_dtype(s.device)]


def dtype_of_shards(wanted: str, earlier: EarlierVariant, ranks: DistContext) -> str:
    """The dtype in which ranks that share weights compute. wanted: the setting.

    It is not float16, since no loss scale follows their gradients.
    """
    dtype = wanted if wanted != "auto" else earlier.dtype or peaks.fast_dtype(ranks.device)
    return "bfloat16" if ranks.all(dtype == "bfloat16") else "float32"


def kinds_of_attention(s: Tuner) -> list[str]:
    """The kinds of attention to time: one where the settings, or the run before, name it.

    The explicit one is taken only when asked. Raises ValueError where the settings ask for C++ kernels that are none.
    """
    asked = s.config.attention
    wanted = asked if asked != "auto" else s.earlier.attention
    on_cpu = s.device.type == "cpu"
    if wanted in ("flash", "explicit"):
        return [wanted]
    if on_cpu and (wanted or s.timed) and cpu_kernels.may_exist() and has_cpu_kernels(s):
        return [wanted] if wanted else ["flash", "kernels"]
    if asked == "kernels":
        raise ValueError(
            f"attention=kernels is not possible with device={s.device.type}: it needs Linux, a processor with AVX2 or "
            "AVX-512 and a C++ compiler; try --attention=flash"
        )
    return ["flash"]


def has_cpu_kernels(s: Tuner) -> bool:
    """Whether all ranks have the kernels in C++, compiled now if need be; prints why where one has not."""
    problem = ""
    if not cpu_kernels.is_ready():
        s.ranks.print0("compiling kernels for this processor, once")
    try:
        with not_silent("still compiling kernels", s.ranks.print0):
            cpu_kernels.load()
    except cpu_kernels.Unavailable as e:
        problem = str(e)
    if s.ranks.all(not problem):
        return True
    s.ranks.print0(f"NOT using C++ kernels, so steps may be slower: {problem or 'another rank has none'}")
    return False


def check_replacements(s: Tuner, kinds: list[str], dtypes: list[str], compiled: bool = False) -> None:
    """Finds out which replacements compute something else than model.py here, and prints each once.

    Raises ValueError where the settings ask for the C++ kernels and their attention is wrong.
    """
    if not s.ranks.all(verify.weights_are_finite(s.model)):
        return  # nothing can be compared; run/health.py will explain why the run ends
    candidates: dict[str, list[Callable[..., Any]]] = {}
    for kind in kinds:
        for name, some in replacements.candidates_for(s.device.type, kind, compiled).items():
            known = candidates.setdefault(name, [])
            known += [c for c in some if c not in known]
    for dtype in dict.fromkeys(("float32", *dtypes)):
        refused = s.refused["float32"] | s.refused[dtype]
        candidates = {name: [c for c in some if c.__name__ not in refused] for name, some in candidates.items()}
        found: dict[str, str] = {}
        with not_silent("still checking kernels against model.py", s.ranks.print0):
            runner = Runner(s.model, s.variant(dtype, "flash"))
            for of_rank in s.ranks.gather(runner.check_replacements(candidates, *s.micro_batch())):
                found |= of_rank
        s.refused[dtype] |= set(found)
        if "kernel_attention" in found and s.config.attention == "kernels":
            raise ValueError(f"attention=kernels: {found['kernel_attention']}; leave --attention out")
        for some in candidates.values():
            wrong = [c for c in some if c.__name__ in found]
            right = [c for c in some if c not in wrong]
            if wrong:
                too = "".join(f", {replacements.describe(c)} too" for c in wrong[1:])
                instead = replacements.describe(right[0] if right else None)
                s.ranks.print0(f"{found[wrong[0].__name__]}{too}: using {instead}")


def print_price(s: Tuner, variant: Variant) -> None:
    """Prints how much longer a pass takes without the replacements that are wrong here."""
    if not variant.refused or not s.timed:
        return
    runners = [Runner(s.model, variant), Runner(s.model, replace(variant, refused=()))]
    try:
        without_s, with_s = in_turns(s, runners, s.batch_of(1))
    except (RuntimeError, TypeError, ValueError):  # a wrong one may also fail
        return
    without = " and ".join(name.replace("kernel_", "C++ ").replace("_", " ") for name in variant.refused)
    s.ranks.print0(f"without {without}, a sequence takes {without_s / with_s:.2f} times as long")


def may_enlarge(s: Tuner) -> bool:
    """Whether a larger micro-batch may be taken.

    A run that resumes on this kind of device keeps its own, unless the command names another one. Masks of dropout
    belong to a micro-batch, so with dropout the size changes only for a user who asks for it.
    """
    is_kept = s.earlier.dtype is not None and s.earlier.batch_size in (None, s.batching.batch_size)
    if is_kept or not s.timed or s.device.type not in SPLITS_ANEW_ON:
        return False
    return s.config.auto_batch is True or (s.config.auto_batch == "auto" and not s.model.config.dropout)


def enlarge(s: Tuner, variant: Variant) -> None:
    larger = s.larger(s.batching, variant)
    if larger != s.batching:
        s.batching = larger
        s.ranks.print0(f"auto_batch: {larger.flags()}, which is predicted to fit and the same training")


def compiled(s: Tuner, variant: Variant) -> Variant:
    """The variant, compiled, with the replacements that are right then."""
    check_replacements(s, [variant.attention], [variant.dtype], compiled=True)
    return replace(s.variant(variant.dtype, variant.attention), compiled=True)


# ---- timing --------------------------------------------------------------------------------------------------


def clearly_fastest(times: Mapping[Variant, float]) -> Variant:
    """The first of these choices, or a later one whose time is clearly shorter: the first costs less otherwise."""
    best, *others = times
    for other in others:
        if times[other] < CLEARLY_FASTER * times[best]:
            best = other
    return best


def choose(
    s: Tuner, what: str, choices: list[Variant], measure: Callable[[], dict[Variant, float]], compiler: str | None = ""
) -> Variant:
    """The clearly fastest choice, on which all ranks agree; remembered for this model, batch, machine and code."""
    names = [str(choice) for choice in choices]
    split = (tuple(s.batch_of(1)[0].shape), s.batching.micro_steps > 1, s.ranks.distributed)
    made_of = repr((s.model.config, split, compiler, s.config.activation_checkpoint, names)).encode()
    digest = hashlib.sha256(made_of + digest_of_code(CODE) + cpu_kernels.SOURCE.read_bytes()).hexdigest()[:16]
    key = f"{hardware.device_name(s.device)}, torch {torch.__version__}: {digest}, {what}"
    known, *of_others = s.ranks.gather(cache.read(CACHE).get(key))
    if known in names and all(other == known for other in of_others):
        s.ranks.print0(f"{what}: {known} (measured before: {cache.path_of(CACHE)})")
        return choices[names.index(known)]
    with not_silent("still timing", s.ranks.print0):
        times = measure()
    best = choices[int(s.ranks.max(float(choices.index(clearly_fastest(times)))))]  # ranks may have other times
    cache.keep(CACHE, key, str(best))
    in_ms = [f"{x}: {t * 1e3:.3g} ms" for x, t in times.items()]
    s.ranks.print0(f"{what}: {best} ({', '.join(in_ms)})")
    return best


def seconds(s: Tuner, runner: Runner, batch: Batch) -> float:
    """How long a forward and backward pass takes. Leaves no gradients."""
    hardware.synchronize(s.device)
    t0 = time.perf_counter()
    runner.forward_backward(*batch, s.batching.micro_steps)
    hardware.synchronize(s.device)
    pass_s = time.perf_counter() - t0
    runner.drop_gradients()
    return pass_s


def in_turns(s: Tuner, runners: list[Runner], batch: Batch) -> list[float]:
    """Seconds of a pass of each: the best of several, which take turns. The shorter a pass, the more turns."""
    best = [seconds(s, runner, batch) for runner in runners]
    for _ in range(min(MOST_ROUNDS, 1 + int(TURNS_S / sum(best)))):
        for i, runner in enumerate(runners):
            best[i] = min(best[i], seconds(s, runner, batch))
    return best


def fastest(s: Tuner, variants: list[Variant]) -> Variant:
    """The fastest of these variants on part of the run's first micro-batch."""
    if len(variants) == 1:
        return variants[0]

    def measure() -> dict[Variant, float]:
        one = s.batch_of(1)
        runners = {variant: Runner(s.model, variant) for variant in variants}
        # Twice: the first pass allocates and prepares kernels.
        row_s = {v: min(seconds(s, runner, one), seconds(s, runner, one)) for v, runner in runners.items()}
        hopeful = [v for v in variants if row_s[v] <= HOPELESS * min(row_s.values())]
        rows = max(1, min(s.batching.batch_size, int(PROBE_S / max(row_s[v] for v in hopeful))))
        return dict(zip(hopeful, in_turns(s, [runners[v] for v in hopeful], s.batch_of(rows)), strict=True))

    return choose(s, "fastest here", variants, measure)


# ---- one variant ---------------------------------------------------------------------------------------------


def try_variant(s: Tuner, variant: Variant) -> Runner | None:
    """The Runner of this variant, tried and checked; None, and a line that says why, where it does not work here.

    Where memory runs out, the micro-batch shrinks if auto_batch allows. Raises ValueError where it does not, and as
    leave_out.
    """
    while True:
        runner, outcome, problem = None, "out of memory", ""
        times = s.ranks.max(s.times_memory(s.batching, variant))
        if times <= 1:
            doing = "compiling" if variant.compiled else "trying the first micro-batch"
            with not_silent(f"still {doing}", s.ranks.print0):
                runner, outcome, problem = try_once(s, variant)
            outcome = OUTCOMES[int(s.ranks.max(float(OUTCOMES.index(outcome))))]  # the worst decides for all ranks
        if outcome == "fits":
            return runner
        if outcome == "left out":
            leave_out(s, variant, problem or "it fails, or differs, on another rank")
            return None
        s.batching = s.smaller(s.batching, variant, max(2.0, times))
        s.ranks.print0(f"out of memory: going on with {s.batching.flags()}, which is the same training")
        hardware.release_memory(s.device)


def try_once(s: Tuner, variant: Variant) -> tuple[Runner | None, str, str]:
    """(the Runner, one of OUTCOMES, what is wrong) after a pass of training, compared, and one of evaluation."""
    try:
        runner = Runner(s.model, variant, s.ranks.distributed, s.config.sync_each_batch)
        batch = s.micro_batch()
        if not s.config.eval_only:
            training_pass(s, runner, batch)
            runner.check_recompute(*batch)
            if not is_reference(variant, s.device):
                s.ranks.print0(f"checking {variant} against float32")
                runner.check_pass(*batch, s.batching.micro_steps)
        with runner.evaluating():
            runner.loss(*batch)
        hardware.synchronize(s.device)
        return runner, "fits", ""
    except Mismatch as e:
        return None, "left out", str(e)
    except Exception as e:
        if sharding.is_sharded(s.model):
            raise  # the others are in the pass: this ends them too
        if is_out_of_memory(e):
            return None, "out of memory", ""
        if not variant.compiled or isinstance(e, ValueError):
            raise
        from deskgpt.compute.compiling import why_not_compiled

        return None, "left out", why_not_compiled(e)
    finally:
        for p in s.model.parameters():
            p.grad = None


def training_pass(s: Tuner, runner: Runner, batch: Batch) -> None:
    """A training pass with room for what a step holds beside: AdamW's moments, earlier gradients, DDP's buckets."""
    copies = 2 + (s.batching.micro_steps > 1) + (s.ranks.distributed and not runner.sharded)
    room = [torch.empty_like(p) for p in runner.parameters * copies]
    runner.forward_backward(*batch, s.batching.micro_steps)
    del room
    runner.drop_gradients()


def leave_out(s: Tuner, variant: Variant, problem: str) -> None:
    """Prints why a variant is left out. Raises ValueError if the user has asked for it, or it is the plainest."""
    if variant.compiled and s.config.compile is True:
        raise ValueError(f"compile=True: {problem}; or try --compile=auto, or --compile=False")
    if variant.compiled:
        s.ranks.print0(f"compile=auto: NOT compiled, so steps are slower and may take more memory: {problem}")
    elif variant.dtype == "float32":  # TF32 on CUDA, float32 on MPS
        raise ValueError(f"{problem}; this GPU or its driver computes something else, try --device=cpu")
    elif s.config.dtype != "auto":
        raise ValueError(f"dtype={variant.dtype}: {problem}; try --dtype=auto, or --dtype=float32")
    else:
        s.ranks.print0(f"{problem}; going on in float32")


def compiled_where_it_pays(s: Tuner, eager: Runner) -> Runner:
    """eager, or the same compiled where the rest of the run is long enough to win that time back and it is faster."""
    with not_silent("still timing a micro-batch", s.ranks.print0):
        eager_s = min(seconds(s, eager, s.micro_batch()) for _ in range(2))
    share = SAVED_WITH_KERNELS if eager.variant.attention == "kernels" else SAVED
    saved_s = share * min(s.seconds, eager_s * s.batching.micro_steps * s.steps)
    pays = s.ranks.all(saved_s > COMPILE_S)
    times = f"takes about {clock(COMPILE_S)} and saves about {clock(saved_s)} of this run"
    s.ranks.print0(f"compile=auto: {'' if pays else 'not '}compiling, which {times}")
    if not pays:
        return eager
    variants = [eager.variant, compiled(s, eager.variant)]
    runner = None

    def measure() -> dict[Variant, float]:
        nonlocal runner
        runner = try_variant(s, variants[1])
        runners = [eager] if runner is None else [eager, runner]
        return dict(zip(variants, in_turns(s, runners, s.micro_batch()), strict=False))

    from deskgpt.compute.compiling import compiler_name

    if choose(s, "compile=auto", variants, measure, compiler_name(s.device)) == variants[0]:
        return eager
    return runner or try_variant(s, variants[1]) or eager
