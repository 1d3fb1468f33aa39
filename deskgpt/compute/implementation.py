"""How a model runs on this machine: the fastest right form, found by timing, and the micro-batch that fits.

On a CPU the dtype of the matmuls, the kind of attention and whether to compile are chosen by timing the run's own model
on its own first micro-batch. What is compiled or in low precision trains only after checks.py has compared it with
plain float32. Both are remembered in forms.json (see held.py), so that a later start of the same model on the same
machine, compiler and torch need not repeat them.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from deskgpt.compute import compiling, sharding
from deskgpt.compute.batching import Batching
from deskgpt.compute.checks import (
    Batch,
    check,
    draws_random_numbers,
    is_right_by_definition,
    nothing_is_zero,
    plain,
    repeating,
    weights_are_finite,
)
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.runner import Runner, Variant
from deskgpt.kernels import cpu_kernels, replacements, verify
from deskgpt.kernels.verify import Mismatch, Problems, machine
from deskgpt.system import cache, hardware, peaks
from deskgpt.system.errors import is_out_of_memory
from deskgpt.system.formatting import clock
from deskgpt.system.terminal import not_silent
from model import GPT

# ---- timing ----
PROBE_S = 0.3  # about what a timed pass takes: as many sequences of the micro-batch as fit into it
LONG_S = 10.0  # if one pass of each form takes longer, it is timed once
LEAST_ROUNDS = 2  # of forms that take turns ...
MOST_ROUNDS = 50
TURNS_S = 1.0  # ... and about the seconds that they may take
HOPELESS = 4.0  # times the fastest on one sequence: bfloat16 takes 30 where no instruction multiplies it
CLEARLY_FASTER = 0.97  # of the time of what comes first: a plainer form, or a smaller micro-batch

# The kinds of devices on which auto_batch looks for a faster micro-batch. On others bench/speed.py does.
BATCH_IS_SEARCHED_ON = ("cuda",)
SPARE = 0.1  # of the memory stays free with a micro-batch that the user has not chosen: the run's needs may grow

# ---- compiling ----
# What compiling takes and the share of a step that it saves: round figures of 2 to 6 layers on two cores with AMX
# (docs/decisions.md). They decide whether to try; whether a compiled step is faster is measured. With kernels in C++
# less is left to save: 8 to 9% for two and three layers of 256 (docs/decisions.md), without AMX.
COLD_S = 15.0
COLD_S_PER_LAYER = 3.0
WARM_S = 2.0
WARM_S_PER_LAYER = 1.0
SAVED = 0.25
SAVED_WITH_KERNELS = 0.1

LONGEST_COMPARED = 2048  # tokens on which kernels are compared

# What can become of a form, from the best to the one that decides for all ranks.
OUTCOMES = ("fits", "left out", "again", "out of memory")

Choice = TypeVar("Choice")


@dataclass(frozen=True)
class EarlierVariant:
    """The form of the run that a checkpoint is of, as far as it is known for this device."""

    dtype: str | None = None
    compiled: bool | None = None
    attention: str | None = None
    batch_size: int | None = None

    @classmethod
    def of(cls, saved: dict[str, Any] | None, device: torch.device, batch_size: int | None = None) -> EarlierVariant:
        """From a checkpoint's `form`. What is fast on another kind of device says nothing about this one."""
        if not isinstance(saved, dict) or saved.get("device", device.type) != device.type:
            return cls()
        dtype = saved.get("dtype")
        compiled = saved.get("compiled")
        attention = saved.get("attention")
        if isinstance(saved.get("explicit"), bool):  # as written until 2026-11-24
            attention = "explicit" if saved["explicit"] else "flash"
        return cls(
            dtype if isinstance(dtype, str) and dtype in hardware.DTYPES else None,
            compiled if isinstance(compiled, bool) else None,
            attention if attention in replacements.KINDS else None,
            batch_size,
        )


def saved_variant(runner: Runner) -> dict[str, Any]:
    """A form for a checkpoint."""
    return runner.form.facts() | {"device": runner.device.type}


