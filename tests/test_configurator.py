import re
import sys
from dataclasses import asdict
from pathlib import Path

from conftest import ROOT, assert_one_line, flags, raises_one_line
from hypothesis import given
from hypothesis import strategies as st

from configurator import configure, help_text
from deskgpt.errors import ConfigError
from deskgpt.files import note_once
from deskgpt.settings import settings_of
from sample import SampleConfig
from train import TrainConfig


def write(folder: Path, content: str, name: str = "c.py") -> str:
    path = folder / name
    path.write_text(content, encoding="utf-8")
    return str(path)


VALUES = {
    "max_iters": st.integers(0, 2**63 - 1),
    "learning_rate": st.floats(0, 1e300),
    "min_lr": st.floats(0, 1e300) | st.none(),
    "decay_lr": st.booleans(),
    "wandb_run_name": st.text(),
    "optimizer": st.sampled_from(["adamw", "muon"]),
}
settings = st.fixed_dictionaries({}, optional=VALUES)


@given(settings, settings)
def test_command_line_wins_over_files_and_files_over_defaults(tmp_path_factory, in_file, given_too):
    lines = "".join(f"{name} = {value!r}\n" for name, value in in_file.items())
    path = write(tmp_path_factory.mktemp("c"), lines)
    # Config files come first, wherever they stand among the arguments.
    found = asdict(configure(TrainConfig, [*flags(**given_too), path]))
    expected = asdict(TrainConfig()) | in_file | given_too
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_numbers_as_people_type_them():
    given = {"max_iters": "1e3", "learning_rate": "2", "min_lr": "none", "bias": "true"}
    c = configure(TrainConfig, [*flags(**given), "--wandb_log"])
    found = [c.max_iters, c.learning_rate, c.min_lr, c.bias, c.wandb_log]
    assert repr(found) == "[1000, 2.0, None, True, True]"


def test_later_file_wins_and_sees_the_values_so_far(tmp_path):
    first = write(tmp_path, "max_iters = 2\n", "a.py")
    later = write(tmp_path, "max_iters = max_iters * 10\n", "b.py")
    assert configure(TrainConfig, [first, later]) == TrainConfig(max_iters=20)


def test_settings_of_earlier_versions_are_accepted_with_a_note_that_they_have_no_effect(
    tmp_path, capsys
):
    for argument in ("--fp8=3", write(tmp_path, "fp8 = 3\n")):
        note_once.cache_clear()
        assert configure(TrainConfig, [argument, argument]) == TrainConfig()
        assert_one_line(capsys.readouterr().err, "fp8 is no longer used", "docs/hacks/fp8.patch")


# A config file, or arguments, and what the error names.
FAULTY = {
    "bias = True\nmax_iters: 3\n": ["c.py:2:", "max_iters = 3"],  # as in YAML
    "max_iters = 1\n\nlearning_rat = 2\n": ["c.py:3:", "learning_rat ", "learning_rate"],
    "\noptimizer = 'c'\n": ["c.py:2:", "optimizer='c'", "adamw, muon"],
    "auto_batch = 1\n": ["c.py:1:", "auto_batch=1", "auto, True, False"],
    "learning_rate = float('nan')\n": ["c.py:1:", "=nan is not float; write it like --learning"],
    "x = \n": ["c.py:1:", "SyntaxError"],
    "def rate():\n    return 1 / 0\nmin_lr = rate()\n": ["c.py:2:", "ZeroDivisionError"],
    "--max_itres=3": ["--max_itres", "did you mean max_iters?"],
    "--max_iters=three": ["--max_iters='three'", "int", "--max_iters=6"],
    "--max_iters": ["--max_iters", "--max_iters=6"],
    "--bias=1": ["--bias=1", "bool"],
    "--max_iters=-1": ["max_iters=-1", "at least 0"],
    "--beta2=1": ["beta2=1.0 must be", "below 1"],
    "--out_dir=": ["--out_dir", "--out_dir=out"],
    "--max_iters 8": ["8", "--key=value"],
    # What other programs call it; never what is spelled alike and means something else.
    "--lr=1": ["--lr", "did you mean learning_rate?"],
    "--iterations=1": ["did you mean max_iters?"],
    "--no-compile": ["--no-compile", "--compile=False"],
    "--vocab_size=9": ["--vocab_size", "tokenizer"],
}


def test_fault_is_one_line_which_names_its_value_and_in_a_file_its_line(tmp_path):
    for fault, named in FAULTY.items():
        argv = [write(tmp_path, fault)] if "\n" in fault else fault.split()
        with raises_one_line(*named, kind=ConfigError):
            configure(TrainConfig, argv)


def test_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for argument in ("--out_dir=~/a", write(tmp_path, "out_dir = '~/a'\n")):
        assert configure(TrainConfig, [argument]).out_dir == f"{tmp_path}/a"


def test_ready_made_runs_parse():
    for path in (ROOT / "config").glob("*.py"):
        assert configure(TrainConfig, [str(path)]) != TrainConfig()


def test_config_file_with_names_and_code_of_its_own_runs_as_it_does_in_nanogpt(tmp_path):
    content = "import time\n_own_prefix = 'ft-'\ndef named(what): return _own_prefix + str(what)\n"
    content += "wandb_run_name = named(time.time())\nbatch_size = 4 * 8\ndevice = 'cuda'\n"
    c = configure(TrainConfig, [write(tmp_path, content), "--device=cpu"])
    assert (c.batch_size, c.device, c.wandb_run_name[:3]) == (32, "cpu", "ft-")
    assert configure(TrainConfig, []).wandb_run_name == TrainConfig().wandb_run_name
    assert not any("_own_prefix" in vars(module) for module in [*sys.modules.values()])


def test_help_shows_every_setting_once_with_its_type_default_and_comment():
    for cls in (TrainConfig, SampleConfig):
        shown = help_text(cls).partition("in a config file:\n")[2]
        found = re.findall(r"^    --(\w+) (\S+) = (.*)", shown, re.M)
        known = settings_of(cls)
        assert sorted(name for name, _, _ in found) == sorted(known)
        for name, kind, text in found:
            default = repr(known[name].default)
            assert (kind, text[: len(default)]) == (known[name].type_name, default)
            assert text.removeprefix(default).strip(), f"{name} has no comment"
