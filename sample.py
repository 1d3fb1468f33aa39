"""Writes text with a trained model.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --temperature=0.7 --top_p=0.9 --stream
    python sample.py --out_dir=out-shakespeare-char --serve
    python sample.py --out_dir=out-chat --chat

Prints each sample, prompt included, followed by a line of dashes. With --chat, you talk with the model. With --serve,
both happen on a page in the browser, and programs can ask as they ask OpenAI's API. Writes no files.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from configurator import configure
from data.chat import talk, template
from data.text_files import read_text
from data.token_files import read_meta
from data.tokenizer import Ids, Tokenizer, from_meta
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.compute.distributed import DistContext
from deskgpt.compute.generation import GenerationConfig, Sample, write
from deskgpt.compute.inference import InferenceEngine
from deskgpt.compute.runner import Runner
from deskgpt.estimate import fit
from deskgpt.export.gpt2_weights import load_gpt2, tokenizer_of
from deskgpt.serve import openai_api, page_server, playground
from deskgpt.system import hardware, peak_flops
from deskgpt.system.errors import message_for_user, one_line_errors
from deskgpt.system.formatting import millions, shortened
from deskgpt.system.settings import AtLeast1, FilePath, Range, check_fields
from deskgpt.system.untrusted import is_local
from model import GPT, GPTConfig

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig:
    # model
    init_from: FilePath = "resume"  # resume (a checkpoint in out_dir), gpt2[-medium|-large|-xl], a checkpoint, a folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model (to resume); or a file: out/ckpt_best.pt, the best (to use)
    # text
    start: str = "\n"  # the prompt; FILE:prompt.txt reads it from a file
    num_samples: AtLeast1 = 10  # generated side by side
    max_new_tokens: AtLeast1 = 500  # per sample
    stop: str = ""  # a sample ends before this text, where it first occurs after the prompt; empty = none
    stream: bool = False  # show the text as it is generated, one sample after another
    # talking
    chat: bool = False  # answer what you type, line by line, with a model trained on chat data: docs/chat.md
    system: str = ""  # what the dialogue begins with: instructions to the assistant
    # drawing
    temperature: float = 0.8  # below 1 = more likely text, above = more surprising; 0 = always the likeliest token
    top_k: int = 200  # draw from the k likeliest tokens; 0 = from all
    top_p: Annotated[float, Range(0, 1)] = 1.0  # draw from the likeliest tokens that have this probability together
    seed: int = 1337  # the text of sample i depends on seed + i, not on how many samples there are
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls
    compile: bool = False  # torch.compile: takes a while to start
    # page
    serve: bool = False  # instead of printing: a page to play with in this machine's browser, until Ctrl+C
    port: Annotated[int, Range(0, below=2**16)] = 0  # of the page; 0 = one that is free

    def __post_init__(self) -> None:
        check_fields(self)
        if self.seed + self.num_samples > 2**63:
            raise ValueError(f"seed={self.seed} must be at most 2^63 - num_samples")
        if not self.top_p:
            raise ValueError(f"top_p={self.top_p} leaves no token; take --top_k=1 for the likeliest one")
        if self.serve and self.compile:
            raise ValueError("compile=True is not for --serve; take --compile=False")


def main(c: SampleConfig) -> list[str]:
    """Prints samples as c says; returns their texts, prompt included."""
    # ---- model and prompt ------------------------------------------------------------------------------------
    device = hardware.resolve_device(c.device)
    hardware.forbid_spilling(device)
    if c.device == "auto" and device.type == "cpu":
        reason = hardware.unused_gpu()
        if reason:
            print(f"{reason}; sampling on the CPU", file=sys.stderr)
    trained = load(c.init_from, c.out_dir, device)
    wish = wish_of(c)
    if c.serve:
        serve(c, wish, trained, device)
        return []
    if c.chat:
        chat(c, wish, trained, device)
        return []
    model = trained.model.eval().to(device)
    rows = 1 if c.stream else c.num_samples  # generated in one batch
    prompts = encoded(wish.prompt, trained.tokenizer, model).to(device).repeat(rows, 1)
    reading = InferenceEngine(model, prompts, dtype_of(c, device), compiled=c.compile)

    # ---- generate --------------------------------------------------------------------------------------------
    texts = []
    for first in range(0, c.num_samples, rows):
        samples = [Sample(trained.tokenizer, wish.prompt, c.stop) for _ in range(rows)]
        if c.stream:
            print(wish.prompt, end="", flush=True)
        with reading.replacing():
            for shown in write(model, prompts, samples, replace(wish, seed=c.seed + first)):
                if c.stream:
                    print(shown[0], end="", flush=True)
        for sample in samples:
            print("" if c.stream else sample.text)
            print("---------------")
            texts.append(sample.text)
    return texts


# ---- set-up --------------------------------------------------------------------------------------------------


@dataclass
class Trained:
    """A trained model and the tokenizer that it was trained with."""

    model: GPT  # on the CPU
    tokenizer: Tokenizer
    source: str  # what the user called it
    checkpoint: Checkpoint | None  # None for GPT-2's weights and other folders in Hugging Face's format

    @property
    def saw_chat(self) -> bool:
        """Whether it was trained on dialogues, in our template."""
        return self.checkpoint is not None and self.checkpoint.chat == template.NAME

    @property
    def name(self) -> str:
        """The source without the folders that lead to it."""
        path = Path(os.path.abspath(self.source))
        return f"{path.parent.name}/{path.name}" if path.suffix == ".pt" else path.name


def load(init_from: str, out_dir: str, device: torch.device) -> Trained:
    """What init_from and out_dir of SampleConfig name. Raises ValueError, also where it does not fit into the device.

    export.py and bench/evaluate.py load their models with it too.
    """
    saved = None
    if init_from == "resume" or store.is_one(init_from):
        source = out_dir if init_from == "resume" else init_from
        saved = store.load(source, functools.partial(print, file=sys.stderr))
        config = GPTConfig.from_args(saved.model_args, source)
        weights = store.weights_of(saved)
        meta = saved.tokenizer or tokenizer_of_dataset(saved.config.get("dataset", ""))
    else:
        source = init_from
        model_args, weights = load_gpt2(init_from)
        config = GPTConfig.from_args(model_args, source)
        meta = tokenizer_of(init_from)
    fit.refuse_beyond_memory(config, device)
    model = GPT.from_state(config, weights, source)
    if not all(p.isfinite().all() for p in model.parameters()):
        raise ValueError(f"{source}: the weights hold NaN or infinity, which give no text; take another checkpoint")
    tokenizer = from_meta(meta)
    if saved is not None and tokenizer.vocab_size > config.vocab_size:
        dataset = saved.config.get("dataset")
        raise ValueError(
            f"the checkpoint has {config.vocab_size} tokens, its tokenizer ({meta.get('name')}) "
            f"{tokenizer.vocab_size}; is the meta.json or meta.pkl of dataset {dataset!r} missing in {DATA}?"
        )
    return Trained(model, tokenizer, source, saved)


def tokenizer_of_dataset(dataset: Any) -> dict[str, Any]:
    """The meta of the tokenizer of a data folder, for nanoGPT's checkpoints, which name only that.

    Raises ValueError.
    """
    if not is_local(dataset):
        raise ValueError(f"the checkpoint has no tokenizer, and dataset={shortened(dataset)} is not on this machine")
    folder = DATA / dataset
    meta = read_meta(folder)["tokenizer"]
    if not meta:
        raise ValueError(f"{folder / 'meta.pkl'} does not hold the characters (stoi, itos) to read and write text")
    return meta


def dtype_of(c: SampleConfig, device: torch.device) -> str:
    """The dtype of the matmuls; on a CPU float32 unless c names another.

    One row at a time, only the weights' way through memory counts, and autocast would cast them again for every token.
    """
    if c.dtype != "auto":
        return c.dtype
    return "float32" if device.type == "cpu" else peak_flops.fast_dtype(device)


def wish_of(c: SampleConfig) -> GenerationConfig:
    """The text that c asks for. Raises ValueError if the prompt is empty or is not UTF-8."""
    prompt = read_text(Path(c.start[5:])) if c.start.startswith("FILE:") else c.start
    if any("\ud800" <= char <= "\udfff" for char in prompt):  # what Python makes of other bytes than UTF-8
        raise ValueError(f"start={c.start!r} is not UTF-8 text; convert it first, for instance with iconv")
    if not prompt:
        raise ValueError(f"start={c.start!r} holds no text to continue; try --start=$'\\n'")
    return GenerationConfig(
        prompt=prompt,
        stop=c.stop,
        max_new_tokens=c.max_new_tokens,
        temperature=c.temperature,
        top_k=c.top_k,
        top_p=c.top_p,
        seed=c.seed,
    )


def encoded(prompt: str, tokenizer: Tokenizer, model: GPT) -> Tensor:
    """Token ids (1, T) of the prompt. Raises ValueError for those that the model does not know."""
    ids = tokenizer.encode_prompt(prompt).astype("int64")
    if ids.max() >= model.config.vocab_size:
        raise ValueError(f"the prompt has token {ids.max()}, the model only {model.config.vocab_size} tokens")
    return torch.from_numpy(ids)[None]


# ---- talking -------------------------------------------------------------------------------------------------


def chat(c: SampleConfig, wish: GenerationConfig, trained: Trained, device: torch.device) -> None:
    """Answers on the terminal until the input ends. Raises ValueError if the model cannot talk."""
    model = trained.model.eval().to(device)
    of_chat = template_for(trained)
    dialogue = talk.Dialogue(of_chat, model.config.block_size, c.system)

    def as_prompts(ids: Ids) -> Tensor:
        return torch.from_numpy(ids.astype("int64")).to(device)[None]

    reading = InferenceEngine(model, as_prompts(dialogue.prompt()), dtype_of(c, device), compiled=c.compile)

    def answer(ids: Ids, n: int) -> Iterator[str]:
        """The n-th answer, in pieces as they come."""
        sample = Sample(trained.tokenizer, "", c.stop, template.FORGED_TURN, last_token=of_chat.end_of_text)
        with reading.replacing():
            for shown in write(model, as_prompts(ids), [sample], replace(wish, seed=c.seed + n)):
                yield shown[0]

    talk.talk(dialogue, answer)


def template_for(trained: Trained) -> template.Template:
    """Raises ValueError if the model cannot talk."""
    if not trained.saw_chat:
        print(f"note: {trained.source} was not trained on data of data/chat/prepare.py: docs/chat.md", file=sys.stderr)
    return template.Template(trained.tokenizer)


# ---- page ----------------------------------------------------------------------------------------------------


def serve(c: SampleConfig, wish: GenerationConfig, trained: Trained, device: torch.device) -> None:
    """Runs the page until Ctrl+C. Raises ValueError and OSError."""
    playground.check(wish)
    page_server.serve(page_of(c, wish, trained, device), c.port)


def page_of(c: SampleConfig, wish: GenerationConfig, trained: Trained, device: torch.device) -> openai_api.Api:
    """The page, and OpenAI's API: a chat with a model that saw chat data, or with --chat."""
    model = trained.model.eval().to(device)
    saved = trained.checkpoint
    facts = [f"step {saved.iter_num:,}"] if saved else []
    if saved and math.isfinite(saved.best_val_loss):
        facts.append(f"best val loss {saved.best_val_loss:.4f}")
    facts += [f"{millions(model.num_params())} parameters", f"context of {model.config.block_size:,} tokens"]
    encode = functools.partial(encoded, tokenizer=trained.tokenizer, model=model)
    reading = InferenceEngine(model, encode(wish.prompt).to(device), dtype_of(c, device))
    chat = chat_of(c, trained) if c.chat or trained.saw_chat else None
    return openai_api.Api(trained.name, facts, model, trained.tokenizer, encode, reading.replacing, wish, chat)


