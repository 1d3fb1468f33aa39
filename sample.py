"""Writes text with a trained model.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --temperature=0.7 --top_p=0.9 --stream
    python sample.py --out_dir=out-shakespeare-char --serve
    python sample.py --out_dir=out-chat --chat

Prints each sample, prompt included, followed by a line of dashes. With --chat, you talk with the model. --serve shows a
page in the browser for both, and answers programs that ask as they ask OpenAI's API. Writes no files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch

from configurator import configure
from data.chat import talk, template
from data.text_files import read_text
from data.tokenizer import Ids
from deskgpt.compute.generation import GenerationConfig, Sample, write
from deskgpt.compute.inference import InferenceEngine
from deskgpt.sampling.trained import Trained, encode_prompt, load
from deskgpt.serve.writer import Writer
from deskgpt.system import hardware, peaks
from deskgpt.system.errors import one_line_errors
from deskgpt.system.settings import AtLeast1, FilePath, Range, check_fields


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
    chat: bool = False  # answer what you type, line by line, with a model trained on chat data: docs/sampling.md
    system: str = ""  # the dialogue's first message: instructions to the assistant
    # sampling
    temperature: float = 0.8  # below 1 = more likely text, above = more surprising; 0 = always the likeliest token
    top_k: int = 200  # draw from the k likeliest tokens; 0 = from all
    top_p: Annotated[float, Range(1e-6, 1)] = 1.0  # draw from the likeliest tokens that have this probability together
    seed: Annotated[int, Range(0, 2**53 - 1)] = 1337  # sample i depends on seed + i, not on num_samples
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls
    compile: bool = False  # torch.compile: takes a while to start
    # page
    serve: bool = False  # instead of printing: a page to play with in this machine's browser, until Ctrl+C
    port: Annotated[int, Range(0, below=2**16)] = 0  # of the page; 0 = one that is free

    def __post_init__(self) -> None:
        check_fields(self)
        if self.serve and self.compile:
            raise ValueError("compile=True is not for --serve; take --compile=False")


def main(c: SampleConfig) -> list[str]:
    """Prints samples as c says; returns their texts, prompt included."""
    # ---- model and prompt ------------------------------------------------------------------------------------
    device = hardware.resolve_device(c.device)
    hardware.limit_threads()
    if c.device == "auto" and device.type == "cpu":
        reason = hardware.unused_gpu()
        if reason:
            print(f"{reason}; sampling on the CPU", file=sys.stderr)
    generation = generation_config(c)
    trained = load(c.init_from, c.out_dir, device)
    model = trained.model.eval().to(device)
    if c.serve:
        serve(c, generation, trained)
        return []
    if c.chat:
        chat(c, generation, trained)
        return []
    rows = 1 if c.stream else c.num_samples  # generated in one batch
    prompts = encode_prompt(generation.prompt, trained.tokenizer).to(device).repeat(rows, 1)
    engine = InferenceEngine(model, prompts, inference_dtype(c, device), compiled=c.compile)

    # ---- generate --------------------------------------------------------------------------------------------
    texts = []
    for first in range(0, c.num_samples, rows):
        samples = [Sample(trained.tokenizer, generation.prompt, c.stop) for _ in range(rows)]
        if c.stream:
            print(generation.prompt, end="", flush=True)
        for shown in write(model, prompts, samples, replace(generation, seed=c.seed + first), engine.replacing):
            if c.stream:
                print(shown[0], end="", flush=True)
        for sample in samples:
            print("" if c.stream else sample.text)
            print("---------------")
            texts.append(sample.text)
    return texts


# ---- set-up --------------------------------------------------------------------------------------------------


def inference_dtype(c: SampleConfig, device: torch.device) -> str:
    """The dtype of the matmuls; on a CPU float32 unless c names another.

    One row at a time, only the weights' way through memory counts, and autocast would cast them again for every token.
    """
    if c.dtype != "auto":
        return c.dtype
    return "float32" if device.type == "cpu" else peaks.fast_dtype(device)


def generation_config(c: SampleConfig) -> GenerationConfig:
    """The text that c asks for. Raises ValueError if the prompt is empty or is not UTF-8."""
    prompt = read_text(Path(c.start[5:]).expanduser()) if c.start.startswith("FILE:") else c.start
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


# ---- talking -------------------------------------------------------------------------------------------------


def chat(c: SampleConfig, generation: GenerationConfig, trained: Trained) -> None:
    """Answers on the terminal until the input ends. Raises ValueError if the model cannot talk."""
    writer = writer_of(c, generation, trained)

    def answer(ids: Ids, n: int) -> Iterator[str]:
        """The n-th answer, in pieces as they come."""
        text, prompts = writer.answer(Sample, ids, c.stop)
        for shown in write(trained.model, prompts, [text], replace(generation, seed=c.seed + n), writer.replacing):
            yield shown[0]

    assert writer.chat_template is not None
    talk.talk(writer.chat_template, writer.block_size, c.system, answer)


# ---- page ----------------------------------------------------------------------------------------------------


def serve(c: SampleConfig, generation: GenerationConfig, trained: Trained) -> None:
    """Serves the page and OpenAI's API until Ctrl+C. Raises ValueError and OSError."""
    from deskgpt.serve import openai_api, playground, server  # which need packages of their own

    writer = writer_of(c, generation, trained)
    about = f"for programs, as OpenAI's API: base_url={{address}}/v1 api_key={writer.token}"
    app = server.make_app([*playground.routes(writer), *openai_api.routes(writer)])
    server.run_app(app, c.port, f"/{writer.token}/", about)


def writer_of(c: SampleConfig, generation: GenerationConfig, trained: Trained) -> Writer:
    """The model of a dialogue or of the page. It talks if it saw dialogues, or with --chat."""
    device = next(trained.model.parameters()).device
    prompt = encode_prompt(generation.prompt, trained.tokenizer).to(device)
    engine = InferenceEngine(trained.model, prompt, inference_dtype(c, device), compiled=c.compile)
    chat_template = template.Template(trained.tokenizer) if c.chat or trained.saw_chat else None
    if c.chat and not trained.saw_chat:
        note = f"note: {trained.source} was not trained on data of data/chat/prepare.py: docs/sampling.md"
        print(note, file=sys.stderr)
    return Writer(trained, engine.replacing, generation, chat_template, c.system)


if __name__ == "__main__":
    with one_line_errors("lower --num_samples or --max_new_tokens, or take --stream"):
        main(configure(SampleConfig, sys.argv[1:]))
