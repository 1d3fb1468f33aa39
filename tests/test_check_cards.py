"""What bench/check_cards.py counts, against counts of another kind, and what it expects of a
card.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import shell
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bench import check_cards

aten = torch.ops.aten
x, y = torch.arange(1.0, 13).view(3, 4), torch.linspace(-2, 2, 12).view(3, 4)
columns, rows = torch.tensor([[2], [0], [3]]), torch.tensor([2, 0])
v, w = (
    torch.tensor([[0.5], [0.25], [0.125]]),
    torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]]),
)
ADAMW: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.1, "eps": 1e-8}
ADAMW |= {"amsgrad": False, "maximize": False}
CALLS: dict[str, tuple[Any, ...]] = {
    "copy_": (aten.copy_, x, y),
    "fill_": (aten.fill_, x, 0.5),
    "zero_": (aten.zero_, x),
    "normal_": (aten.normal_, x),
    "add_": (aten.add_, x, y),
    "add of an expanded row": (aten.add, x, w[0].expand(3, 4)),
    "cat": (aten.cat, [x, y]),
    "sum": (aten.sum, x),
    "zeros_like": (aten.zeros_like, x),
    "gather": (aten.gather, x, 1, columns),
    "embedding": (aten.embedding, x, rows),
    "index": (aten.index, x, [rows]),
    "scatter_": (aten.scatter_, x, 1, columns, v),
    "scatter_ of one value": (aten.scatter_, x, 1, columns, 0.5),
    "scatter_add_": (aten.scatter_add_, x, 1, columns, v),
    "index_put_": (aten.index_put_, x, [rows], w),
    "index_put_ that adds": (aten.index_put_, x, [rows], w, True),
    "index_add_": (aten.index_add_, x, 0, rows, w),
    "_foreach_mul_": (aten._foreach_mul_, [x, y], torch.tensor(0.5)),
    "_foreach_copy_": (aten._foreach_copy_, [x], [y]),
    "_foreach_norm": (aten._foreach_norm, [x, y]),
    "_fused_adamw_": (aten._fused_adamw_, [x], [y], [x * 0.1], [x * 0.2], [], [torch.tensor(3.0)]),
}


def called(function: Any, arguments: Any) -> Any:
    """Call an operator, with the same random numbers each time."""
    torch.manual_seed(0)
    return function(*arguments, **ADAMW if function is aten._fused_adamw_ else {})


def ran(function: Any, arguments: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the memory of the arguments after a call, and what it returned that is new."""
    out = called(function, arguments)
    given = [flat(t) for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    owned = {t.data_ptr() for t in given}
    return given, [
        t.clone() for t in tree_leaves(out) if isinstance(t, Tensor) and t.data_ptr() not in owned
    ]


def flat(t: Tensor) -> Tensor:
    """Return all numbers of a tensor's memory."""
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())


def copied(arguments: Any) -> Any:
    """Return the arguments in memory of their own, expanded as they were."""
    return tree_map_only(
        Tensor, lambda t: flat(t).clone().as_strided(t.shape, t.stride()), arguments
    )


def bytes_that_matter(function: Any, arguments: Any) -> int:
    """Count the numbers that a call changes, those on which a result depends, and those that are
    returned.
    """
    before = [flat(t) for t in tree_leaves(arguments) if isinstance(t, Tensor)]
    after, returned = ran(function, copied(arguments))
    total = sum(t.nbytes for t in returned)
    for i, numbers in enumerate(before):
        for n in range(len(numbers)):
            changed = copied(arguments)
            number = flat([t for t in tree_leaves(changed) if isinstance(t, Tensor)][i])
            number[n] = (number[n] + 1) % 3 if number.dtype == torch.int64 else number[n] + 0.375
            was = number[n].item()
            after_change, returned_then = ran(function, changed)
            is_written = bool(after[i][n] != numbers[n]) or after_change[i][n].item() != was
            others = zip([*after, *returned], [*after_change, *returned_then], strict=True)
            differs = [a != b for a, b in others]
            if not is_written:
                differs[i][n] = False
            total += numbers.element_size() * (is_written + any(bool(d.any()) for d in differs))
    return total


@pytest.mark.parametrize("name", CALLS)
def test_bytes_of_an_operator_are_those_that_it_changes_or_depends_on(name):
    function, *arguments = CALLS[name]
    work = check_cards.Work()
    given = copied(arguments)
    with work:
        called(function, given)
    assert work.moved == bytes_that_matter(function, arguments)


def test_matmuls_and_causal_attention_count_by_flops_and_views_not_at_all():
    work = check_cards.Work()
    with FakeTensorMode(), work:
        a = torch.empty(8, 16, device="cuda")
        _ = a @ a.T
        assert work.take() == {"launches": 1, "bytes": 0, "flops": 2 * 8 * 8 * 16}
        q = torch.empty(2, 3, 64, 16, device="cuda", dtype=torch.bfloat16)
        aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)
    # Scores and what they weigh: two matmuls, of which half is masked.
    assert work.take() == {"launches": 1, "bytes": 0, "flops": 2 * (2 * 3) * 64 * 64 * 16}


def test_prediction_is_the_time_of_flops_and_of_bytes():
    part = {"launches": 10, "bytes": 4_800_000_000, "flops": 989 * 10**9}
    found = {"dtype": "bfloat16", "micro_batch": part, "optimizer_step": part | {"flops": 0}}
    memory_ms = 1 / check_cards.OF_MEMORY  # of 4.8 TB/s
    expected = (memory_ms + 1 / check_cards.OF_FLOPS, memory_ms)  # and of 989 TFLOP/s
    assert check_cards.predict("H200", found) == pytest.approx(expected)


def test_peer_without_a_model_is_an_error_of_one_line(tmp_path):
    done = shell("python", "bench/check_cards.py", f"--peer=nanogpt:{tmp_path}", timeout=120)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert str(tmp_path) in done.stderr


PEER = """
from dataclasses import dataclass
import torch
from torch.nn import functional as F

@dataclass
class GPTConfig:
    n_layer: int
    n_head: int
    n_embd: int
    block_size: int
    bias: bool
    vocab_size: int
    dropout: float

class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.table = torch.nn.Embedding(config.vocab_size, config.n_embd)
        self.head = torch.nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx, targets):
        logits = self.head(self.table(idx))
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, fused=True)
"""


@pytest.mark.nightly
def test_both_programs_are_counted_and_their_cpu_work_is_timed(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # where triton is
    (tmp_path / "model.py").write_text(PEER)
    config = "train_shakespeare_char --n_layer=1 --batch_size=2 --dropout=0.0"
    ours, theirs = (
        check_cards.checked("check", "H100", config, peer) for peer in ("", str(tmp_path))
    )
    # FLOPs: forward, and backward to its input and its weight.
    of_head = 3 * 2 * (2 * 256) * 384 * 65
    assert theirs["micro_batch"]["flops"] == of_head
    # Half of attention is masked
    of_block = 3 * 2 * (2 * 256) * 12 * 384**2 + (2 + 5) * 2 * 2 * 256**2 * 384 // 2
    assert ours["micro_batch"]["flops"] == of_head + of_block
    assert ours["micro_batch"]["launches"] > theirs["micro_batch"]["launches"] > 3
    parameters = 2 * 384 * 65
    passes = 7 + 1 + 2  # AdamW, which does not write gradients, the norm, and clipping
    assert theirs["optimizer_step"]["bytes"] == pytest.approx(4 * passes * parameters, rel=1e-3)
    for peer in ("", str(tmp_path)):
        assert all(ms > 0 for ms in check_cards.checked("cpu_time", "H100", config, peer))