@dataclass(frozen=True)
class Options:
    """What a run wants of its form: settings of train.py, the form before a resume, and how long it will be."""

    dtype: str = "auto"
    attention: str = "auto"
    compile: str | bool = "auto"
    auto_batch: str | bool = "auto"
    activation_checkpoint: str = "none"
    dp_shard: int = 1
    reshard_after_forward: bool = True
    sync_each_batch: bool = True
    earlier: EarlierVariant = EarlierVariant()
    trains: bool = True  # False: evaluates only
    steps: int = 0
    seconds: float | None = None  # None: no limit

    @classmethod
    def of(cls, settings: Mapping[str, Any], earlier: EarlierVariant, steps: int, seconds: float | None) -> Options:
        """From settings of train.py. steps, seconds: how long the run may last."""
        own = {name: settings[name] for name in cls.__dataclass_fields__ if name in settings}
        return cls(**own, earlier=earlier, trains=not settings["eval_only"], steps=steps, seconds=seconds)

    def compiled(self, device: torch.device) -> bool | None:
        """Whether to compile; None if that depends on whether it pays."""
        if isinstance(self.compile, bool):
            return self.compile
        if device.type == "cpu" and self.trains:
            return self.earlier.compiled
        return device.type == "cuda"

    def may_split_anew(self, device: torch.device) -> bool:
        """Whether the run may take another micro-batch than the given one, at least where that does not fit."""
        if isinstance(self.auto_batch, bool):
            return self.auto_batch
        return device.type in BATCH_IS_SEARCHED_ON


@dataclass
class Tuner:
    """What forms are tried on: a model, with the first micro-batches of its run. All ranks try the same forms."""

    model: GPT
    batching: Batching  # becomes one whose micro-batches fit
    wanted: Options
    ranks: DistContext
    batch_of: Callable[[int], Batch]  # the first micro-batch of a number of sequences
    # The batching to go on with where memory runs out; raises ValueError where there is none.
    smaller: Callable[[Batching, Variant, float], Batching]
    # How many times the memory a micro-batch surely takes, 0 if that is not known.
    times_memory: Callable[[Batching, Variant], float] = lambda batching, form: 0.0
    reference_only: tuple[str, ...] = ()  # functions of model.py whose faster forms are wrong here
    began: float = field(default_factory=time.time)
    sharded: bool = field(init=False)  # whether ranks share the weights, which are whole for a while in a pass

    def __post_init__(self) -> None:
        self.sharded = sharding.is_sharded(self.model)

    @property
    def plain(self) -> Variant:
        """The form with which others are compared."""
        return Variant(checkpoint=self.wanted.activation_checkpoint, reference_only=self.reference_only)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @functools.cached_property
    def rehearsal_mesh(self) -> Any:
        """Ranks that are not there, for a copy of a sharded model that is tried without the others."""
        return sharding.make_mesh(self.device.type, self.wanted.dp_shard, self.ranks.world, rehearsed=True)

    def micro_batch(self) -> Batch:
        return self.batch_of(self.batching.batch_size)


def choose_implementation(s: Tuner) -> tuple[Runner, Batching]:
    """The Runner that trains as wanted in the fastest right form, and the same training in micro-batches that fit.

    Leaves the model as it was, and no gradients. Raises ValueError where no form that is wanted is right, the user
    wants it compiled and that fails, or memory runs out.
    """
    with verify.keeping_buffers(s.model):
        s.reference_only = wrong_replacements(s, "kernels", replacements.replacements_for(s.device.type))
        # Ranks that share weights go through the same passes, while their clocks differ: none of these forms is timed.
        timed = not s.sharded and s.wanted.trains
        form = fastest_plain(s, timed and s.device.type == "cpu")

        if timed and may_double(s):
            search_batch(s, form)

        is_compiled = s.wanted.compiled(s.device)
        runner = try_variant(s, compiled(s, form)) if is_compiled else None
        runner = runner or try_variant(s, form)
        if runner is None and form.attention == "kernels":
            runner = try_variant(s, replace(s.plain, dtype=form.dtype))
        if runner is None and s.sharded:
            s.model = sharding.float32_copy(s.model)
        runner = runner or try_variant(s, s.plain)
        assert runner is not None  # the plain form is right by definition
        if is_compiled is None and timed and s.wanted.steps > 0:
            runner = compiled_where_it_pays(s, runner)
    hardware.forget_peak(s.device)  # what was tried and compared may have taken more than the run does
    return runner, s.batching


