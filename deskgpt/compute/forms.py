"""How a model runs on this machine: the fastest right form, found by timing, and the micro-batch that fits.

On a CPU the dtype of the matmuls, the kind of attention and whether to compile are chosen by timing the run's own model
on its own first micro-batch. What is compiled or in low precision trains only after checks.py has compared it with
plain float32. Both are remembered in forms.json (see remembered.py), so that a later start of the same model on the
same machine, compiler and torch need not repeat them.
"""

from __future__ import annotations

import gc
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from deskgpt.compute import compiling, sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.checks import Batch, check, nothing_is_zero, plain, weights_are_finite
from deskgpt.compute.ranks import Ranks
from deskgpt.compute.runner import Form, Runner
from deskgpt.faster import held, kernels
from deskgpt.faster.held import RIGHT, Wrong, machine
from deskgpt.machine import hardware, peak_flops, remembered
from deskgpt.machine.errors import is_out_of_memory
from deskgpt.machine.terminal import not_silent
from deskgpt.machine.words import clock
from model import GPT

# ---- timing ----
PROBE_S = 0.3  # about what a timed pass takes: as many sequences of the micro-batch as fit into it
LONG_S = 3.0  # a pass of one sequence that takes longer is timed once
ROUNDS = 3  # of several forms that take turns
MOST_ROUNDS = 50  # of two forms that are compared closely ...
TURNS_S = 2.0  # ... and about the seconds that this may take
CLEARLY_FASTER = 0.97  # of the time of a form named before it, which is the plainer one, or of half the micro-batch
HOPELESS = 1.5  # a form that is this much slower in its first timed pass gets no other

# The kinds of devices on which auto_batch looks for a faster micro-batch. On others bench/sweep.py does.
BATCH_IS_SEARCHED_ON = ("cuda",)

# ---- compiling ----
# A first guess of what compiling takes and of the share of a step that it saves: round figures of 2 to 6 layers on two
# cores with AMX (LOG.md, 2026-11-22). Once a machine has compiled, its own time replaces them.
COLD_S = 15.0
COLD_S_PER_LAYER = 3.0
WARM_S = 2.0
WARM_S_PER_LAYER = 1.0
SAVED = 0.25
# The other kind of attention is compiled too if this share of the rest of a run is longer than compiling.
WORTH_TRYING = 0.05

LONGEST_COMPARED = 2048  # tokens on which kernels are compared; where memory runs out, SHORT
SHORT = 128

# What can become of a form, from the best to the one that decides for all ranks.
OUTCOMES = ("fits", "wrong", "does not compile", "again", "out of memory")


@dataclass(frozen=True)
class EarlierForm:
    """The form of the run that a checkpoint is of, as far as it is known for this device."""

    dtype: str | None = None
    compiled: bool | None = None
    explicit: bool | None = None

    @classmethod
    def of(cls, saved: dict[str, Any] | None, device: torch.device) -> EarlierForm:
        """From a checkpoint's `form`. What is fast on another kind of device says nothing about this one."""
        if not isinstance(saved, dict) or saved.get("device", device.type) != device.type:
            return cls()
        dtype = saved.get("dtype")
        compiled = saved.get("compiled")
        explicit = saved.get("explicit")
        return cls(
            dtype if isinstance(dtype, str) and dtype in hardware.DTYPES else None,
            compiled if isinstance(compiled, bool) else None,
            explicit if isinstance(explicit, bool) else None,
        )


def saved_form(runner: Runner) -> dict[str, Any]:
    """A form for a checkpoint."""
    return runner.form.facts() | {"device": runner.device.type}


@dataclass(frozen=True)
class Wanted:
    """What a run wants of its form: settings of train.py, the form before a resume, and how long it will be."""

    dtype: str = "auto"
    compile: str | bool = "auto"
    auto_batch: bool = False
    activation_checkpoint: str = "none"
    dp_shard: int = 1
    reshard_after_forward: bool = True
    earlier: EarlierForm = EarlierForm()
    trains: bool = True  # False: evaluates only
    steps: int = 0
    seconds: float | None = None  # None: no limit

    @classmethod
    def of(cls, settings: Mapping[str, Any], earlier: EarlierForm, steps: int, seconds: float | None) -> Wanted:
        """From settings of train.py. steps, seconds: how long the run may last."""
        own = {name: settings[name] for name in cls.__dataclass_fields__ if name in settings}
        return cls(**own, earlier=earlier, trains=not settings["eval_only"], steps=steps, seconds=seconds)

    def compiled(self, device: torch.device) -> bool | None:
        """Whether to compile; None where that depends on whether it pays."""
        if isinstance(self.compile, bool):
            return self.compile
        if device.type == "cpu" and self.trains:
            return self.earlier.compiled
        return device.type == "cuda"


