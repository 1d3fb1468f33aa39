"""How a model runs on this machine: the fastest form, found by timing, and the proof that it computes what it should.

On a CPU the dtype of the matmuls, the kind of attention and whether to compile are chosen by timing the run's own model
on its own first micro-batch. What is compiled or in low precision trains only after its loss and every parameter's
gradient were compared with those of the plain form, float32 and not compiled. Both are kept in forms.json (see
remembered.py), so that a later start of the same model on the same machine, compiler and torch need not repeat them.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deskgpt import compiling, estimate, hardware, peak_flops, remembered
from deskgpt.errors import is_out_of_memory
from deskgpt.runlog import clock
from deskgpt.runner import Form, Runner, all_max
from model import GPT, LONGEST_EXPLICIT

if TYPE_CHECKING:
    from train import TrainConfig

Batch = tuple[Tensor, Tensor]  # inputs and targets (B, T) int64

PLAIN = Form()

ROOT = Path(__file__).resolve().parents[1]
CODE = ("model.py", "deskgpt/runner.py", "deskgpt/forms.py")  # what a graph is made from

# How far the loss may be from plain float32's, and each gradient: |difference| / |gradient|. The largest
# measured over the model's choices and one to twelve layers (LOG.md, 2026-11-22) were 0.038 and 2e-4 in bfloat16 and
# 2.3e-6 and 2e-7 in float32; fifteen real and emulated processors stay below these
# (bench/results/2026-11-22-check-machines.md). A kernel that loses one of 64 elements is off by 0.12.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, "tf32": 0.1}
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 1e-2, "tf32": 1e-2}
# The gradient of a key's bias is cancelled by the softmax: 1e-8 of the one of the whole bias is left of it in float32,
# where the smallest real one, of queries at the start, is 5e-3.
CANCELLED = 1e-5
# With dropout the two forms draw other masks: then only losses and norms compare, by these factors.
DROPOUT_LOSS, DROPOUT_NORM = 1.2, 3.0

PROBE_S = 0.3  # about what a timed pass takes: of so many sequences of the micro-batch
LONG_S = 3.0  # a pass of one sequence that takes longer is timed once
ROUNDS = 3  # of several forms that take turns
MOST_ROUNDS, TURNS_S = 50, 2.0  # of two that are compared closely, and about the seconds
CLEARLY_FASTER = 0.97  # of the time of a form named before it, which is the plainer one
HOPELESS = 1.5  # a form that is this much slower in its first timed pass gets no other

# A first guess of what compiling takes and of the share of a step that it saves: round figures of 2 to 6 layers on two
# cores with AMX (LOG.md, 2026-11-22). Once a machine has compiled, its own time replaces them.
COLD_S, COLD_S_PER_LAYER = 15.0, 3.0
WARM_S, WARM_S_PER_LAYER = 2.0, 1.0
SAVED = 0.25
# The other kind of attention is compiled as well where so much of the rest of a run is longer than compiling.
WORTH_TRYING = 0.05

SILENCE_S = 10.0

RIGHT = "right"  # what is remembered of a form that passed the check; of another, what was wrong


class Wrong(ValueError):
    """A form whose loss or gradients are not those of plain float32."""


def settle(
    model: GPT,
    c: TrainConfig,
    earlier: dict[str, Any],
    batch_of: Callable[[int], Batch],
    world: int,
    distributed: bool,
    seconds: float | None,
    steps: int,
    say: Callable[[str], None],
) -> tuple[Runner, TrainConfig]:
    """The Runner that trains as c says in the fastest right form, and c with a micro-batch that fits.

    earlier: what `earlier_form` read of a resumed run's form. batch_of: the first micro-batch of so many sequences.
    steps: of the run; seconds: how long it may last, None: as long as they take. Leaves weights as they were, and no
    gradients. Raises ValueError where no form that c admits is right, or memory runs out.
    """
    trials = Trials(model, c, batch_of, world, distributed, say)
    device = trials.device
    measured = device.type == "cpu" and not c.eval_only
    dtype: str | None = c.dtype
    if dtype == "auto":
        dtype = earlier.get("dtype")
    if dtype is None and not measured:
        dtype = peak_flops.fast_dtype(device)
    explicit = earlier.get("explicit")
    if explicit is None and (not measured or model.config.dropout or c.block_size > LONGEST_EXPLICIT):
        explicit = False
    if dtype is None or explicit is None:
        form = trials.fastest_plain(dtype, explicit)
    else:
        form = Form(dtype, explicit=explicit)

    compiles: bool | None = device.type == "cuda" if c.compile == "auto" else c.compile
    if c.compile == "auto" and measured:
        compiles = earlier.get("compiled")
    runner = trials.attempt(replace(form, compiled=True)) if compiles else None
    if runner is None:
        runner = trials.attempt(form)
    if runner is None:
        runner = trials.attempt(PLAIN)
    assert runner is not None  # the plain form is right by definition
    if compiles is None and steps > 0:
        runner = trials.compiled_where_it_pays(runner, seconds, trials.micro_steps() * steps)
    return runner, trials.c


def saved_form(runner: Runner) -> dict[str, Any]:
    """A form as checkpoints hold it."""
    return asdict(runner.form) | {"device": runner.device.type}


def earlier_form(saved: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The dtype, compiled and explicit of the run that a checkpoint is of, as far as it says them for this device.

    What is fast on another kind of device says nothing of this one. Older checkpoints know `compiled` alone.
    """
    form = saved.get("form", {"compiled": saved.get("compiled"), "device": device.type})
    if not isinstance(form, dict) or form.get("device") != device.type:
        return {}
    known = {name: form.get(name) for name in ("compiled", "explicit") if isinstance(form.get(name), bool)}
    return known | ({"dtype": form["dtype"]} if form.get("dtype") in hardware.DTYPES else {})