# ---- kernels -------------------------------------------------------------------------------------------------


def wrong_replacements(s: Tuner, which: str, forms: Mapping[str, Any]) -> tuple[str, ...]:
    """The functions of model.py for which these forms compute something else here; says so of each.

    which: the forms, in words under which the answer is remembered.
    """
    if not s.ranks.all(weights_are_finite(s.model)):
        return ()  # what this run finds must not be remembered; health.py will say why it ends

    def compare() -> Problems:
        idx, targets = s.batch_of(1)
        with (
            sharding.in_float32(s.model) as model,
            nothing_is_zero(model),
            not_silent("still comparing faster forms with model.py", s.ranks.print0),
        ):
            tokens = slice(LONGEST_COMPARED)
            return verify.wrong_replacements(model, forms.items(), idx[:, tokens], targets[:, tokens])

    key = f"{machine(s.device)}: {verify.digest(s.model.config)}, {which}"
    problems: Problems = {}
    for of_rank in s.ranks.gather(verify.problems_of(key, compare, s.ranks.all)):
        problems |= of_rank
    for name in sorted(problems):
        s.ranks.print0(f"{problems[name]}: it is computed as model.py says, which may be slower")
    return tuple(sorted(problems))


def may_be_explicit(s: Tuner) -> bool:
    is_right = "attention" not in s.reference_only
    return is_right and replacements.may_be_explicit(s.device.type, s.batching.block_size, s.model.config.dropout)


def kinds_of_attention(s: Tuner, measured: bool) -> list[str]:
    """The kinds from which the fastest is taken: one where the settings, or the run before, say which.

    Raises ValueError where the settings want one that is not possible.
    """
    wanted = s.wanted.attention if s.wanted.attention != "auto" else s.wanted.earlier.attention
    if wanted != "kernels" and (wanted or not measured):
        check_explicit(s)
        return [wanted or "flash"]
    if s.device.type == "cpu" and cpu_kernels.may_exist() and has_cpu_kernels(s):
        return [wanted] if wanted else ["flash", "kernels"]
    if s.wanted.attention == "kernels":
        raise ValueError(
            f"attention=kernels is not possible with device={s.device.type}: it needs Linux, a processor with AVX2 or "
            "AVX-512 and a C++ compiler; try --attention=flash"
        )
    return ["flash", "explicit"] if measured and may_be_explicit(s) else ["flash"]


def has_cpu_kernels(s: Tuner) -> bool:
    """Whether all ranks have the kernels in C++, compiled now if need be; says where one has not."""
    if not cpu_kernels.is_ready():
        s.ranks.print0("compiling kernels for this processor, once")
    problem = ""
    try:
        with not_silent("still compiling kernels", s.ranks.print0):
            cpu_kernels.load()
    except cpu_kernels.Unavailable as e:
        problem = str(e)
    if not s.ranks.all(not problem):
        s.ranks.print0(f"NOT using C++ kernels, so steps may be slower: {problem or 'another rank has none'}")
        return False
    return True


def check_explicit(s: Tuner) -> None:
    """Raises ValueError where the settings want explicit attention and it is not possible."""
    if s.wanted.attention == "explicit" and not may_be_explicit(s):
        raise ValueError(
            f"attention=explicit is not possible with device={s.device.type}, block_size={s.batching.block_size}, "
            f"dropout={s.model.config.dropout:g}: it needs a CPU, 2 to {replacements.LONGEST_EXPLICIT:,} tokens, no dropout "
            "and the attention of an unchanged model.py; try --attention=flash"
        )


