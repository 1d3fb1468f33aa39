"""Write a trained model for other programs: as a Hugging Face folder, or as a GGUF file for
llama.cpp and Ollama.

    python export.py --out_dir=out-shakespeare-char --to=my-model
    python export.py --out_dir=out/ckpt_best.pt --to=my-model.gguf

The folder gets config.json, generation_config.json, model.safetensors, tokenizer.json,
tokenizer_config.json, README.md (how to load it), and your model.py with what it needs, if the
model is not a GPT-2. The result is loaded again with transformers or llama.cpp (the package
xllamacpp), and its logits are compared with model.py's on text. If they differ, nothing is
exported. Without that package the exit status is 3: exported, and not compared.
"""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import configure
from data.chat import template
from data.tokenizer_json import tokenizer_config_json, tokenizer_json
from deskgpt import export_gguf, export_hugging_face, export_sources
from deskgpt.engine import LoadedModel, load_model
from deskgpt.errors import millions, one_line_errors
from deskgpt.files import cannot_write, check_unused, new_folder, replacing
from deskgpt.settings import FilePath, check_fields
from model import GPT

CARD = Path(export_hugging_face.__file__).with_name("card.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    init_from: FilePath = "resume"  # resume (out_dir), gpt2[-medium|-large|-xl], a .pt or folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model; or a file: out/ckpt_best.pt, the best
    to: FilePath = ""  # the new folder; or a file whose name ends in .gguf

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.to:
            raise ValueError("to is empty; name the folder to write, such as --to=my-model")


def main(c: ExportConfig) -> bool:
    """Write c.to; return whether it was compared.

    Raises ValueError and OSError; nothing half-written is left.
    """
    to = Path(c.to)
    check_unused(to)
    trained = load_model(c.init_from, c.out_dir, torch.device("cpu"))
    trained.model.eval()
    write = write_gguf if to.suffix.lower() == ".gguf" else write_folder
    loaded_by, compared = write(trained, to)
    size = millions(sum(p.numel() for p in trained.model.parameters()))
    print(f"{to}: {size} parameters, tokenizer {trained.tokenizer.meta()['name']}, {loaded_by}")
    program = "llama.cpp (xllamacpp)" if write is write_gguf else "transformers"
    same = "computes the same logits as model.py after each token of a text"
    print(program, same if compared else "is not installed: nothing was compared with model.py")
    return compared


def write_folder(trained: LoadedModel, to: Path) -> tuple[str, bool]:
    """Write the folder; return what computes it, and whether that was compared.

    Raises ValueError and OSError; then nothing is left.
    """
    ways = [(False, True), (False, False)]  # for GPT-2's class or ours, with a cache or without
    if export_hugging_face.is_gpt2(trained.model.config):
        ways.insert(0, (True, True))
    for gpt2, use_cache in ways:  # the first that computes what model.py does
        try:
            return write_folder_for(gpt2, use_cache, trained, to)
        except export_hugging_face.Differs as e:
            error = e
    raise error


def write_folder_for(
    gpt2: bool, use_cache: bool, trained: LoadedModel, to: Path
) -> tuple[str, bool]:
    model = without_embedding_norm(trained.model) if gpt2 else trained.model
    config = model.config
    tokenizer = trained.tokenizer
    computed_by = "GPT2LMHeadModel" if gpt2 else "DeskGPTForCausalLM with model.py"
    prompt = tokenizer.meta().get("chars", "\n")[0]  # which the tokenizer knows
    chat_template = template.JINJA if trained.is_chat_model else None
    records = export_hugging_face.configs(
        config, tokenizer.vocab_size, tokenizer.end_of_text, gpt2, use_cache
    ) | {
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": tokenizer_config_json(tokenizer, config.block_size, chat_template),
    }
    texts = {
        name: json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        for name, record in records.items()
    }
    card = CARD.read_text(encoding="utf-8")
    texts["README.md"] = card.format(name=to.resolve().name, class_name=computed_by, prompt=prompt)
    if not gpt2:
        texts |= export_sources.sources()
    with new_folder(to) as folder:
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8", newline="\n")
        export_hugging_face.write_weights(
            folder / "model.safetensors", config, model.state_dict(), gpt2
        )
        return computed_by, export_hugging_face.compare(
            folder, trained.model, text_to_compare(trained)
        )


def write_gguf(trained: LoadedModel, to: Path) -> tuple[str, bool]:
    """Write the GGUF file; return the architecture that computes it, and whether that was compared.

    Raises ValueError and OSError; then nothing is left.
    """
    model = without_embedding_norm(trained.model)
    chat_template = template.JINJA if trained.is_chat_model else None
    tokenizer = tokenizer_json(trained.tokenizer)
    try:
        with replacing(to) as file:
            path = Path(file.name)
            export_gguf.write(path, model.config, model.state_dict(), tokenizer, chat_template)
            compared = export_gguf.compare(path, trained.model, text_to_compare(trained))
    except OSError as e:
        raise cannot_write(to, e) from None
    return f"llama.cpp's {export_gguf.architecture_of(model.config)}", compared


def without_embedding_norm(model: GPT) -> GPT:
    """Return a model that computes the same without this norm, which other programs lack: its
    embeddings have it.
    """
    c = model.config
    if not c.embedding_norm:
        return model
    weights = model.state_dict()
    weights["transformer.wte.weight"] = F.rms_norm(
        weights["transformer.wte.weight"], (c.n_embd,), eps=1e-5
    )
    without = GPT(replace(c, embedding_norm=False, tie_weights=False))
    without.load_state_dict(weights)
    return without


def text_to_compare(trained: LoadedModel) -> Tensor:
    """Return token ids (1, T) of real text, this file's, that leave room for one more in the
    context.
    """
    text = Path(__file__).read_text(encoding="utf-8")
    chars = trained.tokenizer.meta().get("chars")
    if chars:
        text = "".join(char for char in text if char in chars) or chars
    ids = np.resize(
        trained.tokenizer.encode(text).astype("int64"), max(1, trained.model.config.block_size - 1)
    )
    return torch.from_numpy(ids)[None]


if __name__ == "__main__":
    # So that what is half written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with one_line_errors("take a machine with four times the model's memory"):
        if not main(configure(ExportConfig, sys.argv[1:])):
            sys.exit(3)