def fastest_right_form(
    model: GPT,
    batching: Batching,
    wanted: Wanted,
    ranks: Ranks,
    batch_of: Callable[[int], Batch],
    smaller: Callable[[Batching, Form], Batching],
) -> tuple[Runner, Batching]:
    """The Runner that trains as wanted in the fastest right form, and the same training in micro-batches that fit.

    batch_of: the first micro-batch of a number of sequences. smaller: the batching to go on with where memory runs out;
    it raises ValueError where there is none. Leaves the model as it was, and no gradients. Raises ValueError where no
    form that is wanted is right, the user wants it compiled and that fails, or memory runs out.
    """
    search = FormSearch(model, batching, wanted, ranks, batch_of, smaller)
    with held.keeping_buffers(model):
        runner = search.result()
    return runner, search.batching


class FormSearch:
    """Tries forms of one model with its first micro-batch. All ranks go through the same ones."""

    def __init__(
        self,
        model: GPT,
        batching: Batching,
        wanted: Wanted,
        ranks: Ranks,
        batch_of: Callable[[int], Batch],
        smaller: Callable[[Batching, Form], Batching],
    ) -> None:
        self.model = model
        self.batching = batching  # becomes that of micro-batches which fit
        self.wanted = wanted
        self.ranks = ranks
        self.say = ranks.say
        self.batch_of = batch_of
        self.smaller = smaller
        self.device = next(model.parameters()).device
        self.sharded = sharding.is_sharded(model)
        self.mesh = sharding.make_mesh(self.device.type, wanted.dp_shard, ranks.world, True) if self.sharded else None
        self.plain = Form(checkpoint=wanted.activation_checkpoint)  # gets the kernels that are right
        self.began = time.time()

    def result(self) -> Runner:
        """As fastest_right_form."""
        wanted = self.wanted
        earlier = wanted.earlier
        self.plain = replace(self.plain, as_written=self.wrong_kernels(compiled=False))
        # Ranks that share weights go through the same passes, while their clocks differ: none of these forms is timed.
        timed = not self.sharded and wanted.trains
        measured = timed and self.device.type == "cpu"

        dtype = wanted.dtype if wanted.dtype != "auto" else earlier.dtype
        if dtype is None and not measured:
            dtype = peak_flops.fast_dtype(self.device)
        if self.sharded:  # whose gradients no loss scale of float16 follows
            dtype = "bfloat16" if self.ranks.all(dtype == "bfloat16") else "float32"
        explicit = earlier.explicit
        if explicit is None and not (measured and self.may_be_explicit()):
            explicit = False
        if dtype is None or explicit is None:
            form = self.fastest_plain(dtype, explicit)
        else:
            form = replace(self.plain, dtype=dtype, explicit=explicit)

        is_resumed = earlier.dtype is not None  # on this kind of device: it keeps its micro-batch
        if wanted.auto_batch and timed and not is_resumed and self.device.type in BATCH_IS_SEARCHED_ON:
            self.search_batch(form)

        compiled = wanted.compiled(self.device)
        runner = self.attempt(self.compiled(form)) if compiled else None
        if runner is None:
            runner = self.attempt(form)
        if runner is None:
            runner = self.attempt(self.plain)
        assert runner is not None  # the plain form is right by definition
        if compiled is None and timed and wanted.steps > 0:
            runner = self.compiled_where_it_pays(runner, wanted.seconds, self.batching.micro_steps * wanted.steps)
        return runner

    def may_be_explicit(self) -> bool:
        T = self.batching.block_size
        is_right = "attention" not in self.plain.as_written
        return is_right and kernels.may_be_explicit(self.device.type, T, self.model.config.dropout)

    # ---- kernels -----------------------------------------------------------------------------------------

    def wrong_kernels(self, compiled: bool) -> tuple[str, ...]:
        """The functions of model.py whose faster forms compute something else here; says so of each.

        compiled: of the forms that only compiled models have.
        """
        if not self.ranks.all(weights_are_finite(self.model)):
            return ()  # what this run finds must not be remembered; health.py will say why it ends
        key = f"{machine(self.device)}: {held.digest(self.model.config, compiled)}, kernels"
        known = remembered.read(held.FILE).get(key)
        if not self.ranks.all(isinstance(known, dict)):
            with not_silent("still comparing faster forms with model.py", self.say):
                known = self.compare_kernels(compiled)
            remembered.keep(held.FILE, key, known)
        assert isinstance(known, dict)
        problems: dict[str, str] = {}
        for of_rank in self.ranks.gather(known):
            problems |= of_rank
        for name in sorted(problems):
            self.say(f"{problems[name]}: it is computed as model.py says, which may be slower")
        return tuple(sorted(problems))

    def compare_kernels(self, compiled: bool) -> dict[str, str]:
        """By name, what is wrong with a form that stands in for a function of model.py."""
        idx, targets = self.batch_of(1)
        for longest in (LONGEST_COMPARED, SHORT):
            try:
                return held.all_wrong_kernels(self.model, compiled, idx[:, :longest], targets[:, :longest])
            except (RuntimeError, MemoryError) as e:
                if not is_out_of_memory(e) or longest == SHORT or self.sharded:
                    raise
            finally:
                if self.sharded:
                    sharding.drop_gathered(self.model)
        raise AssertionError

    def compiled(self, form: Form) -> Form:
        """The form, compiled, with the kernels that are right then."""
        as_written = (*self.plain.as_written, *self.wrong_kernels(compiled=True))
        return replace(form, compiled=True, as_written=as_written)

    # ---- the fastest form that is not compiled -----------------------------------------------------------

    def fastest_plain(self, dtype: str | None, explicit: bool | None) -> Form:
        """The fastest form that is not compiled, among those with this dtype and attention; None: either."""
        dtypes = [dtype] if dtype else ["float32", "bfloat16"]
        kinds = [False, True] if explicit is None else [explicit]
        forms = [replace(self.plain, dtype=d, explicit=e) for d in dtypes for e in kinds]
        key = f"{machine(self.device)}: {self.digest(self.batch_of(1), self.plain)}: times"
        known = remembered.read("forms").get(key)
        is_known = isinstance(known, dict) and all(isinstance(known.get(str(f)), float) for f in forms)
        from_file = self.ranks.all(is_known)
        if from_file:
            times = {form: known[str(form)] for form in forms}  # type: ignore[index]
        else:
            self.say(f"comparing {' and '.join(dtypes)} on this machine")
            with not_silent("still comparing", self.say):
                times = self.times(forms)
            remembered.keep("forms", key, {str(form): seconds for form, seconds in times.items()})
        best = forms[0]
        for form in forms:
            if times[form] < CLEARLY_FASTER * times[best]:
                best = form
        best = forms[int(self.ranks.max(float(forms.index(best))))]  # ranks may have measured other times
        said = ", ".join(f"{distinct_name(form, forms)} {seconds * 1e3:.3g} ms" for form, seconds in times.items())
        when = f", measured before: {remembered.path_of('forms')}" if from_file else ""
        self.say(f"fastest here: {distinct_name(best, forms)} (a forward and backward pass takes {said}{when})")
        return best

    def times(self, forms: list[Form]) -> dict[Form, float]:
        """Seconds of a forward and backward pass over part of the micro-batch: the best of a few, taking turns."""
        batch = self.batch_of(1)
        plain = Runner(self.model, self.plain)
        self.seconds(plain, batch)  # the first pass allocates and prepares kernels
        one_s = self.seconds(plain, batch)
        rows = max(1, min(self.batching.batch_size, int(PROBE_S / one_s)))
        is_long = one_s > LONG_S
        try:
            return self.times_of(forms, rows, is_long)
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e) or rows == 1:
                raise
        return self.times_of(forms, 1, is_long)  # what fits is found later

    def times_of(self, forms: list[Form], rows: int, is_long: bool) -> dict[Form, float]:
        """Seconds of a pass over `rows` sequences. is_long: one pass of each form must do."""
        batch = self.batch_of(rows)
        runners = {form: Runner(self.model, form) for form in forms}
        if not is_long:
            for runner in runners.values():
                self.seconds(runner, batch)
        best = {form: self.seconds(runner, batch) for form, runner in runners.items()}
        in_the_race = [form for form in forms if best[form] <= HOPELESS * min(best.values())]
        if is_long or len(in_the_race) == 1:
            return best
        for _ in range(ROUNDS - 1):
            for form in in_the_race:
                best[form] = min(best[form], self.seconds(runners[form], batch))
        return best

    def seconds(self, runner: Runner, batch: Batch) -> float:
        """How long a forward and backward pass takes. Leaves no gradients."""
        hardware.synchronize(self.device)
        t0 = time.perf_counter()
        runner.forward_backward(*batch, self.batching.micro_steps)
        hardware.synchronize(self.device)
        seconds = time.perf_counter() - t0
        runner.drop_gradients()
        return seconds

    # ---- the fastest micro-batch -------------------------------------------------------------------------

    def search_batch(self, form: Form) -> None:
        """Doubles the micro-batch, at the same tokens per step, while that makes a token clearly cheaper and fits.

        form is not compiled, though the run may be: each size would have to be compiled anew, and this takes seconds.
        A compiled pass keeps as much for the backward pass or less. Should it not fit, `attempt` halves the batch.
        """
        given = self.batching.batch_size
        key = f"{self.check_key(form, self.batch_of(1))}, {self.step_in_words()}, micro-batch"
        known = remembered.read("forms").get(key)
        per_rank = given * self.batching.micro_steps
        if not isinstance(known, int) or known < given or known % given or per_rank % known:
            known = 0
        known = -int(self.ranks.max(-float(known)))  # the least of the ranks, whose files may differ
        if known:
            self.batching = self.batching.with_batch_size(known)
            self.say(f"auto_batch: batch_size={known}, the fastest before: {remembered.path_of('forms')}")
            return
        runner = Runner(self.model, form)
        with not_silent("still comparing micro-batches", self.say):
            times = self.times_of_batches(runner)
        hardware.release_memory(self.device)  # what the largest took is not this run's peak
        remembered.keep("forms", key, self.batching.batch_size)
        said = ", ".join(f"{n}: {s * 1e3:.3g} ms" if s < math.inf else f"{n}: no room" for n, s in times.items())
        self.say(
            f"auto_batch: batch_size={self.batching.batch_size} and gradient_accumulation_steps="
            f"{self.batching.accumulation}, the same training (time of a sequence by batch_size: {said})"
        )

    def times_of_batches(self, runner: Runner) -> dict[int, float]:
        """Seconds of a sequence by micro-batch, as far as they were tried. Leaves the fastest batching that fits."""
        times = {self.batching.batch_size: self.seconds_of_sequence(runner)}
        while times[self.batching.batch_size] < math.inf and self.batching.micro_steps % 2 == 0:
            before = self.batching
            self.batching = before.with_batch_size(2 * before.batch_size)
            times[self.batching.batch_size] = self.seconds_of_sequence(runner)
            if times[self.batching.batch_size] > CLEARLY_FASTER * times[before.batch_size]:
                self.batching = before
                break
        return times

    def seconds_of_sequence(self, runner: Runner) -> float:
        """A pass over a micro-batch, by its sequences, on the slowest rank; infinite if one runs out of memory."""
        seconds = math.inf
        try:
            batch = self.batch_of(self.batching.batch_size)
            self.training_pass(runner, batch, checked=True)  # with room for all that a step holds
            passes = [self.seconds(runner, batch)]
            while sum(passes) < PROBE_S:
                passes.append(self.seconds(runner, batch))
            seconds = min(passes) / self.batching.batch_size
        except (RuntimeError, MemoryError) as e:
            if not is_out_of_memory(e):
                raise
        runner.drop_gradients()
        return self.ranks.max(seconds)

    def step_in_words(self) -> str:
        """The split of a step, and the memory that is usable for it, to a tenth of the device's."""
        total_bytes = hardware.memory_bytes(self.device)
        usable_bytes = hardware.usable_memory_bytes(self.device)
        share = f"{usable_bytes / total_bytes:.1f}" if total_bytes and usable_bytes else "n/a"
        split = self.batching
        return f"{split.batch_size} x {split.accumulation} on {split.world}, {share} of the memory"

    # ---- one form ----------------------------------------------------------------------------------------

    def attempt(self, form: Form) -> Runner | None:
        """The Runner of this form, tried and checked; None, and a line that says why, where it does not work here.

        Where memory runs out, the micro-batch shrinks if auto_batch allows. Raises ValueError where it does not, and
        where the user has asked for a form that computes something else, or that does not compile.
        """
        while True:
            batch = self.batch_of(self.batching.batch_size)
            with not_silent(f"still {'compiling' if form.compiled else 'trying the first micro-batch'}", self.say):
                runner, outcome, problem = self.try_out(form, batch)
            outcome = self.worst(outcome)
            if outcome == "fits":
                return runner
            if outcome == "wrong":
                self.refuse(form, problem or "another rank's differ")
                return None
            if outcome == "does not compile":
                self.go_on_uncompiled(problem or "it fails on another rank")
                return None
            if outcome == "out of memory":
                self.shrink(form)
            # "again": a library that a killed run had left unfinished is deleted

    def worst(self, outcome: str) -> str:
        """The worst outcome of all ranks, which decides for all."""
        return OUTCOMES[int(self.ranks.max(float(OUTCOMES.index(outcome))))]

    def try_out(self, form: Form, batch: Batch) -> tuple[Runner | None, str, str]:
        """(the Runner, one of OUTCOMES, what is wrong). Leaves no gradients.

        Ranks that share weights rehearse first, each alone: one that failed amid a pass with the others would leave
        them waiting for its part.
        """
        key = self.check_key(form, batch)
        found = held.known(key)
        checked = is_plain(form, self.device) or self.ranks.all(found == RIGHT)
        check_as = None if checked else key
        runner = None
        if found not in (None, RIGHT):
            outcome = "wrong"
            problem = str(found)
        else:
            runner, outcome, problem = self.passes(form, batch, check_as, rehearsed=self.sharded)
        if self.sharded:
            gc.collect()  # the copy, whose modules refer to each other
        if self.sharded and self.worst(outcome) == "fits":
            return self.passes(form, batch, check_as)
        return runner, outcome, problem

    def passes(
        self, form: Form, batch: Batch, check_as: str | None, rehearsed: bool = False
    ) -> tuple[Runner | None, str, str]:
        """As try_out: a training pass and one of evaluation; the latter alone for eval_only.

        check_as: the key under which to remember whether the form is right, None if that is known. rehearsed: takes the
        memory and compiles, with a copy of the model and without the other ranks; returns no Runner.
        """
        try:
            model = self.model
            if rehearsed and self.mesh is not None:
                model = sharding.empty_copy(model, self.mesh, self.wanted.reshard_after_forward, self.device)
            runner = Runner(model, form, self.ranks.distributed)
            if self.wanted.trains:
                self.training_pass(runner, batch, check_as is None)
                if check_as is not None and not rehearsed:
                    held.keep(check_as, None)
            runner.drop_gradients()
            with runner.evaluating():
                runner.loss(*batch)
            hardware.synchronize(self.device)
            return None if rehearsed else runner, "fits", ""
        except Wrong as e:
            if check_as is not None:
                held.keep(check_as, str(e))
            return None, "wrong", str(e)
        except Exception as e:
            if self.sharded and not rehearsed:
                raise  # the others are in the pass: this ends them too
            if is_out_of_memory(e):
                return None, "out of memory", ""
            if not form.compiled:
                raise
            if drop_unfinished(e, self.began):
                return None, "again", ""
            return None, "does not compile", compiling.why_not_compiled(e)
        finally:
            for p in self.model.parameters():
                p.grad = None

    def training_pass(self, runner: Runner, batch: Batch, checked: bool) -> None:
        """A training pass, compared with plain float32 unless it was checked before. Raises Wrong.

        It takes room for AdamW's moments and, as a step will, for the gradients of earlier micro-batches and DDP's
        buckets. In a rehearsal the model's own weights take some of it.
        """
        rehearsed = runner.model is not self.model
        copies = 2 + (self.batching.micro_steps > 1) + (self.ranks.distributed and not self.sharded) - rehearsed
        scaler_state = runner.scaler.state_dict()
        with nothing_is_zero(runner.model):
            room = [torch.empty_like(p) for p in runner.parameters * copies]
            if scaler_state:
                runner.scaler.load_state_dict(scaler_state | {"scale": 1024.0})  # the usual one may overflow at first
            loss = runner.forward_backward(*batch, self.batching.micro_steps) * self.batching.micro_steps
            del room
            if not checked:
                if not rehearsed:
                    self.say(f"comparing loss and gradients in {runner.form} with plain float32")
                check(runner, batch, loss, self.batching.micro_steps, rehearsed)
        if scaler_state:
            runner.scaler.load_state_dict(scaler_state)

    def go_on_uncompiled(self, reason: str) -> None:
        """Says that compiling fails, and what that costs; raises ValueError where the user has asked for it."""
        if self.wanted.compile is True:
            raise ValueError(f"compile=True: {reason}; or try --compile=auto, or --compile=False")
        more_memory = "" if self.device.type == "cpu" else " and may take more memory"
        self.say(f"compile=auto: NOT compiled, so steps are slower{more_memory}: {reason}")

    def refuse(self, form: Form, problem: str) -> None:
        """Says that a form computes something else; raises ValueError where the user has asked for it."""
        if form.compiled and self.wanted.compile is True:
            raise ValueError(f"compile=True: {problem}; leave --compile out, or try --compile=False")
        if form == plain(form):  # TF32, on CUDA: there is nothing plainer to go on with
            raise ValueError(f"{problem}; this GPU or its driver computes something else, try --device=cpu")
        if not form.compiled and self.wanted.dtype != "auto":
            raise ValueError(f"dtype={form.dtype}: {problem}; leave --dtype out, or try --dtype=float32")
        self.say(f"{problem}; going on {'without compiling' if form.compiled else 'in float32'}")

    def shrink(self, form: Form) -> None:
        """A smaller micro-batch of the same training. Raises ValueError if that is impossible or auto_batch is off."""
        self.batching = self.smaller(self.batching, form)
        self.say(f"out of memory: going on with {self.batching.flags()}, which is the same training")
        hardware.release_memory(self.device)

    # ---- compiling on a CPU ------------------------------------------------------------------------------

    def compiled_where_it_pays(self, plain: Runner, seconds: float | None, micro_batches: int) -> Runner:
        """The fastest form with plain's dtype, compiled if the rest of the run is long enough to win that back.

        micro_batches: how many are left, at most. seconds: how long the run may last, None without a limit.
        """
        batch = self.batch_of(self.batching.batch_size)
        with not_silent("still timing a micro-batch", self.say):
            plain_s = min(self.seconds(plain, batch), self.seconds(plain, batch))
        rest_s = plain_s * micro_batches
        if seconds is not None:
            rest_s = min(rest_s, seconds)
        if not self.ranks.all(rest_s * SAVED > self.warm_s()):
            # It would not pay even with all of it in the cache: no need to ask the compiler its name and look there.
            said = f"takes at least about {clock(self.warm_s())} and saves about {clock(rest_s * SAVED)} of this run"
            self.say(f"compile=auto: not compiling, which {said}")
            return plain

        forms = self.compiled_forms(plain.form)
        key = self.check_key(forms[0], batch) + ", fastest"
        known = remembered.read("forms").get(key)
        choices = [str(form) for form in (*forms, plain.form)]
        place = choices.index(known) if known in choices else -1
        first = -self.ranks.max(-place)  # the ranks' files may differ
        compared_before = self.ranks.max(place) == first >= 0
        if compared_before:
            forms = [form for form in forms if str(form) == known]
        if not forms:
            self.say(f"compile=auto: not compiling, which was no faster before: {remembered.path_of('forms')}")
            return plain
        pays, why = self.compiling_pays(forms[0], batch, rest_s)
        self.say(f"compile=auto: {why}")
        if not self.ranks.all(pays):
            return plain
        if compared_before:
            return self.attempt(forms[0]) or plain
        return self.fastest_compiled(forms, plain, rest_s, key)

    def compiled_forms(self, plain: Form) -> list[Form]:
        """The compiled forms with plain's dtype, the likelier first, since a short run tries no other.

        Compiled, explicit attention was the faster in bfloat16 with AMX (LOG.md, 2026-11-21), flash attention in
        float32 without it (2026-11-22).
        """
        form = self.compiled(plain)
        if not self.may_be_explicit():
            return [form]
        first = plain.dtype == "bfloat16"
        return [replace(form, explicit=explicit) for explicit in (first, not first)]

    def fastest_compiled(self, forms: list[Form], plain: Runner, rest_s: float, key: str) -> Runner:
        """The fastest of plain and these compiled forms. Remembers under key which it is, once all were tried."""
        best = plain
        best_share = 1.0  # of plain's time
        for form in forms:
            if form is not forms[0] and not self.ranks.all(rest_s * WORTH_TRYING > self.cold_s()):
                return best
            batch = self.batch_of(self.batching.batch_size)
            was_cold = not self.marker(form, batch).exists()
            t0 = time.perf_counter()
            runner = self.attempt(form)
            took_s = time.perf_counter() - t0
            if runner is None:
                return best
            batch = self.batch_of(self.batching.batch_size)  # attempt may have made it smaller
            with not_silent("still timing micro-batches, compiled and not", self.say):
                best_s, form_s = self.in_turns(best, runner, batch)
            # Shares, since the machine's speed is another in another hour.
            share = best_share * form_s / best_s
            self.mark(form, batch, share, took_s if was_cold else None)
            self.say(f"a micro-batch takes {form_s * 1e3:.3g} ms in {form}, {best_s * 1e3:.3g} ms in {best.form}")
            if self.ranks.all(form_s < best_s):
                best = runner
                best_share = share
        remembered.keep("forms", key, str(best.form))
        return best

    def in_turns(self, a: Runner, b: Runner, batch: Batch) -> tuple[float, float]:
        """Median seconds of a pass of each, taking turns. The shorter a pass, the more turns."""
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
        """Seconds that compiling the model takes with an empty cache, judging by earlier times on this machine."""
        guess_s = COLD_S + COLD_S_PER_LAYER * self.model.config.n_layer
        factor = remembered.read("forms").get(f"{machine(self.device)}: compiling")
        if isinstance(factor, float) and 0 < factor < math.inf:
            return guess_s * factor
        return guess_s

    # ---- what is remembered ------------------------------------------------------------------------------

    def digest(self, batch: Batch, *more: Any) -> str:
        """A name for what a graph is made from: the model, the shape of a micro-batch, torch and our own code."""
        ranks = (self.ranks.distributed, self.sharded)
        return held.digest(self.model.config, tuple(batch[0].shape), *ranks, *more)

    def check_key(self, form: Form, batch: Batch) -> str:
        compiler = f", {compiling.compiler_name(self.device)}" if form.compiled else ""
        return f"{machine(self.device)}{compiler}: {self.digest(batch, form, self.batching.micro_steps > 1)}"

    def marker(self, form: Form, batch: Batch) -> Path:
        """A file in inductor's cache that says: this form of this model has been compiled."""
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        return Path(cache_dir()) / f"deskgpt-{self.digest(batch, form)}"

    def mark(self, form: Form, batch: Batch, share: float, cold_s: float | None) -> None:
        """Remembers a compiled form's share of the plain form's time and, if the cache was empty, what it took."""
        remembered.keep("forms", self.check_key(form, batch) + ", share of the time", share)
        if cold_s is not None:
            guess_s = COLD_S + COLD_S_PER_LAYER * self.model.config.n_layer
            remembered.keep("forms", f"{machine(self.device)}: compiling", cold_s / guess_s)
        with suppress(OSError):
            self.marker(form, batch).touch()


# ---- helpers -------------------------------------------------------------------------------------------------


def is_plain(form: Form, device: torch.device) -> bool:
    """Whether a form is the one that others are compared with. On CUDA float32 is TF32."""
    return form == plain(form) and device.type != "cuda"


def distinct_name(form: Form, among: list[Form]) -> str:
    """A form by what distinguishes it from the others."""
    attention = "explicit attention" if form.explicit else "flash attention"
    if len({f.explicit for f in among}) == 1:
        return form.dtype
    if len({f.dtype for f in among}) == 1:
        return attention
    return f"{form.dtype} with {attention}"


def drop_unfinished(error: Exception, since: float) -> bool:
    """Whether compiling failed on a library that a killed run left unfinished in inductor's cache; deletes that.

    since: the time (time.time) when this run began to compile. Newer files are kept.
    """
    dropped = False
    for name in re.findall(r"(/\S+\.so): file too short", str(error)):
        with suppress(OSError):
            if os.stat(name).st_mtime < since:
                os.unlink(name)
                dropped = True
    return dropped