def with_attention(s: Tuner, kind: str) -> Variant:
    """The plain form with this kind of attention; kernels in C++ as far as they are right."""
    form = replace(s.plain, attention=kind)
    if kind != "kernels":
        return form
    all_forms = replacements.replacements_for(s.device.type, kind)
    wrong = wrong_replacements(s, "C++ kernels", {name: all_forms[name] for name in replacements.IN_CPP})
    return replace(form, reference_only=tuple(sorted({*form.reference_only, *wrong})))


def compiled(s: Tuner, form: Variant) -> Variant:
    """The form, compiled, with the kernels that are right then."""
    before = replacements.replacements_for(s.device.type)
    more = replacements.replacements_for(s.device.type, compiled=True)
    wrong = wrong_replacements(
        s, "kernels of compiled models", {n: form for n, form in more.items() if n not in before}
    )
    return replace(form, compiled=True, reference_only=tuple(sorted({*form.reference_only, *wrong})))


# ---- timing and choosing -------------------------------------------------------------------------------------


def clearly_fastest(times: Mapping[Choice, float]) -> Choice:
    """The first of these choices, or a later one whose time is clearly shorter: what comes first costs less otherwise.

    The one rule by which forms and micro-batches are chosen, here and in bench/.
    """
    best, *others = times
    for other in others:
        if times[other] < CLEARLY_FASTER * times[best]:
            best = other
    return best


def choose(
    s: Tuner, key: str, choices: Sequence[str], measure: Callable[[], dict[str, float]]
) -> tuple[str, dict[str, float]]:
    """The clearly fastest choice, on which all ranks agree, and the seconds of each; remembered under this key."""
    with not_silent("still comparing", s.ranks.print0):
        times = measure()
    place = choices.index(clearly_fastest(times))
    best = choices[int(s.ranks.max(float(place)))]  # ranks may have measured other times
    cache.keep(verify.FILE, key, best)
    return best, times


def in_ms(times: Mapping[Any, float]) -> str:
    return ", ".join(f"{x}: {t * 1e3:.3g} ms" if t < math.inf else f"{x}: no room" for x, t in times.items())


def chosen_before(s: Tuner, key: str, choices: Sequence[str]) -> str | None:
    """The choice that all ranks remember under this key; None if they remember none or different ones."""
    found = cache.read(verify.FILE).get(key)
    place = float(choices.index(found)) if found in choices else -1.0
    is_same = s.ranks.max(place) == -s.ranks.max(-place)
    return choices[int(place)] if is_same and place >= 0 else None


def seconds(s: Tuner, runner: Runner, batch: Batch) -> float:
    """How long a forward and backward pass takes. Leaves no gradients."""
    hardware.synchronize(s.device)
    t0 = time.perf_counter()
    runner.forward_backward(*batch, s.batching.micro_steps)
    hardware.synchronize(s.device)
    pass_s = time.perf_counter() - t0
    runner.drop_gradients()
    return pass_s


def in_turns(s: Tuner, runners: Sequence[Runner], batch: Batch) -> list[float]:
    """Seconds of a pass of each: the best of several, which take turns. The shorter a pass, the more turns."""
    best = [seconds(s, runner, batch) for runner in runners]
    first_s = sum(best)
    if first_s > LONG_S:
        return best
    for _ in range(max(LEAST_ROUNDS, min(MOST_ROUNDS, int(TURNS_S / first_s)))):
        for i, runner in enumerate(runners):
            best[i] = min(best[i], seconds(s, runner, batch))
    return best


# ---- the fastest form that is not compiled -------------------------------------------------------------------