class Trials:
    """Forms of one model, tried with its first micro-batch. All ranks go through the same ones."""

    def __init__(
        self,
        model: GPT,
        c: TrainConfig,
        batch_of: Callable[[int], Batch],
        world: int,
        distributed: bool,
        say: Callable[[str], None],
    ) -> None:
        self.model, self.c, self.batch_of, self.world, self.distributed = model, c, batch_of, world, distributed
        self.say = say
        self.device = model.lm_head.weight.device
        self.began = time.time()

    def micro_steps(self) -> int:
        """Micro-batches of an optimizer step, on this rank."""
        return self.c.gradient_accumulation_steps // self.world

    def all(self, yes: bool) -> bool:
        """Whether it is so on all ranks."""
        return all_max(float(not yes), self.device) == 0

    # ---- the fastest that is not compiled ----------------------------------------------------------------

    def fastest_plain(self, dtype: str | None, explicit: bool | None) -> Form:
        """The fastest form that is not compiled, of those with this dtype and attention; None: either."""
        dtypes = [dtype] if dtype else ["float32", "bfloat16"]
        forms = [Form(d, explicit=e) for d in dtypes for e in ([False, True] if explicit is None else [explicit])]
        key = f"{machine(self.device)}: {self.digest(self.batch_of(1))}: times"
        known = remembered.read("forms").get(key)
        from_file = isinstance(known, dict) and all(isinstance(known.get(str(f)), float) for f in forms)
        if self.all(from_file):
            times = {form: known[str(form)] for form in forms}  # type: ignore[index]
        else:
            self.say(f"comparing {' and '.join(dtypes)} on this machine")
            with not_silent("still comparing", self.say):
                times = self.times(forms)
            remembered.keep("forms", key, {str(f): s for f, s in times.items()})
        best = forms[0]
        for form in forms:
            if times[form] < CLEARLY_FASTER * times[best]:
                best = form
        best = forms[int(all_max(float(forms.index(best)), self.device))]  # ranks may have measured other times
        said = ", ".join(f"{in_words(f, forms)} {s * 1e3:.3g} ms" for f, s in times.items())
        when = f", measured before: {remembered.path_of('forms')}" if from_file else ""
        self.say(f"fastest here: {in_words(best, forms)} (a forward and backward pass takes {said}{when})")
        return best

    def times(self, forms: list[Form]) -> dict[Form, float]:
        """Seconds of a forward and backward pass of a part of the micro-batch: the best of a few, taking turns."""
        x, y = self.batch_of(1)
        first = Runner(self.model, PLAIN)
        self.seconds(first, (x, y))
        one_s = self.seconds(first, (x, y))
        rows = max(1, min(self.c.batch_size, int(PROBE_S / one_s)))
        try:
            return self.times_of(forms, rows, one_s > LONG_S)
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e) or rows == 1:
                raise
        return self.times_of(forms, 1, one_s > LONG_S)  # what fits is found later

    def times_of(self, forms: list[Form], rows: int, is_long: bool) -> dict[Form, float]:
        """Seconds of a pass of so many sequences; is_long: one each has to do."""
        batch = self.batch_of(rows)
        runners = {form: Runner(self.model, form) for form in forms}
        for runner in () if is_long else runners.values():
            self.seconds(runner, batch)  # the first pass allocates and prepares kernels
        best = {form: self.seconds(runner, batch) for form, runner in runners.items()}
        alive = [form for form in forms if best[form] <= HOPELESS * min(best.values())]
        for _ in range(0 if is_long or not alive[1:] else ROUNDS - 1):
            for form in alive:
                best[form] = min(best[form], self.seconds(runners[form], batch))
        return best

    def seconds(self, runner: Runner, batch: Batch) -> float:
        """How long a forward and backward pass takes; leaves no gradients."""
        runner.use()
        t0 = time.perf_counter()
        runner.backward(*batch, self.micro_steps())
        seconds = time.perf_counter() - t0
        drop_gradients(runner)
        return seconds

    # ---- one form ----------------------------------------------------------------------------------------

    def attempt(self, form: Form) -> Runner | None:
        """The Runner of this form, tried and checked; None, and a line that says why, where it does not work here.

        Where memory runs out, the micro-batch shrinks if auto_batch allows. Raises ValueError where it does not, and
        where the user has asked for a form that computes something else.
        """
        while True:
            batch = self.batch_of(self.c.batch_size)
            with not_silent(f"still {'compiling' if form.compiled else 'trying the first micro-batch'}", self.say):
                runner, outcome, problem = self.try_out(form, batch)
            # The worst of all ranks decides for all.
            outcome = OUTCOMES[int(all_max(float(OUTCOMES.index(outcome)), self.device))]
            if outcome == "fits":
                return runner
            if outcome == "wrong":
                self.refuse(form, problem or "another rank's differ")
                return None
            if outcome == "does not compile":
                reason = problem or "on another rank"
                self.say(f"compile=True does not work here ({reason}); training without it, slower")
                return None
            if outcome == "out of memory":
                self.halve(form.dtype)
            # "again": a library that a killed run had left unfinished is deleted

    def try_out(self, form: Form, batch: Batch) -> tuple[Runner | None, str, str]:
        """(the Runner, one of OUTCOMES, what is wrong) of a training pass, or of an evaluation alone for eval_only.

        A training pass takes room for AdamW's moments and, as a step will, for earlier micro-batches' gradients and
        DDP's buckets. Leaves no gradients.
        """
        copies = 2 + (self.micro_steps() > 1) + self.distributed
        key = self.check_key(form, batch)
        known = remembered.read("forms").get(key)
        checked = is_plain(form, self.device) or self.all(known == RIGHT)
        if isinstance(known, str) and known != RIGHT:
            return None, "wrong", f"{known} (found before, in {remembered.path_of('forms')})"
        try:
            runner = Runner(self.model, form, self.distributed)
            if not self.c.eval_only:
                with nothing_is_zero(self.model):
                    room = [torch.empty_like(p) for p in runner.parameters * copies]
                    start = runner.scaler.state_dict()
                    if start:
                        runner.scaler.load_state_dict(start | {"scale": 1024.0})  # the usual one may overflow at first
                    loss = runner.backward(*batch, self.micro_steps()) * self.micro_steps()
                    del room
                    if not checked:
                        self.say(f"comparing loss and gradients in {form} with plain float32")
                        check(runner, batch, loss, self.micro_steps())
                        remembered.keep("forms", key, RIGHT)
                if start:
                    runner.scaler.load_state_dict(start)
            drop_gradients(runner)
            runner.module.eval()
            with torch.no_grad(), runner.amp:
                runner.module(*batch)
            runner.module.train()
            hardware.synchronize(self.device)
            return runner, "fits", ""
        except Wrong as e:
            remembered.keep("forms", key, str(e))
            return None, "wrong", str(e)
        except Exception as e:
            if is_out_of_memory(e):
                return None, "out of memory", ""
            if not form.compiled:
                raise
            return None, *(
                ("again", "") if drop_unfinished(e, self.began) else ("does not compile", compiling.why_not_compiled(e))
            )
        finally:
            for p in self.model.parameters():
                p.grad = None

    def refuse(self, form: Form, problem: str) -> None:
        """Says that a form computes something else; raises ValueError where the user has asked for it."""
        if form.compiled and self.c.compile is True:
            raise ValueError(f"compile=True: {problem}; leave --compile out, or try --compile=False")
        if form == PLAIN:  # TF32, on CUDA: there is nothing plainer to go on with
            raise ValueError(f"{problem}; this GPU or its driver computes something else, try --device=cpu")
        if not form.compiled and self.c.dtype != "auto":
            raise ValueError(f"dtype={form.dtype}: {problem}; leave --dtype out, or try --dtype=float32")
        self.say(f"{problem}; going on {'without compiling' if form.compiled else 'in float32'}")

    def halve(self, dtype: str) -> None:
        """A smaller micro-batch of the same training. Raises ValueError where there is none or auto_batch is off."""
        c = self.c
        eval_iters = 0 if c.eval_tokens else c.eval_iters
        same: dict[str, Any] = estimate.smaller_batch(
            c.batch_size, c.gradient_accumulation_steps, eval_iters, self.model.config, dtype, self.device, c.auto_batch
        )
        self.c = replace(c, **same)
        self.say(f"out of memory: going on with {same}, which is the same training")
        hardware.release_memory(self.device)

    # ---- compiling on a CPU ------------------------------------------------------------------------------

    def compiled_where_it_pays(self, plain: Runner, seconds: float | None, micro_batches: int) -> Runner:
        """The fastest form with plain's dtype, where the rest of the run is long enough to win back compiling it.

        micro_batches: how many are left, at most; seconds: how long the run may last, None: as long as these take.
        """
        batch = self.batch_of(self.c.batch_size)
        with not_silent("still timing a micro-batch", self.say):
            plain_s = min(self.seconds(plain, batch) for _ in range(2))
        rest_s = plain_s * micro_batches
        if seconds is not None:
            rest_s = min(rest_s, seconds)
        if not self.all(rest_s * SAVED > self.warm_s()):
            # Not even with all of it in the cache: no need to ask the compiler its name and look.
            said = f"takes at least about {clock(self.warm_s())} and saves about {clock(rest_s * SAVED)} of this run"
            self.say(f"compile=auto: not compiling, which {said}")
            return plain
        forms = [replace(plain.form, compiled=True)]
        if self.c.block_size <= LONGEST_EXPLICIT and not self.model.config.dropout:
            # The likelier one first, since a short run tries no other: compiled, explicit attention was the faster in
            # bfloat16 with AMX (LOG.md, 2026-11-21), flash attention in float32 without (2026-11-22).
            first = plain.form.dtype == "bfloat16"
            forms = [replace(plain.form, compiled=True, explicit=explicit) for explicit in (first, not first)]
        key = self.check_key(forms[0], batch) + ", fastest"
        known = remembered.read("forms").get(key)
        compared = self.all(known in [*map(str, forms), str(plain.form)])  # in an earlier run
        if compared:
            forms = [form for form in forms if str(form) == known]
        if not forms:
            self.say(f"compile=auto: not compiling, which was no faster before: {remembered.path_of('forms')}")
            return plain
        pays, why = self.compiling_pays(forms[0], batch, rest_s)
        self.say(f"compile=auto: {why}")
        if not self.all(pays):
            return plain
        best, best_share = plain, 1.0  # of plain's time
        for form in forms:
            if form is not forms[0] and not self.all(rest_s * WORTH_TRYING > self.cold_s()):
                return best  # not all were tried: nothing to remember
            t0, cold = time.perf_counter(), not self.marker(form, batch).exists()
            runner = self.attempt(form)
            if runner is None:
                return best
            if compared:
                return runner
            took_s = time.perf_counter() - t0
            batch = self.batch_of(self.c.batch_size)
            with not_silent("still timing micro-batches, compiled and not", self.say):
                best_s, form_s = self.in_turns(best, runner, batch)
            # Ratios, since the machine's speed is another in another hour.
            share = best_share * form_s / best_s
            self.mark(form, batch, share, took_s if cold else None)
            self.say(f"a micro-batch takes {form_s * 1e3:.3g} ms in {form}, {best_s * 1e3:.3g} ms in {best.form}")
            if self.all(form_s < best_s):
                best, best_share = runner, share
        best.use()
        remembered.keep("forms", key, str(best.form))
        return best

    def in_turns(self, a: Runner, b: Runner, batch: Batch) -> tuple[float, float]:
        """Median seconds of a pass of each, taking turns; the more often the shorter a pass."""
        times_a = [self.seconds(a, batch)]
        times_b = [self.seconds(b, batch)]
        rounds = max(2, min(MOST_ROUNDS, int(TURNS_S / (times_a[0] + times_b[0]))))
        for _ in range(rounds - 1):
            times_a.append(self.seconds(a, batch))
            times_b.append(self.seconds(b, batch))
        return statistics.median(times_a), statistics.median(times_b)

    def compiling_pays(self, form: Form, batch: Batch, rest_s: float) -> tuple[bool, str]:
        """Whether compiling pays for a run that would take rest_s seconds without it, and why."""
        known = remembered.read("forms").get(self.check_key(form, batch) + ", share of the time")
        saved_s = rest_s * (1 - known if isinstance(known, float) else SAVED)
        warm = self.marker(form, batch).exists()
        cost_s = self.warm_s() if warm else self.cold_s()
        pays = saved_s > cost_s
        return pays, (
            f"{'compiling' if pays else 'not compiling'}, which takes about {clock(cost_s)} "
            f"({'' if warm else 'not '}in the cache) and saves about {clock(max(0.0, saved_s))} of this run"
        )

    def warm_s(self) -> float:
        """Seconds that compiling the model takes with all of it in the cache."""
        return WARM_S + WARM_S_PER_LAYER * self.model.config.n_layer

    def cold_s(self) -> float:
        """Seconds that compiling the model takes with an empty cache, going by what it took on this machine before."""
        factor = remembered.read("forms").get(f"{machine(self.device)}: compiling")
        guess = COLD_S + COLD_S_PER_LAYER * self.model.config.n_layer
        return guess * factor if isinstance(factor, float) and 0 < factor < math.inf else guess

    # ---- what is remembered ------------------------------------------------------------------------------

    def digest(self, batch: Batch, *more: Any) -> str:
        """Names what a graph is made from: the model, the shape of a micro-batch, torch and our own code."""
        code = b"".join((ROOT / name).read_bytes() for name in CODE)
        what = (self.model.config, tuple(batch[0].shape), self.distributed, torch.__version__, *more)
        return hashlib.sha256(repr(what).encode() + code).hexdigest()[:16]

    def check_key(self, form: Form, batch: Batch) -> str:
        compiler = f", {compiling.compiler_name(self.device)}" if form.compiled else ""
        return f"{machine(self.device)}{compiler}: {self.digest(batch, form, self.micro_steps() > 1)}"

    def marker(self, form: Form, batch: Batch) -> Path:
        """A file in inductor's cache that says: this form of this model has been compiled."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return Path(cache_dir()) / f"deskgpt-{self.digest(batch, form)}"

    def mark(self, form: Form, batch: Batch, share: float, cold_s: float | None) -> None:
        """Remembers a compiled form's share of the plain form's time and, where the cache was empty, what it took."""
        remembered.keep("forms", self.check_key(form, batch) + ", share of the time", share)
        if cold_s is not None:
            guess = COLD_S + COLD_S_PER_LAYER * self.model.config.n_layer
            remembered.keep("forms", f"{machine(self.device)}: compiling", cold_s / guess)
        with suppress(OSError):
            self.marker(form, batch).touch()


# From the best to the one that decides for all ranks.
OUTCOMES = ("fits", "wrong", "does not compile", "again", "out of memory")


# ---- the check -----------------------------------------------------------------------------------------------


def check(runner: Runner, batch: Batch, loss: Tensor, micro_steps: int) -> None:
    """Raises Wrong where the loss or the gradients that a pass of runner has left are not those of plain float32.

    Where float32 does not fit the device, one sequence is compared: the others' targets are left out. Raises ValueError
    where plain float32 itself is not finite. Leaves gradients.
    """
    model, form = runner.model, runner.form
    names = [name for name, _ in model.named_parameters()]
    found_loss, found = loss.item(), taken_gradients(runner, micro_steps)
    expected = plain_float32(model, batch)
    if expected is None:
        x, y = batch
        only_first = torch.full_like(y, -1)
        only_first[0] = y[0]
        del found
        runner.use()
        found_loss = (runner.backward(x, only_first, micro_steps) * micro_steps).item()
        found = taken_gradients(runner, micro_steps)
        expected = plain_float32(model, (x[:1], y[:1]))
    runner.use()
    if expected is None:
        raise MemoryError  # not even one sequence
    expected_loss, gradients = expected
    if not math.isfinite(expected_loss) or not all(g.isfinite().all() for g in gradients):
        raise ValueError(
            f"plain float32 gives a loss of {expected_loss} or gradients that are not finite on the first micro-batch: "
            "not the form but the weights that the run starts from, or the data, are at fault; take another checkpoint"
        )
    precision = "tf32" if form.dtype == "float32" and runner.device.type == "cuda" else form.dtype
    compare(form, precision, names, found_loss, found, expected_loss, gradients, bool(model.config.dropout))


def compare(
    form: Form,
    precision: str,
    names: list[str],
    found_loss: float,
    found: list[Tensor],
    expected_loss: float,
    expected: list[Tensor],
    dropout: bool,
) -> None:
    """Raises Wrong where a loss or a gradient is further from the expected one than its precision explains."""
    off = abs(found_loss - expected_loss) / max(abs(expected_loss), 1e-30)
    limit = DROPOUT_LOSS - 1 if dropout else LOSS_TOLERANCE[precision]
    if not off <= limit:  # nan is not
        raise Wrong(f"the loss in {form} is {found_loss:.6g}, in plain float32 {expected_loss:.6g}")
    errors = norm_ratios(names, found, expected) if dropout else gradient_errors(names, found, expected)
    worst = max(errors, key=lambda name: errors[name])
    limit = DROPOUT_NORM if dropout else TOLERANCE[precision]
    if not errors[worst] <= limit:
        how = "norms differ by a factor of" if dropout else "differ by"
        raise Wrong(
            f"gradients in {form} are not those of plain float32: those of {worst} {how} "
            f"{errors[worst]:.3g}, at most {limit:g} is rounding"
        )


def gradient_errors(names: list[str], found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """|found - expected| / |expected| of each gradient, by name; of q, k and v apart; infinite for NaN.

    Each by itself, since the gradients of queries and keys are far smaller than those of values at the start. What is
    nothing but rounding, below CANCELLED of what it is a part of, is measured by that.
    """
    total = math.sqrt(sum(g.square().sum().item() for g in expected))
    errors = {}
    for name, got, right in zip(names, found, expected, strict=True):
        parts = ("q", "k", "v") if ".c_attn." in name else ("",)
        for part, a, b in zip(parts, got.chunk(len(parts)), right.chunk(len(parts)), strict=True):
            whole = right.norm().item() if part else total
            size = b.norm().item()
            error = (a - b).norm().item() / (size if size > CANCELLED * whole else whole)
            errors[f"{name} ({part})" if part else name] = error if math.isfinite(error) else math.inf
    return errors


def norm_ratios(names: list[str], found: list[Tensor], expected: list[Tensor]) -> dict[str, float]:
    """The larger by the smaller norm of each gradient, by name; infinite where one is not finite."""
    least = CANCELLED * math.sqrt(sum(g.square().sum().item() for g in expected))
    ratios = {}
    for name, got, right in zip(names, found, expected, strict=True):
        a = max(got.norm().item(), least)
        b = max(right.norm().item(), least)
        ratios[name] = max(a / b, b / a) if got.isfinite().all() else math.inf
    return ratios


def plain_float32(model: GPT, batch: Batch) -> tuple[float, list[Tensor]] | None:
    """Loss and gradients of the model as it is, in full float32; None where memory runs out. Leaves no gradients."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # no TF32
    runner = Runner(model, PLAIN)
    try:
        loss = runner.backward(*batch)
        return loss.item(), taken_gradients(runner, 1)
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
        return None
    finally:
        torch.set_float32_matmul_precision(precision)
        drop_gradients(runner)


