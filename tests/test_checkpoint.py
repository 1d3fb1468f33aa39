from __future__ import annotations

import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, assert_equal
from safetensors.torch import save_file

from deskgpt.checkpoint import archive, store
from deskgpt.checkpoint.optimizer_state import OptimizerState
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.optimizer import make_optimizer
from deskgpt.share.gpt2_weights import load_gpt2
from model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=8, vocab_size=20, n_layer=1, n_head=1, n_embd=8, bias=True)


def state(iter_num: int = 1) -> Checkpoint:
    model = GPT(CONFIG)
    return Checkpoint(
        model=model.state_dict(),
        optimizer=make_optimizer(model, "adamw", 0.1, 1e-3, (0.9, 0.95), 0.95).state_dict(),
        model_args={"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 8, "vocab_size": 20, "bias": True},
        iter_num=iter_num,
        best_val_loss=2.5,
        config={"dataset": "x", "device": "cuda", "learning_rate": 0.1},
        tokenizer={"name": "bytes"},
    )


def test_checkpoints_come_back_as_they_were_saved(tmp_path):
    saved = state(7)
    store.save(saved, tmp_path, best=True)
    for path in (tmp_path, tmp_path / "ckpt.pt", tmp_path / "ckpt_best.pt"):
        loaded = store.load(path)
        assert_equal(vars(loaded), vars(saved) | {"model": dict(saved.model), "path": loaded.path})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "ckpt_best.pt"]


def test_best_checkpoint_outlives_later_ones(tmp_path):
    store.save(state(1), tmp_path, best=True)
    store.save(state(2), tmp_path, best=False)
    assert store.load(tmp_path).iter_num == 2
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 1
    store.save(state(3), tmp_path, best=True)
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 3


def test_nanogpts_checkpoint_is_read_without_its_prefixes_masks_and_machine(tmp_path):
    names = ("optimizer", "model_args", "iter_num", "config")
    saved: dict[str, Any] = {name: value for name, value in vars(state()).items() if name in names}
    saved["model"] = {f"_orig_mod.{k}": v for k, v in GPT(CONFIG).state_dict().items()}
    saved["model"]["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    saved["best_val_loss"] = torch.tensor(2.5)
    torch.save(saved, tmp_path / "ckpt.pt")
    loaded = store.load(tmp_path)
    GPT.from_state(GPTConfig(**loaded.model_args), loaded.model, "out")
    assert loaded.best_val_loss == 2.5
    assert loaded.config == {"dataset": "x", "learning_rate": 0.1}


def test_checkpoint_from_before_the_form_was_saved_says_whether_it_was_compiled(tmp_path):
    saved = vars(state()) | {"compiled": True}
    del saved["form"]
    torch.save(saved, tmp_path / "ckpt.pt")
    assert store.load(tmp_path).form == {"compiled": True}


# ---- accidents -----------------------------------------------------------------------------------------------

SAVE_FOREVER = """
import sys, torch
from deskgpt.checkpoint import store
from pathlib import Path
state = store.load(sys.argv[1])
state.model["padding"] = torch.zeros(2_000_000)
state.iter_num = 0
while True:
    state.iter_num += 1
    store.save(state, Path(sys.argv[2]), best=state.iter_num % 2 == 0)
    print(state.iter_num, flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs SIGKILL")
def test_kill_during_save_keeps_a_loadable_checkpoint(tmp_path):
    torch.save(vars(state()), tmp_path / "state.pt")
    out = tmp_path / "out"
    out.mkdir()
    for attempt in range(4):
        command = [sys.executable, "-c", SAVE_FOREVER, tmp_path / "state.pt", out]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout
            reported = [int(process.stdout.readline()) for _ in range(3)]
            time.sleep(0.007 * attempt)  # into the middle of some later save
            process.send_signal(signal.SIGKILL)
            reported += [int(line) for line in process.stdout.read().split()]
        # What was reported saved is there, or the one that was being saved after it.
        assert store.load(out).iter_num in (reported[-1], reported[-1] + 1)
        best = store.load(out / "ckpt_best.pt").iter_num
        assert best % 2 == 0
        assert best >= reported[-1] - 1


@pytest.mark.skipif(os.name == "nt", reason="needs a file size limit")
def test_full_disk_keeps_the_checkpoint_before_and_says_so(tmp_path):
    store.save(state(1), tmp_path, best=True)
    code = """
import resource, signal, sys, torch
from deskgpt.checkpoint import store
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = store.load(sys.argv[1])
state.model["padding"] = torch.zeros(1_000_000)
state.iter_num = 2
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    store.save(state, Path(sys.argv[1]), best=True)
except OSError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], cwd=ROOT, capture_output=True, text=True)
    (line,) = done.stdout.splitlines()
    assert "ckpt.pt: File too large; free some disk space or choose another --out_dir; the checkpoint before" in line
    assert store.load(tmp_path).iter_num == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ckpt.pt", "ckpt_best.pt"]