def fastest_plain(s: Tuner, measured: bool) -> Variant:
    """The fastest form that is not compiled; what the user or an earlier run has chosen stays.

    measured: by timing. Otherwise it is what is usually fast on such a device.
    """
    earlier = s.wanted.earlier
    dtype = s.wanted.dtype if s.wanted.dtype != "auto" else earlier.dtype
    if s.sharded:
        dtype = dtype_of_shards(s.wanted.dtype, earlier, s.ranks)
    elif dtype is None and not measured:
        dtype = peaks.fast_dtype(s.device)
    dtypes = [dtype] if dtype else ["float32", "bfloat16"]
    kinds = {kind: with_attention(s, kind) for kind in kinds_of_attention(s, measured)}
    forms = {
        f"{d} with {replacements.in_words(k)}": replace(form, dtype=d) for d in dtypes for k, form in kinds.items()
    }
    if len(forms) == 1:
        return forms.popitem()[1]
    key = f"{key_of(s, s.plain, s.batch_of(1))}: fastest of {', '.join(forms)}"
    known = chosen_before(s, key, list(forms))
    if known is not None:
        s.ranks.print0(f"fastest here: {known} (measured before: {cache.path_of(verify.FILE)})")
        return forms[known]
    best, times = choose(s, key, list(forms), functools.partial(times_of, s, forms))
    s.ranks.print0(f"fastest here: {best} (a forward and backward pass takes {in_ms(times)})")
    return forms[best]


def dtype_of_shards(wanted: str, earlier: EarlierVariant, ranks: DistContext) -> str:
    """The dtype in which ranks that share weights compute. wanted: the setting.

    It is not float16, since no loss scale follows their gradients.
    """
    dtype = wanted if wanted != "auto" else earlier.dtype or peaks.fast_dtype(ranks.device)
    return "bfloat16" if ranks.all(dtype == "bfloat16") else "float32"


def times_of(s: Tuner, forms: Mapping[str, Variant]) -> dict[str, float]:
    """Seconds of a forward and backward pass over part of the micro-batch in each form that is not hopelessly slow."""
    s.ranks.print0(f"comparing {' and '.join(dict.fromkeys(form.dtype for form in forms.values()))} on this machine")
    one = s.batch_of(1)
    runners = {name: Runner(s.model, form) for name, form in forms.items()}
    # Twice: the first pass allocates and prepares kernels.
    row_s = {name: min(seconds(s, runner, one), seconds(s, runner, one)) for name, runner in runners.items()}
    names = [name for name in forms if row_s[name] <= HOPELESS * min(row_s.values())]
    rows = max(1, min(s.batching.batch_size, int(PROBE_S / max(row_s[name] for name in names))))
    hopeful = [runners[name] for name in names]
    try:
        times = in_turns(s, hopeful, s.batch_of(rows))
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e) or rows == 1:
            raise
        times = in_turns(s, hopeful, one)  # which micro-batch fits is found later
    return dict(zip(names, times, strict=True))


# ---- the fastest micro-batch ---------------------------------------------------------------------------------


def may_double(s: Tuner) -> bool:
    """Whether to look for a faster micro-batch.

    A run that resumes on this kind of device keeps its own, unless the command names another one. Random numbers belong
    to a micro-batch, so with dropout another size draws other masks: that is done only for a user who asks for it.
    """
    wanted = s.wanted
    is_kept = wanted.earlier.dtype is not None and wanted.earlier.batch_size in (None, s.batching.batch_size)
    if is_kept or s.device.type not in BATCH_IS_SEARCHED_ON or not wanted.may_split_anew(s.device):
        return False
    return wanted.auto_batch is True or s.ranks.all(not draws_random_numbers(s.model, s.batch_of(1), s.plain))


def search_batch(s: Tuner, form: Variant) -> None:
    """Doubles the micro-batch, at the same tokens per step, while that makes a token clearly cheaper and fits.

    form is not compiled, though the run may be: each size would have to be compiled anew, and this takes seconds. A
    compiled pass keeps as much for the backward pass or less. Should it not fit, `attempt` halves the batch.
    """
    given = s.batching
    doublings = [2**n for n in range(given.micro_steps.bit_length()) if given.micro_steps % 2**n == 0]
    if len(doublings) == 1:
        return
    sizes = [str(given.batch_size * factor) for factor in doublings]
    usable_gib = (hardware.usable_memory_bytes(s.device) or 0) >> 30
    key = f"{key_of(s, form, s.batch_of(1))}: fastest micro-batch of {', '.join(sizes)} in {usable_gib} GiB"
    best = chosen_before(s, key, sizes)
    how = f"measured before: {cache.path_of(verify.FILE)}"
    if best is None:
        best, times = choose(s, key, sizes, functools.partial(times_by_size, s, form, sizes))
        how = f"time of a sequence by batch_size: {in_ms(times)}"
    s.batching = given.with_batch_size(int(best))
    s.ranks.print0(
        f"auto_batch: batch_size={best} and gradient_accumulation_steps={s.batching.accumulation}, the same training "
        f"({how})"
    )