def taken_gradients(runner: Runner, micro_steps: int) -> list[Tensor]:
    """The gradients of a whole loss that a pass has left, without the scale of float16; they are gone afterwards."""
    factor = micro_steps / (runner.scaler.get_scale() if runner.scaler.is_enabled() else 1.0)
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.float() * factor for p in runner.parameters]
    drop_gradients(runner)
    return grads


def is_plain(form: Form, device: torch.device) -> bool:
    """Whether a form is the one that others are compared with; on CUDA float32 is TF32."""
    return form == PLAIN and device.type != "cuda"


@contextmanager
def nothing_is_zero(model: GPT) -> Iterator[None]:
    """Matrices of zeros hold small random numbers for a while: they would hide the gradients of all before them."""
    draw = torch.Generator().manual_seed(0)
    zeros = [p for p in model.parameters() if p.dim() == 2 and not p.detach().any()]
    with torch.no_grad():
        for p in zeros:
            p.copy_(torch.randn(p.shape, generator=draw) * 0.02)
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()


# ---- helpers -------------------------------------------------------------------------------------------------


def drop_gradients(runner: Runner) -> None:
    for p in runner.parameters:
        p.grad = None


def machine(device: torch.device) -> str:
    return f"{hardware.device_name(device)}, torch {torch.__version__}"


def in_words(form: Form, among: list[Form]) -> str:
    """A form by what tells it from the others."""
    attention = "explicit attention" if form.explicit else "flash attention"
    if len({f.explicit for f in among}) == 1:
        return form.dtype
    if len({f.dtype for f in among}) == 1:
        return attention
    return f"{form.dtype} with {attention}"


@contextmanager
def not_silent(what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Says `what` every ten seconds until the block ends."""
    done, t0 = threading.Event(), time.perf_counter()

    def tell() -> None:
        while not done.wait(SILENCE_S):
            say(f"{what} ({clock(time.perf_counter() - t0)})")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def drop_unfinished(error: Exception, since: float) -> bool:
    """Whether compiling failed on a library that a killed run left unfinished in inductor's cache; deletes that.

    since: the time (time.time) when this run began to compile: what is newer is not deleted.
    """
    dropped = False
    for name in re.findall(r"(/\S+\.so): file too short", str(error)):
        with suppress(OSError):
            if os.stat(name).st_mtime < since:
                os.unlink(name)
                dropped = True
    return dropped
