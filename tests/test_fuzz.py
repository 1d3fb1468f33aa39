"""What tests/fuzz.py feeds to the readers ends as documented; and the fuzzer sees what does not."""

from __future__ import annotations

import os
import signal
from typing import Any

import fuzz
import numpy as np
import pytest
from conftest import needs_fork
from hypothesis import strategies as st

from deskgpt.errors import ConfigError

CASES = 5000


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_whatever_is_read_ends_as_documented(name):
    target, tally = fuzz.fuzz(name, CASES)
    print(fuzz.summary(name, tally))
    assert tally.cases() >= CASES
    assert {kind: tally.examples[kind] for kind in tally.defects(target)} == {}
