"""CUDA graphs of a run's passes: equal to the plain loop, or refused with a line.

pytest tests/test_cuda_graph.py                              # on a card; without one they skip
python bench/pretend_card.py --card H100 -m pytest tests/test_cuda_graph.py
"""

from __future__ import annotations

import functools
import itertools
import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import TINY, assert_equal, assert_same_run, events, tiny, weights
from tiny_models import make, tokens
from torch import Tensor

import model as model_module
import train
from deskgpt.compute import CudaGraph
from deskgpt.stopping import StopConditions, signal_handler
from model import GPT, Block, GPTConfig
from train import main

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")

CUDA = torch.device("cuda")
CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=128, dropout=0.1)
RUN = TINY | {
    "n_embd": 64,
    "block_size": 32,
    "device": "cuda",
    "learning_rate": 1e-3,
    "auto_batch": False,
}
RUN |= {"gradient_accumulation_steps": 3, "dropout": 0.2, "max_iters": 8, "eval_interval": 4}
MICRO_BATCHES = 10


@pytest.fixture(autouse=True)
def _default_stream():
    """A run sets its own stream. These tests leave the one that was there."""
    before = torch.cuda.current_stream()
    yield
    torch.cuda.set_stream(before)


@pytest.fixture
def replays(monkeypatch):
    """Return a list that grows by one with each replay of a graph."""
    done: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        done.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return done


# ---- runs ----------------------------------------------------------------------------------------


def trained(data, out_dir, **settings):
    main(tiny(data, out_dir, **(RUN | settings)))
    return [(e["loss"], e["grad_norm"]) for e in events(out_dir, "iter")]


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "compile": True},
        {"dtype": "float32", "optimizer": "muon"},
        {"dtype": "float16", "gradient_accumulation_steps": 1},
        {"dtype": "bfloat16", "deterministic": True},
    ],
    ids=["compiled", "muon", "float16", "deterministic"],
)
def test_run_with_graphs_is_the_run_without_bit_for_bit(settings, chars, tmp_path, replays):
    plain = trained(chars, tmp_path / "plain", cuda_graph=False, **settings)
    assert not replays
    assert trained(chars, tmp_path / "graph", **settings) == plain
    steps = 8 - 2  # the first two have no graph
    # Evaluations have replays, too
    assert len(replays) > steps * settings.get("gradient_accumulation_steps", 3)
    assert_same_run(tmp_path / "plain", tmp_path / "graph")
    assert [events(tmp_path / name, "start")[0]["cuda_graph"] for name in ("plain", "graph")] == [
        False,
        True,
    ]
    assert not events(tmp_path / "graph", "warning")


def test_signal_a_save_and_a_resumed_run_leave_no_trace(chars, tmp_path, monkeypatch):
    plain = trained(chars, tmp_path / "plain", cuda_graph=False)
    halves = tmp_path / "halves"
    handled = iter([None] * 5 + [signal.SIGTERM])
    poll = StopConditions.check

    def with_signal(self, can_save, saved_at):
        if can_save:
            signal_handler.signal = next(handled, None)
        return poll(self, can_save, saved_at)

    monkeypatch.setattr(StopConditions, "check", with_signal)
    with pytest.raises(SystemExit):
        trained(chars, halves)
    monkeypatch.undo()
    signal_handler.signal = None
    assert len(events(halves, "iter")) < 8
    main(tiny(chars, halves, **RUN, init_from="resume"))
    found = {e["iter"]: (e["loss"], e["grad_norm"]) for e in events(halves, "iter")}
    assert [found[step] for step in range(8)] == plain
    assert_equal(weights(tmp_path / "plain"), weights(halves))


