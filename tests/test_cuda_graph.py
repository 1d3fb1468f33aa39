"""CUDA graphs of a run's passes: equal to the plain loop, or refused with a line.

pytest tests/test_cuda_graph.py                              # on a card; without one they skip
python bench/pretend_card.py --card H100 -m pytest tests/test_cuda_graph.py
"""

import functools
import itertools
import random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import CUDA, TINY, assert_equal, assert_same_run, events, logged, run_tiny
from tiny_models import MODERN_SETTINGS, make, tokens

import model as model_module
from deskgpt.cuda_graph import CudaGraph
from model import GPT, Block, GPTConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no card")

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=32, vocab_size=128, dropout=0.1)
RUN = TINY | {"n_embd": 64, "block_size": 32, "device": "cuda", "learning_rate": 1e-3}
RUN |= {"auto_batch": False, "gradient_accumulation_steps": 3, "dropout": 0.2, "max_iters": 8}
RUN |= {"lr_decay_iters": 8, "eval_interval": 4}
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
    done = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph):
        done.append(1)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return done


# ---- runs ----------------------------------------------------------------------------------------


def trained(data, out_dir, **settings):
    run_tiny(data, out_dir, **RUN | settings)


@pytest.fixture(scope="module")
def plain(chars, tmp_path_factory):
    """Return the folder of a run without graphs."""
    out_dir = tmp_path_factory.mktemp("plain")
    trained(chars, out_dir, cuda_graph=False)
    return out_dir


@pytest.mark.parametrize(
    "settings",
    [
        {"dtype": "bfloat16", "compile": True},
        {"dtype": "float32", "optimizer": "muon"},
        {"dtype": "float16", "gradient_accumulation_steps": 1},
        {"dtype": "bfloat16", "deterministic": True},
        {"deterministic": True, "compile": True, "sample_interval": 4, **MODERN_SETTINGS},
    ],
)
def test_run_with_graphs_is_the_run_without_bit_for_bit(settings, chars, tmp_path, replays):
    without, out = tmp_path / "without", tmp_path / "graph"
    trained(chars, without, cuda_graph=False, **settings)
    assert not replays
    trained(chars, out, **settings)
    steps = 8 - 2  # the first two have no graph
    # Evaluations have replays, too
    assert len(replays) > steps * settings.get("gradient_accumulation_steps", 3)
    assert_same_run(without, out)
    found = [logged(path, "start", "cuda_graph") for path in (without, out)]
    assert found == [[False], [True]]
    assert not events(out, "warning")


def test_run_that_stops_in_its_replays_and_is_resumed_is_the_plain_one(chars, tmp_path, plain):
    trained(chars, tmp_path, max_iters=4)
    trained(chars, tmp_path, init_from="resume")
    assert_same_run(plain, tmp_path)


def test_recording_that_does_not_fit_leaves_the_run_without_a_graph(
    chars, tmp_path, monkeypatch, replays, plain
):
    starved = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(torch.cuda, "graph", starved)
    trained(chars, tmp_path)
    assert_same_run(plain, tmp_path)
    assert not replays
    why = "the pass cannot be recorded (CUDA out of memory)"
    lines = {*logged(tmp_path, "warning", "text")}
    assert lines == {f"no CUDA graph: {why}", f"evaluations without a CUDA graph: {why}"}


# ---- changed models ------------------------------------------------------------------------------

COUNT = 0
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


def dictionary(block, x):
    block.table["scale"] += 0.01
    return block.table["scale"]


def keeps_a_tensor(block, x):
    before = block.kept[-1].to(CUDA)
    block.kept = [x.detach()]
    return before


ON_THE_CPU = "a generator on the CPU"
# Returns a factor's difference from 1 in hundredths; and what the line names.
STATEFUL = [
    (counter, "each pass changes transformer.h.0.count"),
    (class_counter, "Edited.total"),
    (global_counter, "COUNT"),
    (dictionary, "transformer.h.0.table"),
    (keeps_a_tensor, "transformer.h.0.kept"),
    (lambda block, x: random.random(), ON_THE_CPU),
    (lambda block, x: float(np.random.rand()), ON_THE_CPU),
    (lambda block, x: float(block.numpy_generator.random()), "transformer.h.0.numpy_generator"),
    (lambda block, x: torch.rand(()).numpy().item(), ON_THE_CPU),
    (
        lambda block, x: torch.rand((), generator=block.torch_generator).numpy().item(),
        "transformer.h.0.torch_generator",
    ),
    (lambda block, x: PYTHON.random(), "PYTHON"),
    (lambda block, x: x.detach().float().mean().item(), "cannot be recorded"),
]


