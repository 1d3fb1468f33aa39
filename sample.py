"""Write text with a trained model.

    python sample.py --out_dir=out-shakespeare-char --start="ROMEO:" --num_samples=3
    python sample.py --init_from=gpt2 --start=FILE:prompt.txt --temperature=0.7 --top_p=0.9
    python sample.py --out_dir=out-shakespeare-char --serve
    python sample.py --out_dir=out-chat --chat

Prints each sample, prompt included, followed by a line of dashes; the first one while it is
written. With --chat, you talk with the model. --serve shows a page in the browser for both, and
answers programs that ask as they ask OpenAI's API. Writes no files. In --start, --stop and
--system, \\n is a line break, \\t a tab and \\\\ a backslash.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from deskgpt.errors import one_line_errors, require_torch

require_torch()

from torch import Tensor

from configurator import configure
from data.chat import template
from data.text_files import read_text
from deskgpt.chat import Writer, talk
from deskgpt.compiling import default_dtype
from deskgpt.device import limit_threads, resolve_device, unused_gpu
from deskgpt.engine import (
    PROMPT,
    GenerationConfig,
    InferenceEngine,
    LoadedModel,
    Sample,
    encode_prompt,
    load_model,
)
from deskgpt.settings import AtLeast1, FilePath, Range

DASHES = "\n---------------"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleConfig(GenerationConfig):  # which has max_new_tokens, stop, temperature, top_k ...
    # model
    init_from: FilePath = "resume"  # resume (out_dir), gpt2[-medium|-large|-xl], a .pt or folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model; or a file: out/ckpt_best.pt, the best
    # samples
    start: str = PROMPT  # the prompt; FILE:prompt.txt reads it from a file
    num_samples: AtLeast1 = 10  # generated side by side
    # talking
    chat: bool = False  # answer what you type, with a model trained on chat data: docs/sampling.md
    system: str = ""  # the dialogue's first message: instructions to the assistant
    # machine
    device: str = "auto"  # auto, cpu, cuda, cuda:N or mps
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # of the matmuls
    # page
    serve: bool = False  # a page to play with in this machine's browser, until Ctrl+C
    open_page: bool = False  # in the browser, at once
    port: Annotated[int, Range(0, below=2**16)] = 0  # of the page; 0 = one that is free

    # nanoGPT has this setting; it has no effect here.
    retired: ClassVar[dict[str, str]] = {"compile": ""}


def main(c: SampleConfig) -> list[str]:
    """Print samples as c says; return their texts, prompt included."""
    c = replace(c, stop=unescaped(c.stop), system=unescaped(c.system))
    device = resolve_device(c.device)
    limit_threads()
    if c.device == "auto" and device.type == "cpu":
        reason = unused_gpu()
        if reason:
            print(f"{reason}; sampling on the CPU", file=sys.stderr)
    prompt = prompt_of(c)
    trained = load_model(c.init_from, c.out_dir, device)
    trained.model.eval().to(device)
    ids = encode_prompt(prompt, trained.tokenizer).to(device)  # (1, T)
    writer = writer_of(c, prompt, ids, trained)
    if c.serve:
        from deskgpt import server  # it needs packages of its own

        server.run_app(server.make_app(writer), c.port, c.open_page)
        return []
    if c.chat:
        talk(writer)
        return []
    samples = [Sample(trained.tokenizer, prompt, c.stop) for _ in range(c.num_samples)]
    if ids.size(1) > writer.block_size:
        print(
            f"note: the prompt has {ids.size(1):,} tokens; the model sees the last "
            f"{writer.block_size:,}, its context",
            file=sys.stderr,
        )
    print(samples[0].text, end="", flush=True)
    for shown, _ in writer.engine.write(ids.repeat(c.num_samples, 1), samples, c):
        print(shown[0], end="", flush=True)
    print(DASHES)
    for sample in samples[1:]:
        print(f"{sample.text}{DASHES}")
    return [sample.text for sample in samples]


# ---- set-up --------------------------------------------------------------------------------------


def unescaped(typed: str) -> str:
    """Return a text from the command line, where \\n stands for a line break: a shell leaves it
    alone.
    """
    meanings = {"n": "\n", "t": "\t", "\\": "\\"}
    return re.sub(r"\\([nt\\])", lambda found: meanings[found[1]], typed)


def prompt_of(c: SampleConfig) -> str:
    """Return the prompt that c asks for. Raises ValueError if it is empty."""
    if c.start.startswith("FILE:"):
        prompt = read_text(Path(c.start[5:]).expanduser())
    else:
        prompt = unescaped(c.start)
    if not prompt:
        raise ValueError(f"start={c.start!r} holds no text to continue; try --start='\\n'")
    return prompt


def writer_of(c: SampleConfig, prompt: str, ids: Tensor, trained: LoadedModel) -> Writer:
    """Return the model in the dtype that c asks for; on a CPU that is float32 by default.

    ids: of the prompt (1, T). The model talks if it saw dialogues, or with --chat. Raises
    ValueError if it cannot talk, or if there is no room for the system message.
    """
    dtype: str = c.dtype
    if dtype == "auto":
        dtype = "float32" if ids.device.type == "cpu" else default_dtype(ids.device)
    chat_template = (
        template.Template(trained.tokenizer) if c.chat or trained.is_chat_model else None
    )
    if c.chat and not trained.is_chat_model:
        print(
            f"note: {trained.source} was not trained on data of data/chat/prepare.py: "
            "docs/sampling.md",
            file=sys.stderr,
        )
    engine = InferenceEngine(trained.model, ids, dtype, trained.tokenizer.end_of_text)
    return Writer(trained, engine, c, prompt, chat_template, c.system)


if __name__ == "__main__":
    with one_line_errors("lower --num_samples or --max_new_tokens"):
        main(configure(SampleConfig, sys.argv[1:]))
