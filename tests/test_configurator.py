from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from conftest import ROOT, assert_one_line
from hypothesis import given
from hypothesis import strategies as st

from configurator import configure, help_text
from deskgpt.system.errors import ConfigError
from deskgpt.system.files import note_once
from deskgpt.system.settings import FilePath, Range, check_fields, settings_of
from sample import SampleConfig
from train import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Settings:
    retired: ClassVar[set[str]] = {"depth"}
    # numbers
    count: int = 1  # how many
    rate: Annotated[float, Range(-math.inf)] = 0.5  # per second
    limit: Annotated[float | None, Range(-math.inf)] = None  # None = no limit
    share: Annotated[float, Range(0, below=1)] = 0.9  # of all
    # others
    on: bool = False  # or off
    name: str = "x"  # of the thing
    folder: FilePath = "out"  # where it is
    kind: Literal["a", "b"] = "a"  # the first, or the second

    def __post_init__(self) -> None:
        check_fields(self)


def write(folder: Path, content: str, name: str = "c.py") -> str:
    (folder / name).write_text(content)
    return str(folder / name)


# ---- values --------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
values = st.one_of(
    st.tuples(st.just("count"), st.integers(0, 2**63 - 1)),
    st.tuples(st.just("rate"), finite),
    st.tuples(st.just("limit"), finite | st.none()),
    st.tuples(st.just("on"), st.booleans()),
    st.tuples(st.just("name"), st.text()),
    st.tuples(st.just("kind"), st.sampled_from("ab")),
)


@given(values, values)
def test_command_line_wins_over_files_and_files_over_defaults(tmp_path_factory, in_file, given_too):
    path = tmp_path_factory.mktemp("c") / "c.py"
    path.write_text(f"{in_file[0]} = {in_file[1]!r}\n", encoding="utf-8")
    # Config files come first, wherever they stand among the arguments.
    got = configure(Settings, [f"--{given_too[0]}={given_too[1]}", str(path)])
    expected = {f.name: f.default for f in fields(Settings)} | dict([in_file]) | dict([given_too])
    found = {f.name: getattr(got, f.name) for f in fields(Settings)}
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


def test_numbers_as_people_type_them():
    c = configure(Settings, ["--count=1e3", "--rate=2", "--on", "--limit=none"])
    assert (c.count, type(c.count), c.rate, type(c.rate), c.on, c.limit) == (1000, int, 2.0, float, True, None)
    assert configure(Settings, ["--on=true"]).on is True


# ---- files ---------------------------------------------------------------------------------------------------


def test_later_file_wins_and_sees_the_values_so_far(tmp_path):
    files = [write(tmp_path, "count = 2\n", "a.py"), write(tmp_path, "count = count * 10\n", "b.py")]
    assert configure(Settings, files) == Settings(count=20)


def test_settings_of_earlier_versions_are_accepted_with_a_note_that_they_have_no_effect(tmp_path, capsys):
    for argument in ("--depth=3", write(tmp_path, "depth = 3\n")):
        note_once.cache_clear()
        assert configure(Settings, [argument, argument]) == Settings()
        assert_one_line(capsys.readouterr().err, "depth", "no longer used")


# A config file, or an argument, and what its error names.
FAULTY_FILES: dict[str, list[str]] = {
    "rate = 1.0\ncount: 3\n": [":2:", "count = 3"],  # as in YAML
    "count = 1\n\nrat = 2\n": [":3:", "rat ", "rate"],
    "count = 1.5\n": [":1:", "count=1.5", "int"],
    "count = 1\nexit(3)\n": [":2:", "SystemExit: 3"],
    "\nkind = 'c'\n": [":2:", "kind='c'", "a, b"],
    "x = \n": [":1:", "SyntaxError"],
    "count = 1\nrate = 1 / 0\n": [":2:", "ZeroDivisionError"],
}
FAULTY_ARGUMENTS: dict[str, list[str]] = {
    "--cuont=3": ["--cuont", "did you mean count?"],
    "--qqq=3": ["--qqq", "--help"],
    "--count=three": ["--count='three'", "int", "--count=1"],
    "--count": ["--count", "--count=1"],
    "--rate=1e999": ["--rate=inf", "float"],
    "--on=1": ["--on=1", "bool"],
    "--count=-1": ["count=-1", "at least 0"],
    "--share=1": ["share=1", "below 1"],
    "--folder=": ["--folder", "--folder=out"],
    "--folder=~nobody-of-this-name/a": ["~nobody-of-this-name"],
    "--count 8": ["8", "--key=value"],
    "-count=3": ["-count=3", "--key=value"],
    "config": ["config", "is not a config file"],
}


@pytest.mark.parametrize(("fault", "named"), [*FAULTY_FILES.items(), *FAULTY_ARGUMENTS.items()])
def test_fault_is_one_line_which_names_its_value_and_in_a_file_its_line(tmp_path, fault, named):
    path = write(tmp_path, fault)
    with pytest.raises(ConfigError) as e:
        configure(Settings, [path] if fault in FAULTY_FILES else fault.split(" "))
    assert_one_line(e.value, *named, *[path] * (fault in FAULTY_FILES))


def test_home_folder_is_meant_by_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    for argument in ("--folder=~/a", write(tmp_path, "folder = '~/a'\n")):
        assert configure(Settings, [argument]).folder == f"{tmp_path}/a"


# ---- the scripts' own settings -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_ready_made_runs_parse(path):
    c = configure(TrainConfig, [str(path), "--batch_size=2"])
    assert c.batch_size == 2
    assert c != TrainConfig(batch_size=2)


def test_config_file_with_names_and_code_of_its_own_runs_as_it_does_in_nanogpt(tmp_path):
    content = "import time\n_prefix = 'ft-'\ndef named(what): return _prefix + str(what)\n"
    content += "wandb_run_name = named(time.time())\ngradient_accumulation_steps = 4 * 8\ndevice = 'cuda'\n"
    c = configure(TrainConfig, [write(tmp_path, content), "--device=cpu"])
    assert (c.gradient_accumulation_steps, c.device, c.wandb_run_name[:3]) == (32, "cpu", "ft-")
    assert configure(TrainConfig, []).wandb_run_name == TrainConfig().wandb_run_name
    assert not any("_prefix" in vars(module) for module in list(sys.modules.values()))


@pytest.mark.parametrize("cls", [TrainConfig, SampleConfig])
def test_help_shows_every_setting_once_with_its_type_default_and_comment(cls):
    shown = help_text(cls).partition("in a config file:\n")[2]
    found = re.findall(r"^    --(\w+) (\S+) = (.*)", shown, re.M)
    assert sorted(name for name, _, _ in found) == sorted(f.name for f in fields(cls))
    for name, kind, text in found:
        setting = settings_of(cls)[name]
        assert kind == setting.type_name
        assert text.startswith(repr(setting.default))
        assert text.removeprefix(repr(setting.default)).strip(), f"{name} has no comment"
