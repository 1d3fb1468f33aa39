"""What bench/check_cards.py counts, and what it expects of a card."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conftest import assert_refused
from torch._subclasses.fake_tensor import FakeTensorMode

from bench import check_cards

aten = torch.ops.aten
x, y, z = (torch.ones(3, 4) for _ in range(3))  # 48 bytes each
columns, values = torch.tensor([[2], [0], [3]]), torch.ones(3, 1)  # 24 and 12 bytes


# By name: the bytes that are read or written, an operator, and what it takes.
CALLS: dict[str, tuple[int, Any, tuple[Any, ...]]] = {
    "copy_": (48 + 48, aten.copy_, (x, y)),
    "add_": (48 + 48 + 48, aten.add_, (x, y)),
    "add of an expanded row": (48 + 16 + 48, aten.add, (x, torch.ones(4).expand(3, 4))),
    "cat": (96 + 96, aten.cat, ([x, y],)),
    "mul of an out": (48 + 48 + 48, partial(aten.mul.out, out=z), (x, y)),
    "scatter_": (24 + 12 + 12, aten.scatter_, (x, 1, columns, values)),
    "scatter_ of one value": (24 + 12, aten.scatter_, (x, 1, columns, 0.5)),
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_of_an_operator_are_those_that_it_reads_and_writes(name):
    expected, function, arguments = CALLS[name]
    with check_cards.Work() as work:
        function(*arguments)
    assert work.take() == {"launches": 1, "bytes": expected, "flops": 0}


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


def test_expected_time_is_that_of_flops_and_of_bytes():
    part = {"launches": 10, "bytes": 4_800_000_000, "flops": 989 * 10**9}
    # Of 4.8 TB/s, and of 989 TFLOP/s
    expected = 1 / check_cards.OF_MEMORY + 1 / check_cards.OF_FLOPS
    assert check_cards.expected_ms("H200", "bfloat16", part) == pytest.approx(expected)


def test_peer_without_a_program_is_an_error_of_one_line(tmp_path, script):
    assert_refused(script("bench/check_cards.py", f"--peer=nanogpt:{tmp_path}"), tmp_path)


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
def test_both_programs_are_counted(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)  # where triton is
    (tmp_path / "model.py").write_text(PEER)
    config = "train_shakespeare_char --n_layer=1 --batch_size=2 --dropout=0.0"
    ours, theirs = (check_cards.checked("H100", config, peer) for peer in ("", str(tmp_path)))
    # FLOPs: forward, and backward to its input and its weight.
    of_head = 3 * 2 * (2 * 256) * 384 * 65
    assert theirs["micro_batch"]["flops"] == of_head
    # Half of attention is masked
    of_block = 3 * 2 * (2 * 256) * 12 * 384**2 + (2 + 5) * 2 * 2 * 256**2 * 384 // 2
    assert ours["micro_batch"]["flops"] == of_head + of_block
    assert ours["micro_batch"]["launches"] > theirs["micro_batch"]["launches"] > 3