def edited_model(monkeypatch, edit=None):
    """Return the same small model each time; edit(block, x) changes the input of each block."""
    global COUNT
    COUNT = Edited.total = 0
    PYTHON.seed(0)
    np.random.seed(0)
    monkeypatch.setattr(model_module, "Block", Edited)

    def forward(self, x, context):
        return Block.forward(self, x * (1 + edit(self, x) / 100), context)

    if edit is not None:
        monkeypatch.setattr(Edited, "forward", forward)
    return make(CONFIG).to(CUDA)


def one_pass(model, x, y, weight):
    loss = model(x, y)[1] * weight
    loss.backward()
    return {"loss": loss.detach()}


def compared(
    monkeypatch,
    edit=None,
    prepare=lambda model: None,
    between=lambda model, i: None,
    length=lambda i: CONFIG.block_size,
):
    """Train on micro-batches, two of which make a step. Return the lines and the number of
    recordings of a model with graphs, whose losses and weights are those of the plain loop.
    """
    lines: list[str] = []
    results = []
    for graphed in (False, True):
        model = edited_model(monkeypatch, edit)
        prepare(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.5)
        run = functools.partial(one_pass, model)
        micro_batch = CudaGraph(run, model, enabled=graphed, on_refusal=lines.append)
        losses = []
        for i in range(MICRO_BATCHES):
            between(model, i)
            ids = tokens(2, length(i) + 1, vocab=CONFIG.vocab_size) + i
            ids = (ids % CONFIG.vocab_size).to(CUDA)
            random.seed(i)
            torch.manual_seed(i)
            losses.append(micro_batch(ids[:, :-1], ids[:, 1:], 0.5)["loss"].item())
            if i % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        results.append((losses, dict(model.state_dict())))
    assert_equal(*results)
    return lines, micro_batch.recordings


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
    net = SimpleNamespace()
    calls = []

    def run(net, x):
        calls.append(net.require_backward_grad_sync)
        model(x, x)[1].backward()
        return {}

    micro_batch = CudaGraph(functools.partial(run, net), model, enabled=True)
    ids = tokens(2, 32, vocab=CONFIG.vocab_size).to(CUDA)
    for i in range(12):
        net.require_backward_grad_sync = i % 3 == 2
        micro_batch(ids)
    # Two without a graph, one recorded, all that exchange.
    assert calls == [False, False, True, False, True, True, True]
    assert len(replays) == 8 - 2


@pytest.mark.parametrize(("edit", "why"), STATEFUL)
def test_model_whose_python_code_changes_something_is_refused_by_name(edit, why, monkeypatch):
    (line,), _ = compared(monkeypatch, edit)
    assert why in line


@pytest.mark.parametrize("first", [0, 6])  # also in the middle of the replays
@pytest.mark.parametrize("of_gradient", [False, True])
def test_hook_whose_state_cannot_be_seen_is_refused(of_gradient, first, monkeypatch):
    def between(model, i):
        factors = itertools.count(1, 0.01)
        forward = model.transformer.ln_f.register_forward_hook
        register = model.lm_head.weight.register_hook if of_gradient else forward
        if i == first:
            register(lambda *args: args[-1] * next(factors))

    (line,), _ = compared(monkeypatch, between=between)
    assert "hook" in line


def test_pass_that_replaces_gradients_is_refused(monkeypatch):
    plain_pass = one_pass

    def replacing(model, *args):
        outputs = plain_pass(model, *args)
        for p in model.parameters():
            p.grad = p.grad * 1.0
        return outputs

    monkeypatch.setattr("test_cuda_graph.one_pass", replacing)
    (line,), _ = compared(monkeypatch)
    assert "replaces gradients" in line


def windowed(block, x):
    return (torch.arange(x.size(1), device=x.device) < block.window)[:, None]


def narrower(model, i):
    for block in model.transformer.h:
        block.window = 32 if i < 6 else 8


def frozen_for_a_while(model, i):
    model.transformer.h[0].requires_grad_(not 4 <= i < 8)


def other_function(model, i):
    if i == 6:
        model_module.gelu_tanh = torch.nn.functional.relu  # type: ignore[assignment]


@pytest.mark.parametrize("between", [narrower, frozen_for_a_while, other_function])
def test_what_train_py_changes_between_steps_is_recorded_anew(between, monkeypatch):
    # Undone between the two runs
    monkeypatch.setattr(model_module, "gelu_tanh", model_module.gelu_tanh)
    original = model_module.gelu_tanh

    def fresh(model):
        model_module.gelu_tanh = original

    lines, recordings = compared(monkeypatch, windowed, prepare=fresh, between=between)
    assert lines == []
    assert recordings == (3 if between is frozen_for_a_while else 2)


def test_shorter_micro_batches_are_recorded_anew(monkeypatch):
    assert compared(monkeypatch, length=lambda i: 32 if i < 6 else 16) == ([], 2)


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