def times_by_size(s: Tuner, form: Variant, sizes: Sequence[str]) -> dict[str, float]:
    """Seconds of a sequence by the size of its micro-batch: the sizes up to the first that is not clearly faster."""
    given = s.batching
    runner = Runner(s.model, form)
    times: dict[str, float] = {}
    for size in sizes:
        s.batching = given.with_batch_size(int(size))
        spare = SPARE * (hardware.usable_memory_bytes(s.device) or 0) if times else 0.0
        times[size] = seconds_of_sequence(s, runner, int(spare))
        if times[size] == math.inf or clearly_fastest(times) != size:
            break
    s.batching = given
    hardware.release_memory(s.device)  # what the largest took is not this run's peak
    return times


def seconds_of_sequence(s: Tuner, runner: Runner, spare: int) -> float:
    """A pass over a micro-batch, by its sequences, on the slowest rank.

    Infinite if memory runs out on one, while so many spare bytes stay free.
    """
    sequence_s = math.inf
    try:
        batch = s.micro_batch()
        unused = torch.empty(spare, dtype=torch.uint8, device=s.device)
        training_pass(s, runner, batch, is_checked=True)  # with room for all that a step holds
        del unused
        (pass_s,) = in_turns(s, [runner], batch)
        sequence_s = pass_s / s.batching.batch_size
    except (RuntimeError, MemoryError) as e:
        if not is_out_of_memory(e):
            raise
    runner.drop_gradients()
    return s.ranks.max(sequence_s)


# ---- one form ------------------------------------------------------------------------------------------------


def try_variant(s: Tuner, form: Variant) -> Runner | None:
    """The Runner of this form, tried and checked; None, and a line that says why, where it does not work here.

    Where memory runs out, the micro-batch shrinks if auto_batch allows. Raises ValueError where it does not, and as
    leave_out.
    """
    while True:
        times = s.ranks.max(s.times_memory(s.batching, form))
        if times <= 1:
            with not_silent(
                f"still {'compiling' if form.compiled else 'trying the first micro-batch'}", s.ranks.print0
            ):
                runner, outcome, problem = try_out(s, form, s.micro_batch())
            outcome = worst(s, outcome)
        else:
            outcome = "out of memory"
        if outcome == "fits":
            return runner
        if outcome == "left out":
            leave_out(s, form, problem or "it fails, or differs, on another rank")
            return None
        if outcome == "out of memory":
            s.batching = s.smaller(s.batching, form, max(2.0, times))
            s.ranks.print0(f"out of memory: going on with {s.batching.flags()}, which is the same training")
            hardware.release_memory(s.device)
        # "again": a library that a killed run had left unfinished is deleted


def worst(s: Tuner, outcome: str) -> str:
    """The worst outcome of all ranks, which decides for all."""
    return OUTCOMES[int(s.ranks.max(float(OUTCOMES.index(outcome))))]


def try_out(s: Tuner, form: Variant, batch: Batch) -> tuple[Runner | None, str, str]:
    """(the Runner, one of OUTCOMES, what is wrong). Leaves no gradients.

    Ranks that share weights rehearse first, each alone: one that failed amid a pass with the others would leave them
    waiting for its part.
    """
    key = key_of(s, form, batch)
    found = verify.found_before(key)
    check_as = None if is_right_by_definition(form, s.device) or s.ranks.all(found == {}) else key
    if found:
        tried: tuple[Runner | None, str, str] = (None, "left out", next(iter(found.values())))
    else:
        tried = passes(s, form, batch, check_as, rehearsed=s.sharded)
    if s.sharded:
        gc.collect()  # the copy, whose modules refer to each other
        if worst(s, tried[1]) == "fits":
            return passes(s, form, batch, check_as)
    return tried