def test_recording_that_does_not_fit_leaves_the_run_without_a_graph(
    chars, tmp_path, monkeypatch, replays
):
    def starved(graph, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    plain = trained(chars, tmp_path / "plain", cuda_graph=False)
    monkeypatch.setattr(torch.cuda, "graph", starved)
    assert trained(chars, tmp_path / "graph") == plain
    assert not replays
    why = "it does not fit into memory"
    lines = {e["text"] for e in events(tmp_path / "graph", "warning")}
    assert lines == {f"no CUDA graph: {why}", f"evaluations without a CUDA graph: {why}"}


@pytest.mark.parametrize("auto_batch", [True, False])
def test_run_out_of_memory_after_many_steps_keeps_them(auto_batch, chars, tmp_path, monkeypatch):
    """It goes on in half the micro-batch, or is saved for a resumed run."""
    settings = {"auto_batch": auto_batch, "cuda_graph": False, "eval_interval": 100}
    backward, calls = torch.Tensor.backward, itertools.count()

    def starved(x, *args, **kwargs):
        if next(calls) == (5 if auto_batch else 16):  # in step 5
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(x, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", starved)
    c = tiny(chars, tmp_path, **RUN | settings)
    if auto_batch:
        train.main_that_fits(c)
        assert events(tmp_path, "out_of_memory")[0]["iter"] == 5
    else:
        with pytest.raises(ValueError, match="out of memory"):
            train.main_that_fits(c)
        main(tiny(chars, tmp_path, **RUN | {"init_from": "resume"}))
    assert events(tmp_path, "save")[0]["iter"] == 5
    assert [e["iter"] for e in events(tmp_path, "iter")] == [*range(8)]


# ---- changed models ------------------------------------------------------------------------------

COUNT = 0
HISTORY: list[int] = []
PYTHON = random.Random(0)


class Edited(Block):
    """A block whose forward pass a test changes."""

    total = 0

    def __init__(self, config):
        super().__init__(config)
        self.count = 0
        self.window = 32
        self.kept = [torch.zeros(())]
        self.numpy_generator = np.random.default_rng(0)
        self.torch_generator = torch.Generator().manual_seed(0)
        self.table = {"scale": 1.0}


def counter(block, x):
    block.count += 1
    return block.count


def class_counter(block, x):
    Edited.total += 1
    return Edited.total


def global_counter(block, x):
    global COUNT
    COUNT += 1
    return COUNT


def global_list(block, x):
    HISTORY.append(1)
    return len(HISTORY)


def dictionary(block, x):
    block.table["scale"] += 0.01
    return block.table["scale"]


def keeps_a_tensor(block, x):
    before = block.kept[-1].to(CUDA)
    block.kept = [x.detach()]
    return before


ON_THE_CPU = "draws random numbers on the CPU"
# Returns a factor's difference from 1 in hundredths; and what the line names.
STATEFUL = {
    "counter": (counter, "each pass changes transformer.h.0.count"),
    "class_counter": (class_counter, "Edited.total"),
    "global_counter": (global_counter, "COUNT"),
    "global_list": (global_list, "HISTORY"),
    "dictionary": (dictionary, "transformer.h.0.table"),
    "keeps_a_tensor": (keeps_a_tensor, "transformer.h.0.kept"),
    "python_numbers": (lambda block, x: random.random(), ON_THE_CPU),
    "numpy_numbers": (lambda block, x: float(np.random.rand()), ON_THE_CPU),
    "numpy_generator": (
        lambda block, x: float(block.numpy_generator.random()),
        "transformer.h.0.numpy_generator",
    ),
    "cpu_numbers": (lambda block, x: torch.rand(()).numpy().item(), ON_THE_CPU),
    "cpu_generator": (
        lambda block, x: torch.rand((), generator=block.torch_generator).numpy().item(),
        "transformer.h.0.torch_generator",
    ),
    "global_generator": (lambda block, x: PYTHON.random(), "PYTHON"),
    "waits": (lambda block, x: x.detach().float().mean().item(), "cannot be recorded"),
}


def edited_model(monkeypatch, edit=None) -> GPT:
    """Return the same small model each time; edit(block, x) changes the input of each block."""
    global COUNT
    COUNT = Edited.total = 0
    HISTORY.clear()
    PYTHON.seed(0)
    np.random.seed(0)
    monkeypatch.setattr(model_module, "Block", Edited)

    def forward(self, x, context):
        return Block.forward(self, x * (1 + edit(self, x) / 100), context)

    if edit is not None:
        monkeypatch.setattr(Edited, "forward", forward)
    return make(CONFIG).to(CUDA)


def train_micro_batches(
    model, *, graphed, between=lambda model, i: None, backward=lambda model, loss: loss.backward()
):
    """Return the losses of micro-batches, two of which make a step; the lines of refusals; and the
    recordings.
    """
    lines: list[str] = []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)

    def run(x: Tensor, y: Tensor, weight: float) -> dict[str, Tensor]:
        loss = model(x, y)[1] * weight
        backward(model, loss)
        return {"loss": loss.detach()}

    micro_batch = CudaGraph(run, model, enabled=graphed, on_refusal=lines.append)
    found = []
    for i in range(MICRO_BATCHES):
        between(model, i)
        T = 16 if between is shorter and i >= 6 else CONFIG.block_size
        ids = (tokens(2, T + 1, vocab=CONFIG.vocab_size) + i) % CONFIG.vocab_size
        random.seed(i)
        torch.manual_seed(i)
        loss = micro_batch(ids[:, :-1].to(CUDA), ids[:, 1:].to(CUDA), 0.5)["loss"]
        found.append(loss.item())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return found, lines, micro_batch.recordings


def compared(monkeypatch, edit=None, prepare=lambda model: None, **options):
    """Return lines and recordings of a model with graphs, whose losses and weights are those of the
    plain loop.
    """
    plain_model = edited_model(monkeypatch, edit)
    prepare(plain_model)
    plain, _, _ = train_micro_batches(plain_model, graphed=False, **options)
    graphed_model = edited_model(monkeypatch, edit)
    prepare(graphed_model)
    found, lines, recordings = train_micro_batches(graphed_model, graphed=True, **options)
    assert found == plain
    assert_equal(dict(plain_model.state_dict()), dict(graphed_model.state_dict()))
    return lines, recordings


def test_evaluation_that_runs_out_of_memory_frees_the_graphs_and_is_repeated():
    model = make(replace(CONFIG, dropout=0.0)).to(CUDA)
    ids = tokens(2, 33, vocab=CONFIG.vocab_size).to(CUDA)
    batch = (ids[:, :-1], ids[:, 1:])
    calls = itertools.count()

    def train_pass(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        loss = model(x, y)[1]
        loss.backward()
        return {"loss": loss.detach()}

    def eval_pass(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if next(calls) == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"loss": model(x, y)[1]}

    training = CudaGraph(train_pass, model, enabled=True, eager_calls=1)
    evaluation = CudaGraph(eval_pass, model, enabled=True, shares_memory_with=training)
    training(*batch)
    training(*batch)
    assert (training.recordings, training.drops) == (1, 0)
    with torch.no_grad():
        loss = evaluation(*batch)["loss"]
    torch.testing.assert_close(loss, model(*batch)[1].detach())
    assert evaluation.drops == 1
    assert next(calls) == 2


def test_plain_model_is_replayed_and_the_recorded_pass_is_one_of_the_run(monkeypatch, replays):
    passes = []
    forward = GPT.forward

    def counted(*args):
        passes.append(1)
        return forward(*args)

    monkeypatch.setattr(GPT, "forward", counted)
    assert compared(monkeypatch) == ([], 1)
    assert len(replays) == MICRO_BATCHES - 2
    # Of the plain loop; and two without a graph and the one that is recorded.
    assert len(passes) == MICRO_BATCHES + 3


def test_passes_in_which_ranks_exchange_gradients_are_not_replayed(monkeypatch, replays):
    """DDP says so by an attribute; its own exchange needs several cards."""
    model = edited_model(monkeypatch)
    net = SimpleNamespace(require_backward_grad_sync=False)
    calls = []

    def run(net, x):
        calls.append(net.require_backward_grad_sync)
        model(x, x)[1].backward()
        return {}

    micro_batch = CudaGraph(functools.partial(run, net), model, enabled=True)
    for i in range(12):
        net.require_backward_grad_sync = i % 3 == 2
        micro_batch(tokens(2, 32, vocab=CONFIG.vocab_size).to(CUDA))
    # Two without a graph, one recorded, all that exchange.
    assert calls == [False, False, True, False, True, True, True]
    assert len(replays) == 8 - 2


@pytest.mark.parametrize(("edit", "why"), STATEFUL.values(), ids=STATEFUL)
def test_model_whose_python_code_changes_something_is_refused_by_name(edit, why, monkeypatch):
    (line,), _ = compared(monkeypatch, edit)
    assert why in line


def add_forward_hook(model):
    calls = itertools.count(1)
    model.transformer.ln_f.register_forward_hook(
        lambda module, args, out: out * (1 + next(calls) / 100)
    )


def add_gradient_hook(model):
    calls = itertools.count(1)
    model.lm_head.weight.register_hook(lambda gradient: gradient * (1 + next(calls) / 100))


@pytest.mark.parametrize("prepare", [add_forward_hook, add_gradient_hook])
def test_hook_whose_state_cannot_be_seen_is_refused(prepare, monkeypatch):
    (line,), _ = compared(monkeypatch, prepare=prepare)
    assert "hook" in line


def test_pass_that_replaces_gradients_is_refused(monkeypatch):
    def backward(model, loss):
        loss.backward()
        for p in model.parameters():
            p.grad = p.grad * 1.0

    (line,), _ = compared(monkeypatch, backward=backward)
    assert "replaces gradients" in line


def windowed(block, x):
    return (torch.arange(x.size(1), device=x.device) < block.window)[:, None]


def narrower(model, i):
    for block in model.transformer.h:
        block.window = 32 if i < 6 else 8


def frozen_for_a_while(model, i):
    model.transformer.h[0].requires_grad_(not 4 <= i < 8)


def shorter(model, i):
    """Later micro-batches are half as long (train_micro_batches)."""


def other_function(model, i):
    if i == 6:
        model_module.gelu_tanh = torch.nn.functional.relu  # type: ignore[assignment]


def less_dropout(model, i):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1 if i < 6 else 0.0


@pytest.mark.parametrize(
    "between", [narrower, frozen_for_a_while, shorter, other_function, less_dropout]
)
def test_what_train_py_changes_between_steps_is_recorded_anew(between, monkeypatch):
    # Undone between the two runs
    monkeypatch.setattr(model_module, "gelu_tanh", model_module.gelu_tanh)
    original = model_module.gelu_tanh

    def fresh(model):
        model_module.gelu_tanh = original

    lines, recordings = compared(monkeypatch, windowed, prepare=fresh, between=between)
    assert lines == []
    assert recordings == (3 if between is frozen_for_a_while else 2)


def test_attribute_that_changes_at_each_step_ends_the_recordings_with_a_line(monkeypatch):
    def each_step(model, i):
        model.transformer.h[0].window = 32 - i // 2

    monkeypatch.setattr("test_cuda_graph.MICRO_BATCHES", 20)
    (line,), recordings = compared(monkeypatch, windowed, between=each_step)
    assert "window changes again and again" in line
    assert recordings == 4


def test_parameter_that_gets_no_gradient_stays_without_one(monkeypatch):
    """AdamW would let its weight decay if it got zeros."""

    def prepare(model):
        model.unused = torch.nn.Parameter(torch.ones(3, device=CUDA))

    assert compared(monkeypatch, prepare=prepare) == ([], 1)
