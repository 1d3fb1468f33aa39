"""How a model runs on this machine: the fastest variant that agrees with model.py, and a micro-batch that fits.

On a CPU the dtype of the matmuls, the kind of attention and whether to compile are timed on the run's own model and
first micro-batch. The choice is remembered (system/cache.py), so that the same run starts alike the next time. Whether
a variant is right is checked at every start (runner.py, kernels/verify.py).
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from deskgpt.compute import sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Batch, Runner, Variant, count_flops, find_wrong_replacements, is_reference
from deskgpt.estimate.fit import larger_batch, memory_ratio, smaller_batch
from deskgpt.estimate.memory import MakeOptimizer
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.kernels.verify import Mismatch
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.cache import digest_of_code
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.terminal import clock, not_silent
from model import GPT

if TYPE_CHECKING:
    from train import TrainConfig

CACHE = "variants"  # the entries of system/cache.py that remember choices

PROBE_S = 0.3  # about what a timed pass takes: as many sequences of the micro-batch as fit into it
TURNS_S = 1.0  # for which variants take turns
MOST_ROUNDS = 50
HOPELESS = 4.0  # times the fastest on one sequence: bfloat16 takes 30 where no instruction multiplies it
CLEARLY_FASTER = 0.97  # of the time of a plainer variant, which comes first

# On a CPU, compiling the blocks and the loss takes about this time with an empty cache, for any number of layers, and
# saves this share of a step (docs/decisions.md). They decide whether to try; the time of a compiled step decides.
COMPILE_S = 30.0
SAVED = 0.25
SAVED_WITH_KERNELS = 0.1

FITS, LEFT_OUT, OUT_OF_MEMORY = range(3)  # outcomes of a trial; the largest of all ranks decides


@dataclass(frozen=True)
class EarlierVariant:
    """How the run that saved a checkpoint computed; None for what is not known of this kind of device."""

    dtype: str | None = None
    compiled: bool | None = None
    attention: str | None = None
    batch_size: int | None = None

    @classmethod
    def of(cls, saved: dict[str, Any] | None, device: torch.device, batch_size: int | None = None) -> EarlierVariant:
        """From what saved_variant wrote. The variant of another kind of device says nothing about this one."""
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


@dataclass
class Tuner:
    """Finds the variant in which a model trains here, on the first micro-batches of its run.

    All ranks try the same variants.
    """

    model: GPT
    config: TrainConfig
    batching: Batching  # becomes one whose micro-batches fit
    dist: DistContext
    batch_of: Callable[[int], Batch]  # the first micro-batch of a number of sequences
    make_optimizer: MakeOptimizer
    earlier: EarlierVariant
    steps: int  # that the run may still take; 0: it only evaluates
    # Names of replacements that are wrong here, by dtype.
    refused: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def is_timed(self) -> bool:
        """Whether variants are timed. Ranks that share weights wait for each other, so their clocks show nothing."""
        return not sharding.is_sharded(self.model) and not self.config.eval_only

    def choose(self) -> tuple[Runner, Batching]:
        """A Runner with the fastest variant that agrees with model.py, and micro-batches that fit.

        Leaves the model as it was, and no gradients. Raises ValueError where what the user asks for is wrong or fails,
        or memory runs out.
        """
        with verify.undisturbed(self.model):
            attentions = self.attentions_to_try()
            dtypes = self.dtypes_to_try()
            self.check_replacements(attentions[-1], dtypes)  # the candidates for kernels are also flash's
            variant = self.fastest([self.variant(dtype, attention) for dtype in dtypes for attention in attentions])
            self.print_price(variant)
            compiles = self.compiles()
            self.enlarge(replace(variant, compiled=bool(compiles)))
            runner = self.try_variant(self.compiled_variant(variant)) if compiles else None
            if runner is None:
                runner = self.try_variant(variant)
            if runner is None:
                runner = self.try_variant(self.variant("float32", variant.attention))
            assert runner is not None  # leave_out raises ValueError for float32
            if compiles is None and self.is_timed and self.steps > 0:
                runner = self.compiled_where_it_pays(runner)
        if not self.config.eval_only:
            runner.flops_per_token = count_flops(self.model, *self.batch_of(1))
        runner.last = None
        hardware.forget_peak(self.device)  # what was tried and compared may have taken more than the run does
        return runner, self.batching

    # ---- what is possible and right ----------------------------------------------------------------------

    def compiles(self) -> bool | None:
        """Whether to compile; None if that depends on whether it pays."""
        if isinstance(self.config.compile, bool):
            return self.config.compile
        if self.device.type == "cpu" and not self.config.eval_only:
            return self.earlier.compiled
        return self.device.type == "cuda" and hardware.has_triton_code(self.device)

    def dtypes_to_try(self) -> list[str]:
        if sharding.is_sharded(self.model):
            return [dtype_of_shards(self.config.dtype, self.earlier, self.dist)]
        dtype = self.config.dtype if self.config.dtype != "auto" else self.earlier.dtype
        if dtype is None and self.is_timed and self.device.type == "cpu":
            return ["float32", "bfloat16"]
        return [dtype or peaks.fast_dtype(self.device)]

    def attentions_to_try(self) -> list[str]:
        """The kinds of attention to time: one where the settings, or the run before, name it.

        The explicit one is taken only when asked. Raises ValueError where the settings ask for C++ kernels and there
        are none.
        """
        asked = self.config.attention
        wanted = asked if asked != "auto" else self.earlier.attention
        if wanted in ("flash", "explicit"):
            return [wanted]
        may_use = self.device.type == "cpu" and (wanted is not None or self.is_timed)
        if may_use and cpu_kernels.may_exist() and self.loads_cpu_kernels():
            return ["kernels"] if wanted else ["flash", "kernels"]
        if asked == "kernels":
            raise ValueError(
                f"attention=kernels is not possible with device={self.device.type}: it needs Linux, a processor with "
                "AVX2 or AVX-512 and a C++ compiler; try --attention=flash"
            )
        return ["flash"]

    def loads_cpu_kernels(self) -> bool:
        """Whether all ranks have the kernels in C++, compiled now if need be; prints why where one has not."""
        problem = ""
        try:
            with not_silent("still compiling kernels", self.dist.print0):
                cpu_kernels.load(self.dist.print0)
        except cpu_kernels.Unavailable as e:
            problem = str(e)
        if self.dist.all(not problem):
            return True
        self.dist.print0(f"NOT using C++ kernels, so steps may be slower: {problem or 'another rank has none'}")
        return False

    def variant(self, dtype: str, attention: str) -> Variant:
        """Not compiled, without the replacements that are known to be wrong."""
        refused = self.refused["float32"] | self.refused[dtype]
        return Variant(dtype, False, attention, self.config.activation_checkpoint, tuple(sorted(refused)))

    def compiled_variant(self, variant: Variant) -> Variant:
        """The variant, compiled, with the replacements that are right then."""
        self.check_replacements(variant.attention, [variant.dtype], compiled=True)
        return replace(self.variant(variant.dtype, variant.attention), compiled=True)

    def check_replacements(self, attention: str, dtypes: list[str], compiled: bool = False) -> None:
        """Finds out which replacements compute something else than model.py here, and prints each once.

        Raises ValueError where the settings ask for the C++ kernels and their attention is wrong.
        """
        if not self.dist.all(verify.weights_are_finite(self.model)):
            return  # nothing can be compared; run/health.py will explain why the run ends
        candidates = replacements.candidates_for(self.device.type, attention, compiled)
        for dtype in dict.fromkeys(("float32", *dtypes)):
            refused = self.refused["float32"] | self.refused[dtype]
            candidates = {name: [c for c in some if c.__name__ not in refused] for name, some in candidates.items()}
            with not_silent("still checking kernels against model.py", self.dist.print0):
                x, y = self.batch_of(self.batching.batch_size)
                problems = find_wrong_replacements(self.model, candidates, x, y, dtype, self.dist)
            self.refused[dtype] |= problems.keys()
            if "kernel_attention" in problems and self.config.attention == "kernels":
                raise ValueError(f"attention=kernels: {problems['kernel_attention']}; leave --attention out")
            for some in candidates.values():
                found = [problems[c.__name__] for c in some if c.__name__ in problems]
                right = [c for c in some if c.__name__ not in problems]
                if found:
                    instead = replacements.describe(right[0] if right else None)
                    self.dist.print0(f"{'; '.join(found)}: using {instead}")

    # ---- a larger micro-batch ----------------------------------------------------------------------------

    def enlarge(self, variant: Variant) -> None:
        """Takes a larger micro-batch, where auto_batch allows and it is predicted to fit.

        A run that resumes on this kind of device keeps its own, unless the command names another one. Masks of dropout
        belong to a micro-batch, so with dropout the size changes only for a user who asks for it.
        """
        is_kept = self.earlier.dtype is not None and self.earlier.batch_size in (None, self.batching.batch_size)
        wanted = self.config.auto_batch
        if wanted == "auto":
            wanted = not self.model.config.dropout
        if is_kept or not wanted or not self.is_timed or self.device.type != "cuda":
            return
        larger = larger_batch(self.model.config, self.make_optimizer, self.device, self.batching, variant)
        if larger != self.batching:
            self.batching = larger
            self.dist.print0(f"auto_batch: {larger.flags()}, which is predicted to fit and the same training")

    # ---- timing ------------------------------------------------------------------------------------------

    def pass_s(self, runner: Runner, batch: Batch) -> float:
        """How long a forward and backward pass takes. Leaves no gradients."""
        hardware.synchronize(self.device)
        t0 = time.perf_counter()
        runner.forward_backward(*batch, self.batching.micro_steps)
        hardware.synchronize(self.device)
        pass_s = time.perf_counter() - t0
        self.model.zero_grad()
        return pass_s

    def time_in_turns(self, runners: Mapping[Variant, Runner], batch: Batch) -> dict[Variant, float]:
        """Seconds of a pass of each: the best of several, which take turns. The shorter a pass, the more turns."""
        best_s = {variant: self.pass_s(runner, batch) for variant, runner in runners.items()}
        for _ in range(min(MOST_ROUNDS, 1 + int(TURNS_S / sum(best_s.values())))):
            for variant, runner in runners.items():
                best_s[variant] = min(best_s[variant], self.pass_s(runner, batch))
        return best_s

    def fastest(self, variants: list[Variant]) -> Variant:
        """The fastest of these variants on part of the run's first micro-batch."""
        if len(variants) == 1:
            return variants[0]
        key = self.key("fastest here", variants)
        known = self.remembered(key, variants)
        if known is not None:
            return known
        with not_silent("still timing", self.dist.print0):
            runners = {variant: Runner(self.model, variant) for variant in variants}
            row = self.batch_of(1)
            row_s = {}
            for variant, runner in runners.items():
                first_s = self.pass_s(runner, row)  # it also allocates and prepares kernels
                row_s[variant] = min(first_s, self.pass_s(runner, row))
            longest_s = HOPELESS * min(row_s.values())
            hopeful = {variant: runner for variant, runner in runners.items() if row_s[variant] <= longest_s}
            rows = int(PROBE_S / max(row_s[variant] for variant in hopeful))
            times_s = self.time_in_turns(hopeful, self.batch_of(max(1, min(self.batching.batch_size, rows))))
        return self.clearly_fastest(key, variants, times_s)

    def print_price(self, variant: Variant) -> None:
        """Prints how much longer a pass takes without the replacements that are wrong here."""
        if not variant.refused or not self.is_timed:
            return
        all_in_use = replace(variant, refused=())
        runners = {v: Runner(self.model, v) for v in (variant, all_in_use)}
        try:
            times_s = self.time_in_turns(runners, self.batch_of(1))
        except (RuntimeError, TypeError, ValueError):  # a wrong one may also fail
            return
        names = " and ".join(name.replace("kernel_", "C++ ").replace("_", " ") for name in variant.refused)
        self.dist.print0(
            f"without {names}, a sequence takes {times_s[variant] / times_s[all_in_use]:.2f} times as long"
        )

    def key(self, what: str, variants: list[Variant], compiler: str | None = "") -> str:
        """Under which a choice is remembered: for this model, batch, machine and code."""
        names = [str(variant) for variant in variants]
        split = (tuple(self.batch_of(1)[0].shape), self.batching.micro_steps > 1, self.dist.distributed)
        made_of = repr((self.model.config, split, compiler, self.config.activation_checkpoint, names)).encode()
        digest = hashlib.sha256(made_of + digest_of_code()).hexdigest()[:16]
        return f"{hardware.device_name(self.device)}, torch {torch.__version__}: {digest}, {what}"

    def remembered(self, key: str, variants: list[Variant]) -> Variant | None:
        """The variant that an earlier run on this machine chose, if all ranks remember the same one."""
        names = [str(variant) for variant in variants]
        known = self.dist.gather(cache.read(CACHE).get(key))
        if known[0] not in names or any(other != known[0] for other in known):
            return None
        what = key.rpartition(", ")[2]
        self.dist.print0(f"{what}: {known[0]} (measured before: {cache.path_of(CACHE)})")
        return variants[names.index(known[0])]

    def clearly_fastest(self, key: str, variants: list[Variant], times_s: Mapping[Variant, float]) -> Variant:
        """The first variant, which is the plainest, or a later one that is clearly faster; remembered.

        All ranks take the same one, though they may have other times.
        """
        best, *others = times_s
        for other in others:
            if times_s[other] < CLEARLY_FASTER * times_s[best]:
                best = other
        best = variants[int(self.dist.max(variants.index(best)))]
        cache.keep(CACHE, key, str(best))
        what = key.rpartition(", ")[2]
        in_ms = ", ".join(f"{variant}: {t * 1e3:.3g} ms" for variant, t in times_s.items())
        self.dist.print0(f"{what}: {best} ({in_ms})")
        return best

    def compiled_where_it_pays(self, eager: Runner) -> Runner:
        """eager, or its compiled variant, where the rest of the run is long enough and compiled steps are faster."""
        batch = self.batch_of(self.batching.batch_size)
        with not_silent("still timing a micro-batch", self.dist.print0):
            eager_s = min(self.pass_s(eager, batch), self.pass_s(eager, batch))
        share = SAVED_WITH_KERNELS if eager.variant.attention == "kernels" else SAVED
        run_s = eager_s * self.batching.micro_steps * self.steps
        if self.config.max_minutes:
            run_s = min(run_s, 60 * self.config.max_minutes)
        saved_s = share * run_s
        pays = self.dist.all(saved_s > COMPILE_S)
        times = f"takes about {clock(COMPILE_S)} and saves about {clock(saved_s)} of this run"
        self.dist.print0(f"compile=auto: {'' if pays else 'not '}compiling, which {times}")
        if not pays:
            return eager
        from deskgpt.compute.compiling import compiler_name

        compiled = self.compiled_variant(eager.variant)
        variants = [eager.variant, compiled]
        key = self.key("compile=auto", variants, compiler_name(self.device))
        known = self.remembered(key, variants)
        if known == eager.variant:
            return eager
        runner = self.try_variant(compiled)
        if known is not None:
            return runner or eager
        runners = {eager.variant: eager}
        if runner is not None:
            runners[compiled] = runner
        with not_silent("still timing", self.dist.print0):
            batch = self.batch_of(self.batching.batch_size)  # compiling may have shrunk it
            times_s = self.time_in_turns(runners, batch)
        return runners[self.clearly_fastest(key, variants, times_s)]

    # ---- one variant -------------------------------------------------------------------------------------

    def try_variant(self, variant: Variant) -> Runner | None:
        """The Runner of this variant, tried and checked; None, and a line that says why, where it does not work here.

        Where memory runs out, the micro-batch shrinks if auto_batch allows. Raises ValueError where it does not, and as
        leave_out.
        """
        trained_with = None if self.config.eval_only else self.make_optimizer
        shards = sharding.shards_of(self.config.dp_shard, self.dist.world)
        may_shrink = self.config.auto_batch is True or (self.config.auto_batch == "auto" and self.device.type == "cuda")
        while True:
            runner = None
            problem = ""
            outcome = OUT_OF_MEMORY
            ratio = memory_ratio(self.model.config, trained_with, self.device, shards, self.batching, variant)
            ratio = self.dist.max(ratio)
            if ratio <= 1:
                doing = "compiling" if variant.compiled else "trying the first micro-batch"
                with not_silent(f"still {doing}", self.dist.print0):
                    runner, outcome, problem = self.try_once(variant)
                outcome = int(self.dist.max(outcome))  # the worst decides for all ranks
            if outcome == FITS:
                return runner
            if outcome == LEFT_OUT:
                self.leave_out(variant, problem or "it fails, or differs, on another rank")
                return None
            self.batching = smaller_batch(self.device, may_shrink, self.batching, max(2.0, ratio))
            self.dist.print0(f"out of memory: going on with {self.batching.flags()}, which is the same training")
            hardware.release_memory(self.device)

    def try_once(self, variant: Variant) -> tuple[Runner | None, int, str]:
        """(the Runner, the outcome, what is wrong) after a pass of training, compared, and one of evaluation."""
        try:
            runner = Runner(self.model, variant, self.config.sync_each_batch)
            batch = self.batch_of(self.batching.batch_size)
            if not self.config.eval_only:
                # With room for what a step holds beside: AdamW's moments, earlier gradients, DDP's buckets.
                copies = 2 + (self.batching.micro_steps > 1) + (self.dist.distributed and not runner.sharded)
                room = [torch.empty_like(p) for p in runner.parameters * copies]
                runner.forward_backward(*batch, self.batching.micro_steps)
                del room
                self.model.zero_grad()
                runner.check_recompute(*batch)
                if not is_reference(variant, self.device):
                    self.dist.print0(f"checking {variant} against float32")
                    runner.check_pass(*batch, self.batching.micro_steps)
            with runner.evaluating():
                runner.loss(*batch)
            hardware.synchronize(self.device)
            return runner, FITS, ""
        except Mismatch as e:
            return None, LEFT_OUT, str(e)
        except Exception as e:
            if sharding.is_sharded(self.model):
                raise  # the others are in the pass: this ends them too
            if is_out_of_memory(e):
                return None, OUT_OF_MEMORY, ""
            if not variant.compiled or isinstance(e, ValueError):
                raise
            from deskgpt.compute.compiling import why_not_compiled

            return None, LEFT_OUT, why_not_compiled(e)
        finally:
            self.model.zero_grad()

    def leave_out(self, variant: Variant, problem: str) -> None:
        """Prints why a variant is left out. Raises ValueError if the user has asked for it, or it is the plainest."""
        if variant.compiled and self.config.compile is True:
            raise ValueError(f"compile=True: {problem}; or try --compile=auto, or --compile=False")
        if variant.compiled:
            self.dist.print0(f"compile=auto: NOT compiled, so steps are slower and may take more memory: {problem}")
        elif variant.dtype == "float32":  # TF32 on CUDA, float32 on MPS
            raise ValueError(f"{problem}; this GPU or its driver computes something else, try --device=cpu")
        elif self.config.dtype != "auto":
            raise ValueError(f"dtype={variant.dtype}: {problem}; try --dtype=auto, or --dtype=float32")
        else:
            self.dist.print0(f"{problem}; going on in float32")


def dtype_of_shards(wanted: str, earlier: EarlierVariant, dist: DistContext) -> str:
    """The dtype in which ranks that share weights compute. wanted: the setting.

    It is not float16, since no loss scale follows their gradients.
    """
    dtype = wanted if wanted != "auto" else earlier.dtype or peaks.fast_dtype(dist.device)
    return "bfloat16" if dist.all(dtype == "bfloat16") else "float32"
