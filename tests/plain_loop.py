"""A training loop in torch alone, to compare runs with: train.py's, and those of docs/hacks."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

import train
from data.batches import Split
from data.token_files import dataset_folder
from model import GPT, GPTConfig
from train import TrainConfig


def plain_rate(hack: str, c: TrainConfig, step: int) -> float:
    if hack != "sqrt_decay" or step < c.warmup_iters:
        return train.learning_rate(c.schedule(), step)
    done = (step - c.warmup_iters) / (c.max_iters - c.warmup_iters)
    return c.learning_rate * (0.1 + 0.9 * (1 - math.sqrt(done)))


def plain_optimizer(hack: str, c: TrainConfig, model: GPT) -> torch.optim.Optimizer:
    if c.optimizer == "muon" or hack == "embd_scale":  # test_optimizer compares it with torch's
        return train.build_optimizer(c, model)
    groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.dim() >= 2]}]
    groups += [{"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    decay = 0.0 if hack == "cautious_weight_decay" else c.weight_decay
    return torch.optim.AdamW(groups, c.learning_rate, (c.beta1, c.beta2), weight_decay=decay)


@torch.no_grad()
def lion_step(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            mean = optimizer.state[p].get("mean", torch.zeros_like(p))
            p -= group["lr"] * ((0.9 * mean + 0.1 * p.grad).sign() + 0.1 * p)
            optimizer.state[p]["mean"] = 0.99 * mean + 0.01 * p.grad


@torch.no_grad()
def plain_step(hack: str, c: TrainConfig, optimizer: Any, rate: float, step: int) -> float:
    """Clip, take a step, and return the norm of all gradients."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.clip_grad_norm_(params, c.grad_clip or math.inf).item()
    for group in optimizer.param_groups:
        group["lr"] = rate
        if hack == "muon_momentum_warmup" and "momentum" in group:
            group["momentum"] = 0.85 + 0.1 * min(1.0, step / (c.max_iters / 3))
    before = [(p, p.clone()) for p in optimizer.param_groups[0]["params"]]
    if hack == "lion":
        lion_step(optimizer)
    else:
        optimizer.step()
    if hack == "cautious_weight_decay":
        for p, old in before:
            p -= rate * rate / c.learning_rate * c.weight_decay * old * ((p - old) * old < 0)
    optimizer.zero_grad()
    return norm


def plain_loop(
    c: TrainConfig, vocab_size: int, hack: str = ""
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Train as c says, and as a hack changes it. Return the weights, the losses of the steps, and
    the norms of their gradients.
    """
    torch.manual_seed(c.seed)
    model = GPT(GPTConfig.from_settings(c, vocab_size))
    optimizer = plain_optimizer(hack, c, model)
    split = Split(dataset_folder(c.dataset), "train", c.block_size, vocab_size, c.seed)
    losses = []
    norms = []
    last = []  # the weights that are averaged
    B = c.batch_size
    n = B * c.gradient_accumulation_steps
    for step in range(c.max_iters):
        rate = plain_rate(hack, c, step)
        is_small = hack == "batch_ramp" and step < c.max_iters / 3
        losses.append(0.0)
        x, y = map(torch.from_numpy, split.train_batch(step * n + np.arange(n)))
        for micro in range(c.gradient_accumulation_steps):
            torch.manual_seed(train.micro_batch_seed(c.seed, step, micro))
            rows = slice(micro * B, micro * B + B)
            # A loss mask leaves some rows fewer targets than others.
            share = (y[rows] >= 0).sum() / (y >= 0).sum()
            is_short = hack == "short_context_first" and step < c.max_iters / 2
            length = c.block_size // 2 if is_short else c.block_size
            _, loss, *further = model(x[rows].view(-1, length), y[rows].view(-1, length))
            total = sum(further[0].values(), loss) if further else loss
            (total if is_small else total * share).backward()
            losses[-1] += (loss * share).item()
            if is_small:
                smaller = rate / math.sqrt(c.gradient_accumulation_steps)
                plain_step(hack, c, optimizer, smaller, step)
        if not is_small:
            norms.append(plain_step(hack, c, optimizer, rate, step))
        if step + 1 >= 0.9 * c.max_iters:
            last.append({name: w.clone() for name, w in model.state_dict().items()})
    if hack == "weight_averaging":
        model.load_state_dict({key: torch.stack([w[key] for w in last]).mean(0) for key in last[0]})
    return dict(model.state_dict()), losses, norms