def passes(
    s: Tuner, form: Variant, batch: Batch, check_as: str | None, rehearsed: bool = False
) -> tuple[Runner | None, str, str]:
    """As try_out: a training pass and one of evaluation; the latter alone for eval_only.

    check_as: the key under which to remember whether the form is right, None if that is known. rehearsed: takes the
    memory and compiles, with a copy of the model and without the other ranks; returns no Runner.
    """
    try:
        model = s.model
        if rehearsed:
            reshard = s.wanted.reshard_after_forward
            model = sharding.empty_copy(model, s.rehearsal_mesh, reshard, s.device, form.dtype)
        runner = Runner(model, form, s.ranks.distributed, s.wanted.sync_each_batch)
        if s.wanted.trains:
            training_pass(s, runner, batch, check_as is None)
            if not rehearsed:
                verify.keep(check_as, {})
        runner.drop_gradients()
        with runner.evaluating():
            runner.loss(*batch)
        hardware.synchronize(s.device)
        return None if rehearsed else runner, "fits", ""
    except Mismatch as e:
        verify.keep(check_as, {str(form): str(e)})
        return None, "left out", str(e)
    except Exception as e:
        if s.sharded and not rehearsed:
            raise  # the others are in the pass: this ends them too
        if is_out_of_memory(e):
            return None, "out of memory", ""
        if not form.compiled:
            raise
        if drop_unfinished(e, s.began):
            return None, "again", ""
        return None, "left out", compiling.why_not_compiled(e)
    finally:
        for p in s.model.parameters():
            p.grad = None


def training_pass(s: Tuner, runner: Runner, batch: Batch, is_checked: bool) -> None:
    """A training pass over a batch of this shape, compared with plain float32 unless it was checked. Raises Wrong.

    It takes room for AdamW's moments and, as a step will, for the gradients of earlier micro-batches and DDP's buckets;
    whole gradients where ranks that share weights do not reduce them after each micro-batch.
    In a rehearsal the model's own weights take some of it.
    """
    rehearsed = runner.model is not s.model
    micro_steps = s.batching.micro_steps
    copies = 2 + (micro_steps > 1) + (s.ranks.distributed and not s.sharded) - rehearsed
    scaler_state = runner.scaler.state_dict()
    if not is_checked:
        batch = repeating(batch)
    with nothing_is_zero(runner.model):
        room = [torch.empty_like(p) for p in runner.parameters * copies]
        if s.sharded and micro_steps > 1 and not runner.sync_each_batch:
            room += [torch.empty(p.shape, device=s.device) for p in runner.parameters]
        if scaler_state:  # the usual scale may overflow at first; a smaller one loses gradients of a part of the step
            runner.scaler.load_state_dict(scaler_state | {"scale": 1024.0 * micro_steps})
        loss = runner.forward_backward(*batch, micro_steps) * micro_steps
        del room
        if not is_checked:
            if not rehearsed:
                s.ranks.print0(f"comparing loss and gradients in {runner.form} with plain float32")
            check(runner, batch, loss, micro_steps, rehearsed)
    if scaler_state:
        runner.scaler.load_state_dict(scaler_state)


