from __future__ import annotations

import re
import sys
from dataclasses import asdict, fields
from pathlib import Path

import pytest
from conftest import ROOT, assert_one_line, raises_one_line
from hypothesis import given
from hypothesis import strategies as st

from configurator import configure, help_text
from deskgpt.errors import ConfigError
from deskgpt.files import note_once
from deskgpt.settings import settings_of
from sample import SampleConfig
from train import TrainConfig


def write(folder: Path, content: str, name: str = "c.py") -> str:
    (folder / name).write_text(content, encoding="utf-8")
    return str(folder / name)


numbers = st.floats(0, allow_nan=False, allow_infinity=False)
values = st.one_of(
    st.tuples(st.just("max_iters"), st.integers(0, 2**63 - 1)),
    st.tuples(st.just("learning_rate"), numbers),
    st.tuples(st.just("min_lr"), numbers | st.none()),
    st.tuples(st.just("decay_lr"), st.booleans()),
    st.tuples(st.just("wandb_run_name"), st.text()),
    st.tuples(st.just("optimizer"), st.sampled_from(["adamw", "muon"])),
)


@given(values, values)
def test_command_line_wins_over_files_and_files_over_defaults(tmp_path_factory, in_file, given_too):
    path = write(tmp_path_factory.mktemp("c"), f"{in_file[0]} = {in_file[1]!r}\n")
    # Config files come first, wherever they stand among the arguments.
    found = asdict(configure(TrainConfig, [f"--{given_too[0]}={given_too[1]}", path]))
    expected = (
        {f.name: f.default for f in fields(TrainConfig)} | dict([in_file]) | dict([given_too])
    )
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_numbers_as_people_type_them():
    c = configure(
        TrainConfig,
        ["--max_iters=1e3", "--learning_rate=2", "--wandb_log", "--min_lr=none", "--bias=true"],
    )
    found = (
        c.max_iters,
        type(c.max_iters),
        c.learning_rate,
        type(c.learning_rate),
        c.wandb_log,
        c.min_lr,
        c.bias,
    )
    assert found == (1000, int, 2.0, float, True, None, True)


def test_later_file_wins_and_sees_the_values_so_far(tmp_path):
    files = [
        write(tmp_path, "max_iters = 2\n", "a.py"),
        write(tmp_path, "max_iters = max_iters * 10\n", "b.py"),
    ]
    assert configure(TrainConfig, files) == TrainConfig(max_iters=20)


def test_settings_of_earlier_versions_are_accepted_with_a_note_that_they_have_no_effect(
    tmp_path, capsys
):
    for argument in ("--fp8=3", write(tmp_path, "fp8 = 3\n")):
        note_once.cache_clear()
        assert configure(TrainConfig, [argument, argument]) == TrainConfig()
        assert_one_line(capsys.readouterr().err, "fp8 is no longer used", "docs/hacks/fp8.patch")


# A config file, or an argument, and what its error names.
FAULTY_FILES: dict[str, list[str]] = {
    "bias = True\nmax_iters: 3\n": [":2:", "max_iters = 3"],  # as in YAML
    "max_iters = 1\n\nlearning_rat = 2\n": [":3:", "learning_rat ", "learning_rate"],
    "\noptimizer = 'c'\n": [":2:", "optimizer='c'", "adamw, muon"],
    "x = \n": [":1:", "SyntaxError"],
    "max_iters = 1\nmin_lr = 1 / 0\n": [":2:", "ZeroDivisionError"],
}
FAULTY_ARGUMENTS: dict[str, list[str]] = {
    "--max_itres=3": ["--max_itres", "did you mean max_iters?"],
    "--max_iters=three": ["--max_iters='three'", "int", "--max_iters=6"],
    "--max_iters": ["--max_iters", "--max_iters=6"],
    "--bias=1": ["--bias=1", "bool"],
    "--max_iters=-1": ["max_iters=-1", "at least 0"],
    "--out_dir=": ["--out_dir", "--out_dir=out"],
    "--max_iters 8": ["8", "--key=value"],
}


@pytest.mark.parametrize(("fault", "named"), [*FAULTY_FILES.items(), *FAULTY_ARGUMENTS.items()])
def test_fault_is_one_line_which_names_its_value_and_in_a_file_its_line(tmp_path, fault, named):
    path = write(tmp_path, fault)
    with raises_one_line(*named, *[path] * (fault in FAULTY_FILES), kind=ConfigError):
        configure(TrainConfig, [path] if fault in FAULTY_FILES else fault.split(" "))


def test_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for argument in ("--out_dir=~/a", write(tmp_path, "out_dir = '~/a'\n")):
        assert configure(TrainConfig, [argument]).out_dir == f"{tmp_path}/a"


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_ready_made_runs_parse(path):
    c = configure(TrainConfig, [str(path), "--batch_size=2"])
    assert c.batch_size == 2
    assert c != TrainConfig(batch_size=2)


def test_config_file_with_names_and_code_of_its_own_runs_as_it_does_in_nanogpt(tmp_path):
    content = "import time\n_own_prefix = 'ft-'\ndef named(what): return _own_prefix + str(what)\n"
    content += (
        "wandb_run_name = named(time.time())\ngradient_accumulation_steps = 4 * "
        "8\ndevice = 'cuda'\n"
    )
    c = configure(TrainConfig, [write(tmp_path, content), "--device=cpu"])
    assert (c.gradient_accumulation_steps, c.device, c.wandb_run_name[:3]) == (32, "cpu", "ft-")
    assert configure(TrainConfig, []).wandb_run_name == TrainConfig().wandb_run_name
    assert not any("_own_prefix" in vars(module) for module in list(sys.modules.values()))


@pytest.mark.parametrize("cls", [TrainConfig, SampleConfig])
def test_help_shows_every_setting_once_with_its_type_default_and_comment(cls):
    shown = help_text(cls).partition("in a config file:\n")[2]
    found = re.findall(r"^    --(\w+) (\S+) = (.*)", shown, re.M)
    assert sorted(name for name, _, _ in found) == sorted(f.name for f in fields(cls))
    for name, kind, text in found:
        setting = settings_of(cls)[name]
        default = repr(setting.default)
        assert (kind, text[: len(default)]) == (setting.type_name, default)
        assert text.removeprefix(default).strip(), f"{name} has no comment"
