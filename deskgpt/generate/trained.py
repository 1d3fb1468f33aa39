"""A trained model with its tokenizer, loaded for sample.py and export.py."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.chat import template
from data.token_files import read_meta
from data.tokenizer import Tokenizer, from_meta
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.estimate import fit
from deskgpt.export.gpt2_weights import load_gpt2, tokenizer_of
from deskgpt.system.files import is_local
from deskgpt.system.terminal import shortened
from model import GPT, GPTConfig

DATA = Path(__file__).resolve().parents[2] / "data"


@dataclass
class Trained:
    """A trained model and the tokenizer that it was trained with."""

    model: GPT  # on the CPU
    tokenizer: Tokenizer
    source: str  # init_from or out_dir, as the user wrote it
    checkpoint: Checkpoint | None = None  # None for GPT-2's weights and other folders in Hugging Face's format

    @property
    def saw_chat(self) -> bool:
        """Return whether it was trained on dialogues in our template."""
        return self.checkpoint is not None and self.checkpoint.chat == template.NAME

    @property
    def name(self) -> str:
        """Return the name of the folder or file."""
        return Path(self.source).resolve().name


def load(init_from: str, out_dir: str, device: torch.device) -> Trained:
    """Return the model that init_from and out_dir of SampleConfig name. It is on the CPU, and `device` has room for it.

    Raises ValueError if there is none, if it is damaged, or if it does not fit into the memory of the device.
    """
    saved = None
    source = out_dir if init_from == "resume" else init_from
    if init_from == "resume" or store.is_checkpoint(init_from):
        saved = store.load(source, functools.partial(print, file=sys.stderr))
        model_args, weights = saved.model_args, store.weights_of(saved)
        meta = saved.tokenizer or tokenizer_of_dataset(saved.config.get("dataset", ""))
    else:
        model_args, weights = load_gpt2(source)
        meta = tokenizer_of(source)
    config = GPTConfig.from_args(model_args, source)
    fit.refuse_beyond_memory(config, device)
    model = GPT.from_state(config, weights, source)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError(f"{source}: the weights hold NaN or infinity, which give no text; take another checkpoint")
    tokenizer = from_meta(meta)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{source} has {config.vocab_size} tokens, and the tokenizer {meta.get('name')} {tokenizer.vocab_size}: it "
            f"is another model's. nanoGPT keeps its own in meta.pkl, in the data's folder: copy it into {DATA}"
        )
    return Trained(model, tokenizer, source, saved)


def tokenizer_of_dataset(dataset: Any) -> dict[str, Any]:
    """Return the meta of a data folder's tokenizer, for nanoGPT's checkpoints, which name only the folder.

    Raises ValueError.
    """
    if not is_local(dataset):
        raise ValueError(f"the checkpoint has no tokenizer, and dataset={shortened(dataset)} is not on this machine")
    meta = read_meta(DATA / dataset)["tokenizer"]
    if not meta:
        raise ValueError(f"{DATA / dataset / 'meta.pkl'} has no characters (stoi, itos) to read and write text")
    return meta


def encode_prompt(prompt: str, tokenizer: Tokenizer) -> Tensor:
    """Return token ids (1, T) of a prompt. Raises ValueError if the tokenizer lacks one of its characters."""
    return torch.from_numpy(tokenizer.encode_prompt(prompt).astype("int64"))[None]