def spoil(path: Path, damage: str) -> None:
    """Replaces a checkpoint by something else."""
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "pickle":
        torch.save(vars(state()) | {"config": Path("code that pickle would run")}, path)
    elif damage == "list":
        torch.save([1, 2], path)
    elif damage == "NaN":
        spoiled = vars(state())
        spoiled["model"]["transformer.wte.weight"][3, 3] = torch.nan
        torch.save(spoiled, path)
    elif damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else b"hello world")


DAMAGE = {
    "empty": "is not a readable checkpoint (File is not a zip file)",
    "cut": "is not a readable checkpoint (File is not a zip file)",
    "text": "is not a readable checkpoint (File is not a zip file)",
    "pickle": "is not a readable checkpoint (it holds more than tensors and plain values, which only its maker's code",
    "list": "is not a training checkpoint: it holds no dictionary",
    "NaN": "holds weights or moments that are NaN or infinity",
    "gone": "is missing",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_falls_back_to_the_best_and_says_so_but_not_where_it_is_named(tmp_path, damage):
    store.save(state(1), tmp_path, best=True)
    store.save(state(2), tmp_path, best=False)
    path = tmp_path / "ckpt.pt"
    spoil(path, damage)
    said: list[str] = []
    assert store.load(tmp_path, said.append).iter_num == 1
    (line,) = said
    assert line.startswith(f"{path} {DAMAGE[damage]}")
    assert line.endswith(
        "): going on from ckpt_best.pt, step 1" if "(" in line else ": going on from ckpt_best.pt, step 1"
    )
    with pytest.raises(ValueError, match=r"ckpt\.pt") as e:
        store.load(path)
    assert len(str(e.value).splitlines()) == 1
    assert damage == "gone" or f"--out_dir={tmp_path / 'ckpt_best.pt'} is another" in str(e.value)
    (tmp_path / "ckpt_best.pt").write_bytes(b"as bad")
    with pytest.raises(
        ValueError, match=r"ckpt\.pt .*, and .*ckpt_best\.pt is not .*; restore one of them from a copy"
    ):
        store.load(tmp_path)


def test_damaged_checkpoints_are_kept_aside_and_what_killed_runs_left_is_removed(tmp_path):
    store.save(state(1), tmp_path, best=True)
    for name in ("ckpt.pt.tmp", "ckpt.pt.123-abc.tmp", "ckpt_best.pt.123-abc.tmp"):
        (tmp_path / name).write_text("")
    (tmp_path / "notes.tmp").write_text("the user's")
    (tmp_path / "ckpt_best.pt").write_text("damaged")
    said: list[str] = []
    store.take_over(tmp_path, said.append)
    assert said == [
        f"{tmp_path / 'ckpt_best.pt'} is not a readable checkpoint (File is not a zip file): "
        "it is kept as ckpt_best_damaged.pt"
    ]
    assert store.load(tmp_path / "ckpt_best.pt").iter_num == 1  # now that of ckpt.pt, the only good one
    names = ["ckpt.pt", "ckpt_best.pt", "ckpt_best_damaged.pt", "notes.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names


def test_resumed_run_knows_the_best_loss_of_the_folder_on_the_same_data(tmp_path):
    best = state(9)
    best.best_val_loss = 1.0
    store.save(best, tmp_path, best=True)
    store.save(state(5), tmp_path, best=False)
    assert store.resume(tmp_path).best_val_loss == 1.0
    assert store.load(tmp_path).best_val_loss == 2.5
    for other in ({"config": {"dataset": "other"}}, {"facts": {"val data": {"tokens": 7}}}):
        store.save(replace(best, **other), tmp_path, best=True)
        store.save(state(5), tmp_path, best=False)
        assert store.resume(tmp_path).best_val_loss == 2.5


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    store.save(state(1), tmp_path, best=True)
    bad = state(2)
    bad.model["lm_head.weight"][0, 0] = torch.inf
    with pytest.raises(
        ValueError, match=r"ckpt\.pt is not written: weights or moments hold NaN or infinity; the check"
    ):
        store.save(bad, tmp_path, best=True)
    assert store.load(tmp_path).iter_num == store.load(tmp_path / "ckpt_best.pt").iter_num == 1


def test_what_could_not_be_read_back_is_not_written(tmp_path):
    store.save(state(1), tmp_path, best=False)
    before = (tmp_path / "ckpt.pt").read_bytes()
    for entry in ({1}, np.float64(1), np.ones(2), torch.Size([1]), torch.half, torch.ones(2, dtype=torch.cfloat)):
        with pytest.raises(ValueError, match=r"ckpt\.pt is not written: a (value|tensor) in it is .*; the checkpoint"):
            store.save(replace(state(2), parts={"mine": {"entry": entry}}), tmp_path, best=False)
    assert (tmp_path / "ckpt.pt").read_bytes() == before
    for dtype in archive.DTYPES:
        store.save(replace(state(2), parts={"mine": {"entry": torch.ones(2).to(dtype)}}), tmp_path, best=False)
        parts = store.load(tmp_path).parts
        assert parts is not None
        assert parts["mine"]["entry"].dtype == dtype


def test_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"ckpt\.pt: no such checkpoint; is --out_dir right\?"):
        store.load(tmp_path)


def test_earlier_run_is_set_aside_not_overwritten(tmp_path):
    names = (store.NAME, "log.jsonl")
    assert store.set_aside(tmp_path, names) is None
    for n in (1, 2):
        (tmp_path / "ckpt.pt").write_text(str(n))
        assert store.set_aside(tmp_path, names) == tmp_path / f"previous-{n}"
        assert (tmp_path / f"previous-{n}" / "ckpt.pt").read_text() == str(n)
    assert not (tmp_path / "ckpt.pt").exists()


# ---- damage and strangers' files -----------------------------------------------------------------------------


def damaged(content: bytes, draw: random.Random) -> bytes:
    """content with one piece of damage, anywhere."""
    at = draw.randrange(len(content))
    n = min(draw.choice((1, 2, 8, 512, 4096)), len(content) - at)
    end = at + n
    return draw.choice(
        (
            content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
            content[:at] + draw.randbytes(n) + content[end:],
            content[:at] + bytes(n) + content[end:],
            content[:at],
            content[at:],
            content[:at] + content[end:],
            content[:at] + draw.randbytes(n) + content[at:],
            content + draw.randbytes(n),
        )
    )


def test_no_damage_to_a_checkpoint_is_silent(tmp_path):
    store.save(state(), tmp_path, best=False)
    path = tmp_path / "ckpt.pt"
    content = path.read_bytes()
    draw = random.Random(1)
    for _ in range(400):
        spoiled = damaged(content, draw)
        path.write_bytes(spoiled)
        if spoiled == content:
            continue
        with pytest.raises(ValueError, match=r"^\S+ckpt\.pt is not a (readable|training) checkpoint") as e:
            store.load(tmp_path)
        assert len(str(e.value).splitlines()) == 1


def test_every_bit_of_the_checksum_counts(tmp_path):
    store.save(state(), tmp_path, best=False)
    path = tmp_path / "ckpt.pt"
    content = path.read_bytes()
    for at in range(len(content) - archive.COMMENT_BYTES - 4, len(content)):
        spoiled = bytearray(content)
        spoiled[at] ^= 1
        path.write_bytes(spoiled)
        with pytest.raises(ValueError, match="is not a readable checkpoint"):
            store.load(tmp_path)


def test_damage_to_a_file_without_a_checksum_gives_no_traceback_and_leaves_the_tensors_as_they_were(tmp_path):
    path = tmp_path / "ckpt.pt"
    torch.save(vars(state()), path)
    content = path.read_bytes()
    expected = store.load(tmp_path)
    model = {k: w.clone() for k, w in expected.model.items()}
    draw = random.Random(2)
    for _ in range(200):
        path.write_bytes(damaged(content, draw))
        with suppress(ValueError):
            assert_equal(store.load(tmp_path).model, model)


def test_torch_and_zip_tools_read_what_is_written(tmp_path):
    store.save(state(3), tmp_path, best=False)
    path = tmp_path / "ckpt.pt"
    for mmap in (False, True):
        assert torch.load(path, weights_only=True, mmap=mmap)["iter_num"] == 3
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None
        assert file.comment.startswith(b"deskgpt sha256 ")


def with_pickle(path: Path, content: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    """An archive of torch.save's with another pickle and one storage of 16 floats."""
    saved = io.BytesIO()
    torch.save({"a": torch.zeros(16)}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("data.pkl") else old.read(name))


def tensor_pickle(size: int, stride: int) -> bytes:
    """The pickle of a checkpoint whose only weight has these, over a storage of 16 floats."""
    saved = vars(state()) | {"model": {"w": torch.zeros(16).as_strided((3,), (5,))}}
    file = io.BytesIO()
    torch.save(saved, file)
    with zipfile.ZipFile(file) as archive_:
        content = archive_.read("archive/data.pkl")
    before = b"K\x03\x85"  # the tuple (3,)
    assert before in content
    return content.replace(before, b"\x8a\x05" + size.to_bytes(5, "little") + b"\x85").replace(
        b"K\x05\x85", b"K" + bytes([stride]) + b"\x85"
    )


ORDERED = b"ccollections\nOrderedDict\nq\x01"
STRANGE = {
    "bytearray": b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\xe4\x0bT\x02\x85R.",  # of 10**10 bytes
    "code": b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
    "copies of a large part": b"\x80\x02]q\x00" + ORDERED + b"h\x00\x85R.",
    "an alias of the class": b"\x80\x02" + ORDERED + b"q\x02h\x02)\x85R.",
    "many attributes": b"\x80\x02" + ORDERED + b")Rq\x02}b}b}b}b}b}b}b}b.",
    "no end": b"\x80\x02}",
    "memo": b"\x80\x02h\x07.",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "nested": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "doubled": b"\x80\x02]q\x00"
    + b"".join(b"]q" + bytes([i]) + b"(h%ch%ce" % (i - 1, i - 1) for i in range(1, 100))
    + b".",
    "set": b"\x80\x04\x8f.",
    "absurd size": b"\x80\x02" + b"N0" * 2**22 + b"}.",
    "large number": b"\x80\x02}X\x01\x00\x00\x00a\x8a\x10" + b"\x7f" * 16 + b"s.",
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_pickles_are_refused_before_they_take_memory(tmp_path, kind):
    with_pickle(tmp_path / "ckpt.pt", STRANGE[kind])
    with pytest.raises(ValueError, match=r"ckpt\.pt is not a (readable|training) checkpoint") as e:
        store.load(tmp_path)
    assert len(str(e.value).splitlines()) == 1


@pytest.mark.parametrize(("size", "stride"), [(2**38, 0), (2**38, 1), (17, 0)])
def test_tensors_larger_than_the_file_are_refused(tmp_path, size, stride):
    with_pickle(tmp_path / "ckpt.pt", tensor_pickle(size, stride))
    with pytest.raises(ValueError, match="has more numbers than the file|not resizable|out of bounds"):
        store.load(tmp_path)


def test_compressed_archives_are_refused(tmp_path):
    with_pickle(tmp_path / "ckpt.pt", b"\x80\x02}.", zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="it is compressed"):
        store.load(tmp_path)


WRONG: dict[str, tuple[Any, ...]] = {
    "iter_num": (-1, 2**63, True, 1.0, None),
    "best_val_loss": (math.nan, "1", None, torch.ones(2)),
    "model": ([], {"w": 3}, {3: torch.ones(1)}, {"w": torch.ones(1, dtype=torch.complex64)}),
    "model_args": ({"n_layer": 10**9}, {"vocab_size": 10**9, "n_embd": 8}),
    "config": (None, {"a": {"b"}}),
    "scaler": ({"scale": 1.0}, 3, {"scale": math.inf, "growth_factor": 2.0, "backoff_factor": 0.5}),
    "train_tokens": ("many", 2.5),
    "tokenizer": ("bytes",),
}


@pytest.mark.parametrize("name", WRONG)
def test_entries_of_other_types_and_ranges_are_refused(tmp_path, name):
    for value in WRONG[name]:
        torch.save(vars(state()) | {name: value}, tmp_path / "ckpt.pt")
        with pytest.raises(ValueError, match=r"ckpt\.pt is not a (training|readable) checkpoint"):
            store.load(tmp_path)


def test_weights_that_are_integers_are_refused(tmp_path):
    """As buffers of a model's own may be, but no parameters."""
    saved = vars(state())
    saved["model"]["transformer.wpe.weight"] = torch.ones(8, 8, dtype=torch.int64)
    torch.save(saved, tmp_path / "ckpt.pt")
    loaded = store.load(tmp_path)
    with pytest.raises(ValueError, match=r"^out: these weights are not a GPT of .*transformer\.wpe\.weight"):
        GPT.from_state(GPTConfig(**loaded.model_args), store.weights_of(loaded), "out")


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_states_that_do_not_fit_the_parameters_are_refused(kind):
    def trained() -> OptimizerState:
        model = GPT(CONFIG)
        optimizer = make_optimizer(model, kind, 0.1, 1e-3, (0.9, 0.95), 0.95)
        kept = OptimizerState(optimizer, model)
        x = torch.zeros(1, 8, dtype=torch.int64)
        model(x, x)[1].backward()
        optimizer.step()
        return kept

    kept = trained()
    kept.load(trained().state(), "out")
    kept.load(trained().state() | {"state": {}}, "out")  # of a run without a step
    changes: list[Any] = [
        {"state": None},
        {"param_groups": None},
        {"param_groups": [3, 3]},
        {"param_groups": [{"params": "ab"}, {"params": []}]},
        {"param_groups": []},
    ]
    for name, value in {
        "exp_avg": torch.zeros(3),
        "step": torch.zeros(2),
        "exp_avg_sq": None,
        "more": 3,
    }.items():
        state_of_parameters = trained().state()["state"]
        changes.append({"state": state_of_parameters | {0: state_of_parameters[0] | {name: value}}})
    for step in (-1, torch.tensor(math.nan)):
        changes.append({"state": state_of_parameters | {0: state_of_parameters[0] | {"step": step}}})
    changes.append({"state": {i: s for i, s in state_of_parameters.items() if i}})
    for change in changes:
        with pytest.raises(ValueError, match="^out: the optimizer state does not fit the model|^out was trained with"):
            kept.load(trained().state() | change, "out")


class Remembering(torch.optim.SGD):
    """SGD whose steps depend on what it keeps in an attribute, which begins as first(parameters)."""

    def __init__(self, model: GPT, first: Callable[[list[torch.Tensor]], Any]) -> None:
        super().__init__(model.parameters(), lr=0.1, momentum=0.9)
        self.kept = first(list(model.parameters()))
        self.unit = torch.device("cpu")  # no state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        p = self.param_groups[0]["params"][0]
        if isinstance(self.kept, dict):
            self.kept[p] = p.grad.clone() + self.kept.get(p, 0)
            p.grad += self.kept[p]
        elif isinstance(self.kept, tuple):
            self.kept = (*self.kept, len(self.kept))
            p.grad += sum(self.kept)
        elif isinstance(self.kept, set):
            self.kept.add(len(self.kept))
            p.grad += sum(self.kept)
        elif isinstance(self.kept, list):
            self.kept.append(p.grad.clone())
            p.grad += torch.stack(self.kept).sum(0)
        else:
            self.kept = self.kept + 1
            p.grad += self.kept
        super().step()


def one_step(kept: OptimizerState) -> None:
    x = torch.arange(8)[None]
    kept.optimizer.zero_grad()
    kept.model(x, x)[1].backward()
    kept.optimizer.step()


FIRST: list[Callable[[list[torch.Tensor]], Any]] = [lambda ps: {}, lambda ps: (), lambda ps: set(), lambda ps: []]
FIRST += [lambda ps: 0.5, lambda ps: torch.ones(3, 8).sum(0)]


@pytest.mark.parametrize("first", FIRST, ids=["dict", "tuple", "set", "list", "float", "tensor"])
def test_optimizer_that_keeps_its_state_in_an_attribute_goes_on_exactly(first, tmp_path):
    def begun() -> OptimizerState:
        torch.manual_seed(0)
        model = GPT(CONFIG)
        return OptimizerState(Remembering(model, first), model)

    whole = begun()
    for step in range(4):
        if step == 2:
            saved = replace(state(), model=whole.model.state_dict(), optimizer=whole.state())
            store.save(saved, tmp_path, best=False)
        one_step(whole)
    again = begun()
    loaded = store.load(tmp_path)
    store.restore_weights(again.model, loaded)
    again.load(loaded.optimizer, "out")
    for _ in range(2):
        one_step(again)
    assert_equal(again.model.state_dict(), whole.model.state_dict())
    assert_equal(again.state(), whole.state())


UNKNOWN: list[Callable[[list[torch.Tensor]], Any]] = [lambda ps: deque([1.0]), lambda ps: torch.Generator()]
UNKNOWN += [lambda ps: [{"a": deque()}]]


@pytest.mark.parametrize("first", UNKNOWN, ids=["deque", "generator", "nested"])
def test_optimizer_whose_state_a_checkpoint_would_lose_is_refused(first):
    model = GPT(CONFIG)
    with pytest.raises(ValueError, match=r"^Remembering keeps a \w+ in kept, which .* a state_dict .* of its own$"):
        OptimizerState(Remembering(model, first), model)
    later = OptimizerState(Remembering(model, lambda ps: None), model)
    later.optimizer.kept = first(list(model.parameters()))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="^Remembering keeps a "):
        later.state()


def test_optimizer_state_of_other_groups_is_refused():
    def with_groups(groups: list[list[int]]) -> OptimizerState:
        model = GPT(CONFIG)
        ps = list(model.parameters())
        kept = OptimizerState(
            torch.optim.SGD([{"params": [ps[i] for i in g]} for g in groups], lr=0.1, momentum=0.9), model
        )
        one_step(kept)
        return kept

    n = len(list(GPT(CONFIG).parameters()))
    saved = with_groups([[*range(n)]]).state()
    with_groups([[*range(n)]]).load(saved, "out")
    for groups in ([[0], [*range(1, n)]], [[*range(n - 1)]], [[*range(1, n), 0]]):
        with pytest.raises(ValueError, match="^out: the optimizer state does not fit the model") as e:
            with_groups(groups).load(saved, "out")
        assert "\n" not in str(e.value)


# ---- GPT-2 folders -------------------------------------------------------------------------------------------

PLAIN = {"model_type": "gpt2", "n_layer": 1, "n_head": 1, "n_embd": 8, "n_positions": 8, "vocab_size": 20}


def gpt2_folder(folder: Path, **changes: Any) -> str:
    (folder / "config.json").write_text(json.dumps(PLAIN | changes))
    weights = {k.removeprefix("transformer."): v.contiguous() for k, v in GPT(CONFIG).state_dict().items()}
    del weights["lm_head.weight"]  # as in OpenAI's files on the hub, which also lack the prefix
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    save_file(
        {k: v.t().contiguous() if k.endswith(conv1d) else v for k, v in weights.items()}, folder / "model.safetensors"
    )
    return str(folder)


def test_gpt2_folder_as_the_hub_has_it_loads(tmp_path):
    args, weights = load_gpt2(gpt2_folder(tmp_path))
    model = GPT.from_state(GPTConfig(**args), weights, "gpt2")
    assert model.config == CONFIG
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize(
    "changes",
    [{"model_type": "llama"}, {"activation_function": "relu"}, {"layer_norm_epsilon": 1e-6}, {"n_inner": 12}],
)
def test_relatives_of_gpt2_that_compute_otherwise_are_refused(tmp_path, changes):
    with pytest.raises(ValueError, match=f"not a plain GPT-2: .*{next(iter(changes))}"):
        load_gpt2(gpt2_folder(tmp_path, **changes))


def test_incomplete_gpt2_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json and no model\.safetensors; name one of gpt2"):
        load_gpt2(str(tmp_path))
    gpt2_folder(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 300)
    with pytest.raises(ValueError, match="a damaged file in .*fetch it again"):
        load_gpt2(str(tmp_path))
    gpt2_folder(tmp_path)
    for content in ("{", "[3]", "7"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match="a damaged file in .*fetch it again"):
            load_gpt2(str(tmp_path))
    (tmp_path / "config.json").write_text('{"n_layer": 1}')
    with pytest.raises(ValueError, match="lacks 'n_head'"):
        load_gpt2(str(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        load_gpt2(str(tmp_path))


def test_weights_that_cannot_be_downloaded_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="init_from=gpt2-xl: the weights are not cached.*or give a local folder"):
        load_gpt2("gpt2-xl")
