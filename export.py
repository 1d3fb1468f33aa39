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

import importlib.util
import json
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from deskgpt.errors import ConfigError, millions, one_line_errors, require_torch

require_torch()

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import configure
from data.chat import template
from data.tokenizer_json import tokenizer_config_json, tokenizer_json
from deskgpt import export_gguf, export_hugging_face
from deskgpt.engine import LoadedModel, load_model
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
    if to.suffix.lower() in (".onnx", ".pt", ".bin", ".safetensors"):
        raise ConfigError(f"to={to}: name a new folder, for transformers, or a file NAME.gguf")
    check_unused(to)
    trained = load_model(c.init_from, c.out_dir, torch.device("cpu"))
    trained.model.eval()
    is_gguf = to.suffix.lower() == ".gguf"
    package = "xllamacpp" if is_gguf else "transformers"
    is_compared = importlib.util.find_spec(package) is not None
    write = write_gguf if is_gguf else write_folder
    loaded_by = write(trained, to, is_compared)
    size = millions(sum(p.numel() for p in trained.model.parameters()))
    print(f"{to}: {size} parameters, tokenizer {trained.tokenizer.meta()['name']}, {loaded_by}")
    same = "computes the same logits as model.py after a text"
    print(package, same if is_compared else "is not installed: nothing was compared with model.py")
    return is_compared


def write_folder(trained: LoadedModel, to: Path, is_compared: bool) -> str:
    """Write the folder; return the name of the program that computes it. Raises ValueError and
    OSError; then nothing is left.
    """
    if export_hugging_face.is_gpt2(trained.model.config):
        with suppress(export_hugging_face.Differs):  # model.py was changed
            return write_folder_for(True, trained, to, is_compared)
    return write_folder_for(False, trained, to, is_compared)


def write_folder_for(gpt2: bool, trained: LoadedModel, to: Path, is_compared: bool) -> str:
    """Write the folder for GPT-2's class in transformers, or for ours."""
    model = plain(trained.model) if gpt2 else trained.model
    config = replace(model.config, bias=trained.model.config.bias)
    tokenizer = trained.tokenizer
    computed_by = "GPT2LMHeadModel" if gpt2 else "DeskGPTForCausalLM with model.py"
    prompt = tokenizer.meta().get("chars", "\n")[0]  # the tokenizer knows it
    chat_template = template.JINJA if trained.is_chat_model else None
    records = export_hugging_face.configs(
        config, tokenizer.vocab_size, tokenizer.end_of_text, gpt2
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
        texts |= export_hugging_face.sources()
    with new_folder(to) as folder:
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8", newline="\n")
        export_hugging_face.write_weights(
            folder / "model.safetensors", config, model.state_dict(), gpt2
        )
        if is_compared:
            export_hugging_face.compare(folder, trained.model, text_to_compare(trained))
    return computed_by


def write_gguf(trained: LoadedModel, to: Path, is_compared: bool) -> str:
    """Write the GGUF file; return the architecture that computes it. Raises ValueError and OSError;
    then nothing is left.
    """
    model = plain(trained.model)
    chat_template = template.JINJA if trained.is_chat_model else None
    tokenizer = tokenizer_json(trained.tokenizer)
    try:
        with replacing(to) as file:
            path = Path(file.name)
            export_gguf.write(path, model.config, model.state_dict(), tokenizer, chat_template)
            if is_compared:
                export_gguf.compare(path, trained.model, text_to_compare(trained))
    except OSError as e:
        raise cannot_write(to, e) from None
    if chat_template:
        modelfile = template.MODELFILE.format(name=to.name)
        Path(f"{to}.Modelfile").write_text(modelfile, encoding="utf-8", newline="\n")
    return f"llama.cpp's {export_gguf.architecture_of(model.config)}"


def plain(model: GPT) -> GPT:
    """Return a model that computes the same with what other programs have: LayerNorms and their
    layers with biases, and no norm of the embedding.
    """
    c = model.config
    weights = model.state_dict()
    config = replace(c, bias=c.bias or c.norm == "layer")  # new biases are zeros
    if c.embedding_norm:
        config = replace(config, embedding_norm=False, tie_weights=False)
        embedding = weights["transformer.wte.weight"]
        weights["transformer.wte.weight"] = F.rms_norm(embedding, (c.n_embd,), eps=1e-5)
    found = GPT(config)
    found.load_state_dict(weights, strict=False)
    return found


def text_to_compare(trained: LoadedModel) -> Tensor:
    """Return token ids (1, T) that leave room for one more in the context: of this file's text, or
    of all characters if the tokenizer has characters.
    """
    tokenizer = trained.tokenizer
    text = tokenizer.meta().get("chars") or Path(__file__).read_text(encoding="utf-8")
    n = max(1, trained.model.config.block_size - 1)
    return torch.from_numpy(np.resize(tokenizer.encode(text).astype("int64"), (1, n)))


if __name__ == "__main__":
    # So that what is half written is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    with one_line_errors("take a machine with four times the model's memory"):
        if not main(configure(ExportConfig, sys.argv[1:])):
            sys.exit(3)
