"""What tests/fuzz.py feeds to the readers ends as documented; and the fuzzer sees what does not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import fuzz
import pytest
from hypothesis import strategies as st

from deskgpt.machine.errors import ConfigError

pytestmark = pytest.mark.slow
CASES = 1000  # python tests/fuzz.py takes 5000 by default, or as many as it is told


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_whatever_is_read_ends_as_documented(name):
    target, tally = fuzz.fuzz(name, CASES)
    print(fuzz.summary(name, tally))
    assert {kind: tally.examples[kind] for kind in tally.defects(target)} == {}
    assert tally.cases() >= CASES


# ---- the fuzzer itself ---------------------------------------------------------------------------------------


def outcomes(read: Callable[[int], object], has_checksum: bool = True, cases: int = 60) -> tuple[set[str], fuzz.Tally]:
    """(what is wrong, everything) with a reader of numbers from 0 to 1000."""
    target = fuzz.Target(st.integers(0, 1000), lambda n: bool(read(n)), has_checksum)
    tally = fuzz.fuzz_target(target, cases, seed=0)
    return set(tally.defects(target)), tally


def test_exception_is_found_with_the_smallest_case():
    def read(n: int) -> None:
        if n > 500:
            [].pop(n)

    defects, tally = outcomes(read)
    (kind,) = defects
    assert kind.startswith("IndexError at tests/test_fuzz.py:")
    assert tally.examples[kind] == "501"
    assert tally.cases() == 60
    assert tally.outcomes[fuzz.READ] + tally.outcomes[kind] == 60


def refuse(n: int) -> None:
    raise ConfigError(f"{n} is too\nlarge")


@pytest.mark.parametrize("read", [refuse, lambda n: os.stat("nowhere/nothing"), lambda n: exit(0)])
def test_documented_ends_are_no_defects(read):
    defects, tally = outcomes(read)
    assert not defects
    assert tally.outcomes == {fuzz.REFUSED: 60}


def take_memory(n: int) -> None:
    bytearray(os.urandom(1) * (fuzz.LARGE + 2**24))


@pytest.mark.parametrize(
    ("read", "kind"),
    [
        (lambda n: int("x"), "accidental ValueError at tests/test_fuzz.py"),
        (lambda n: exit(3), "SystemExit(3)"),
        (lambda n: bytearray(2**50), "out of memory at tests/test_fuzz.py"),
        pytest.param(take_memory, "takes memory, and is read", marks=pytest.mark.skipif("os.name == 'nt'")),
    ],
)
def test_what_is_not_documented_is_a_defect(read, kind):
    (found,) = outcomes(read, cases=3)[0]
    assert found.startswith(kind)


def test_silent_damage_is_a_defect_where_a_checksum_could_tell():
    assert outcomes(lambda n: n > 500)[0] == {fuzz.SILENT}
    defects, tally = outcomes(lambda n: n > 500, has_checksum=False)
    assert not defects
    assert tally.outcomes[fuzz.SILENT] > 0


@pytest.mark.skipif(not fuzz.can_fork(), reason="needs a child process")
def test_crash_ends_neither_the_fuzzer_nor_the_count():
    def read(n: int) -> None:
        if n == 1000:
            os.kill(os.getpid(), signal.SIGSEGV)

    defects, tally = outcomes(read, cases=200)
    assert defects == {"killed by SIGSEGV"}
    assert tally.examples["killed by SIGSEGV"] == "1000"
    assert tally.cases() == 200


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a clock of processor time")
def test_case_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(fuzz, "SLOW_S", 0.1)

    def read(n: int) -> None:
        while n:
            pass

    (kind,) = outcomes(read, cases=3)[0]
    assert kind.startswith("takes more than 0.1 s at tests/test_fuzz.py")