def leave_out(s: Tuner, form: Variant, problem: str) -> None:
    """Says why a form is left out; raises ValueError where the user has asked for it, or nothing plainer is left."""
    if form.compiled and s.wanted.compile is True:
        raise ValueError(f"compile=True: {problem}; or try --compile=auto, or --compile=False")
    if form.compiled:
        s.ranks.print0(f"compile=auto: NOT compiled, so steps are slower and may take more memory: {problem}")
        return
    if form == plain(form):  # TF32 on CUDA, float32 on MPS
        raise ValueError(f"{problem}; this GPU or its driver computes something else, try --device=cpu")
    if form.attention == s.wanted.attention != "flash":
        raise ValueError(f"attention={form.attention}: {problem}; leave --attention out, or try --attention=flash")
    if form.attention == "kernels":
        s.ranks.print0(f"{problem}; going on without the C++ kernels")
        return
    if s.wanted.dtype != "auto":
        raise ValueError(f"dtype={form.dtype}: {problem}; try --dtype=auto, or --dtype=float32")
    s.ranks.print0(f"{problem}; going on in float32")


# ---- compiling on a CPU --------------------------------------------------------------------------------------


def compiled_where_it_pays(s: Tuner, plain: Runner) -> Runner:
    """plain, or the same dtype compiled where the rest of the run is long enough to win that back and it is faster."""
    batch = s.micro_batch()
    with not_silent("still timing a micro-batch", s.ranks.print0):
        plain_s = min(seconds(s, plain, batch), seconds(s, plain, batch))
    limit_s = math.inf if s.wanted.seconds is None else s.wanted.seconds
    share = SAVED_WITH_KERNELS if plain.form.attention == "kernels" else SAVED
    saved_s = share * min(limit_s, plain_s * s.batching.micro_steps * s.wanted.steps)
    pays, words = pays_to_compile(s, saved_s, is_cached=True)
    if not pays:
        s.ranks.print0(f"compile=auto: not compiling, which {words}")
        return plain  # not even the compiler's name was asked, which takes a second

    # In graphs explicit attention was the faster in bfloat16 with AMX (docs/decisions.md), flash attention in float32
    # without it (2026-11-22).
    form = compiled(s, plain.form)
    if s.wanted.attention == "auto" and form.attention != "kernels":
        form = replace(form, attention="explicit" if form.dtype == "bfloat16" and may_be_explicit(s) else "flash")
    choices = [str(plain.form), str(form)]
    key = f"{key_of(s, form, batch)}: fastest of {'; '.join(choices)}"
    known = chosen_before(s, key, choices)
    if known == choices[0]:
        s.ranks.print0(f"compile=auto: not compiling, which was no faster before: {cache.path_of(verify.FILE)}")
        return plain
    is_cached = verify.found_before(key_of(s, form, batch)) == {}  # unless the cache was deleted since
    pays, words = pays_to_compile(s, saved_s, is_cached)
    s.ranks.print0(f"compile=auto: {'' if pays else 'not '}compiling, which {words}")
    if not pays:
        return plain
    runner = try_variant(s, form)
    if runner is None or known is not None:
        return runner or plain

    runners = [plain, runner]
    best, times = choose(
        s, key, choices, lambda: dict(zip(choices, in_turns(s, runners, s.micro_batch()), strict=True))
    )
    s.ranks.print0(f"compile=auto: {best} is the fastest (a micro-batch takes {in_ms(times)})")
    return runners[choices.index(best)]


def pays_to_compile(s: Tuner, saved_s: float, is_cached: bool) -> tuple[bool, str]:
    """Whether compiling takes less than it saves, on all ranks, and both times in words."""
    n_layer = s.model.config.n_layer
    cost_s = WARM_S + WARM_S_PER_LAYER * n_layer if is_cached else COLD_S + COLD_S_PER_LAYER * n_layer
    words = f"takes about {clock(cost_s)} and saves about {clock(saved_s)} of this run"
    return s.ranks.all(saved_s > cost_s), words


# ---- what is remembered --------------------------------------------------------------------------------------


def key_of(s: Tuner, form: Variant, batch: Batch) -> str:
    """Under which things are remembered of this form of the model, on this machine and compiler, by our code."""
    compiler = compiling.compiler_name(s.device) if form.compiled else None
    split = (tuple(batch[0].shape), s.ranks.distributed, s.sharded, s.batching.micro_steps > 1)
    return f"{machine(s.device)}: {verify.digest(s.model.config, form, compiler, *split)}"


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
