"""The commands of bench/claims/README.md: each is one that its script accepts."""

from __future__ import annotations

import re
import shlex

import pytest
from conftest import ROOT

import train
from bench import compare, speed
from configurator import build, read_settings

PAGE = (ROOT / "bench" / "claims" / "README.md").read_text(encoding="utf-8")
BLOCKS = "".join(re.findall(r"^```sh\n(.*?)^```", PAGE, re.M | re.S)).replace("\\\n", " ")
VARIABLES = dict(re.findall(r'^(\w+)="(.*)"$', BLOCKS, re.M)) | {"seed": "1337", "lr": "1e-3", "dtype": "float32"}
COMMANDS = re.findall(r"python ((?:train|bench/speed|bench/compare)\.py .*)", re.sub(r"\s+# .*", "", BLOCKS))


@pytest.mark.parametrize("command", COMMANDS)
def test_settings_of_a_claims_command_make_a_run(command, monkeypatch):
    script, *words = shlex.split(re.sub(r"\$(\w+)", lambda found: VARIABLES[found[1]], command))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [script, *words])
    if script == "bench/compare.py":
        compare.read_arguments()
        return
    peers = []
    if script == "bench/speed.py":
        a, words = speed.read_arguments()
        peers = [shlex.split(peer.removeprefix("ours:")) for peer in a.peer]
    tokens = set()
    for more in ([], *peers):
        c = build(train.TrainConfig, read_settings(train.TrainConfig, [*words, *more]))
        tokens.add(c.batch_size * c.gradient_accumulation_steps * c.block_size)
    assert len(tokens) == 1, "what speed.py compares does the same work"