def chat_of(c: SampleConfig, trained: Trained) -> playground.Chat:
    """How the model answers a dialogue that the page or a program sends. Raises ValueError if it cannot talk."""
    of_chat = template_for(trained)
    block_size = trained.model.config.block_size
    talk.Dialogue(of_chat, block_size, c.system)  # raises if that is too long

    def encode(messages: list[Any]) -> Tensor:
        dialogue = talk.Dialogue.of(of_chat, block_size, messages)
        return torch.from_numpy(dialogue.prompt().astype("int64"))[None]

    return playground.Chat(encode, of_chat.end_of_text, template.FORGED_TURN, c.system)


# ---- during training -----------------------------------------------------------------------------------------


class Sampler:
    """Writes short texts with a model that is being trained, the same way each time; train.py logs them.

    It draws from random streams of its own, and leaves the model in training mode. Raises ValueError where the
    tokenizer does not know the prompt.
    """

    TEXTS = 2
    TOKENS = 200

    def __init__(self, runner: Runner, tokenizer: Tokenizer, every: int, print0: Callable[[str], None]) -> None:
        """every: evaluations from one sample to the next."""
        self.model = runner.model
        self.reference_only = runner.form.reference_only
        self.tokenizer = tokenizer
        self.dtype = "float32" if runner.device.type == "cpu" else runner.form.dtype
        self.cached = True  # until that is found to be wrong
        self.every = every
        self.print0 = print0
        self.wish = wish_of(SampleConfig())
        self.prompt = encoded(self.wish.prompt, tokenizer, self.model)  # (1, T)

    def texts_at(self, evaluation: int, is_last: bool, break_off: Callable[[], bool]) -> list[str]:
        """Texts of the model as it is now, if this evaluation has any; [] if break_off says so meanwhile."""
        if not is_last and evaluation % self.every:
            return []
        samples = [Sample(self.tokenizer, self.wish.prompt) for _ in range(self.TEXTS)]
        # Beyond its context a model has no cache to write with, and each token costs a whole forward pass.
        n_tokens = min(self.TOKENS, max(1, self.model.config.block_size - self.prompt.size(1)))
        prompts = self.prompt.to(next(self.model.parameters()).device).repeat(self.TEXTS, 1)
        self.model.eval()
        reading = InferenceEngine(
            self.model,
            prompts,
            self.dtype,
            cached=self.cached,
            reference_only=self.reference_only,
            remembers=False,
            print0=self.print0,
        )
        self.cached = reading.cached
        with reading.replacing():
            for _ in write(self.model, prompts, samples, replace(self.wish, max_new_tokens=n_tokens)):
                if break_off():
                    break
        self.model.train()
        return [] if break_off() else [sample.text for sample in samples]


def sampler_for(every: int, runner: Runner, ranks: DistContext, tokenizer: dict[str, Any]) -> Sampler | None:
    """What writes samples at every `every`-th evaluation; None for 0, and on ranks that only wait meanwhile.

    tokenizer: as in meta.json. Says in one line if it cannot be had: the run does not need it.
    """
    if not every or not ranks.is_first:
        return None
    try:
        return Sampler(runner, from_meta(tokenizer), every, ranks.print0)
    except (ValueError, ModuleNotFoundError) as e:
        ranks.print0(f"sample_interval={every}: no samples, since {message_for_user(e, '') or e}")
        return None


if __name__ == "__main__":
    with one_line_errors("lower --num_samples or --max_new_tokens, or take --stream"):
        main(configure(SampleConfig, sys.argv[1:]))
