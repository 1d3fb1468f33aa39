"""Write a trained model for other programs: as a Hugging Face folder, or as a GGUF file for llama.cpp and Ollama.

    python export.py --out_dir=out-shakespeare-char --to=my-model
    python export.py --out_dir=out/ckpt_best.pt --to=my-model --push_to_hub=my-model
    python export.py --out_dir=out-shakespeare-char --to=my-model.gguf --ollama
    python export.py --out_dir=out-sharded --to=ckpt.pt

The folder gets config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json, README.md
(the model card), and modeling_deskgpt.py if the model is not a GPT-2. The result is loaded again with transformers or
llama.cpp (the package xllamacpp), if that is installed, and its logits are compared with model.py's on text. If they
differ, as after a change of model.py, nothing is exported. A name that ends in .pt makes one file of a sharded run's
checkpoint.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import configure
from data.chat import template
from data.meta_files import read_record
from data.tokenizer_json import tokenizer_config_json, tokenizer_json
from deskgpt.checkpoint import store
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.export import gguf_format, hub, hugging_face
from deskgpt.export.hugging_face import MODELING_FILE
from deskgpt.generate.text import GenerationConfig
from deskgpt.generate.trained import DATA, Trained, load
from deskgpt.system.errors import one_line_errors
from deskgpt.system.files import cannot_write, check_unused, is_local, new_folder, replacing, write_atomically
from deskgpt.system.settings import FilePath, check_fields
from deskgpt.system.terminal import millions
from model import GPT

CARD_SETTINGS = (
    *("batch_size", "gradient_accumulation_steps", "optimizer", "learning_rate", "min_lr", "lr_schedule"),
    *("warmup_iters", "max_iters", "weight_decay", "grad_clip", "seed", "init_from"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    init_from: FilePath = "resume"  # resume (a checkpoint in out_dir), gpt2[-medium|-large|-xl], a checkpoint, a folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model (to resume); or a file: out/ckpt_best.pt, the best (to use)
    to: FilePath = ""  # the new folder; or a file whose name ends in .gguf, or in .pt: the checkpoint as one file
    ollama: bool = False  # beside a .gguf: a Modelfile, from which `ollama create` makes a model
    push_to_hub: str = ""  # a repository of the Hugging Face hub to upload to, OWNER/NAME or NAME; a new one is private

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.to:
            raise ValueError("to is empty; name the folder to write, such as --to=my-model")
        if self.kind == ".pt" and self.push_to_hub:
            raise ValueError(f"push_to_hub={self.push_to_hub} is not for checkpoints; try --to=my-model")
        if self.ollama and self.kind != ".gguf":
            raise ValueError(f"ollama=True is for a GGUF file; try --to={self.to}.gguf")

    @property
    def kind(self) -> str:
        """Return the ending of the name: .gguf, .pt, or a folder's."""
        return Path(self.to).suffix.lower()


def main(c: ExportConfig) -> None:
    """Write c.to and upload it as c says. Raises ValueError and OSError; nothing half-written is left."""
    to = Path(c.to)
    check_unused(to)
    if c.kind == ".pt":
        saved = store.load(c.out_dir if c.init_from == "resume" else c.init_from, print)
        store.write_file(saved, to)
        print(f"{to}: step {saved.iter_num}, {len(saved.model)} weights and the optimizer's state")
        return
    modelfile = to.with_name("Modelfile")
    if c.ollama and modelfile.exists():
        raise ValueError(f"{modelfile} exists; remove it first, or name a .gguf in another folder")
    repository = hub.full_name(c.push_to_hub) if c.push_to_hub else ""
    trained = load(c.init_from, c.out_dir, torch.device("cpu"))
    write = write_gguf if c.kind == ".gguf" else write_folder
    export = write(trained, to, repository or to.resolve().name)
    if c.ollama:
        write_atomically(modelfile, modelfile_of(trained, to.name).encode())
        export.files["Modelfile"] = modelfile
    tokenizer = trained.tokenizer.meta()["name"]
    print(f"{to}: {size_of(trained.model)} parameters, tokenizer {tokenizer}, {export.loaded_by}")
    print(export.compared)
    if repository:
        address = hub.push(repository, export.files, f"{to} is complete: `hf upload {repository} {to}` uploads it too")
        print(f"uploaded {', '.join(export.files)} to {address}")


@dataclass
class Export:
    """An export that was written."""

    loaded_by: str  # the class or architecture that computes it
    compared: str  # a sentence about the comparison with model.py
    files: dict[str, Path | bytes]  # for the hub, by their names there


def write_folder(trained: Trained, to: Path, name: str) -> Export:
    """Write the folder, called `name` on its card. Raises ValueError and OSError; then nothing is left."""
    model = without_embedding_norm(trained.model)
    config = model.config
    tokenizer = trained.tokenizer
    is_gpt2 = hugging_face.is_gpt2(config)
    class_name = hugging_face.class_name(config)
    if not is_gpt2:
        class_name += f", in {MODELING_FILE} beside the weights; trust_remote_code=True runs it"
    usage = template_file("usage_transformers.md").format(
        name=name,
        class_name=class_name,
        trust="" if is_gpt2 else ", trust_remote_code=True",
        prompt=tokenizer.meta().get("chars", "\n")[0],  # which the tokenizer knows
        new_tokens=max(1, min(100, config.block_size // 2)),
    )
    chat_template = template.JINJA if trained.saw_chat else None
    records = {
        "config.json": hugging_face.config_json(config, tokenizer.end_of_text),
        "generation_config.json": hugging_face.generation_config_json(
            config, tokenizer.vocab_size, tokenizer.end_of_text
        ),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": tokenizer_config_json(tokenizer, config.block_size, chat_template),
    }
    with new_folder(to) as folder:
        for file, record in records.items():
            text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
            (folder / file).write_text(text, encoding="utf-8", newline="\n")
        if not is_gpt2:
            shutil.copyfile(Path(hugging_face.__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
        (folder / "README.md").write_text(model_card(trained, name, "transformers", usage), encoding="utf-8")
        hugging_face.write_weights(folder / "model.safetensors", config, model.state_dict())
        compared = hugging_face.compare(folder, trained.model.eval(), text_to_compare(trained))
    return Export(class_name, compared, {path.name: path for path in sorted(to.iterdir())})


def write_gguf(trained: Trained, to: Path, name: str) -> Export:
    """Write the GGUF file. Raises ValueError and OSError; then nothing is left."""
    model = without_embedding_norm(trained.model)
    config = model.config
    architecture = gguf_format.architecture_of(config)
    usage = template_file("usage_llama_cpp.md").format(file=to.name, context=config.block_size)
    card = model_card(trained, name, "gguf", usage)
    chat_template = template.JINJA if trained.saw_chat else None
    try:
        with replacing(to) as file:
            path = Path(file.name)
            gguf_format.write(path, config, model.state_dict(), tokenizer_json(trained.tokenizer), chat_template)
            compared = gguf_format.compare(path, trained.model.eval(), text_to_compare(trained))
    except OSError as e:
        raise cannot_write(to, e) from None
    return Export(f"llama.cpp's {architecture}", compared, {to.name: to, "README.md": card.encode()})


def without_embedding_norm(model: GPT) -> GPT:
    """Return a model that computes the same without this norm, which other programs lack: its embeddings have it."""
    c = model.config
    if not c.embedding_norm:
        return model
    weights = model.state_dict()
    weights["transformer.wte.weight"] = F.rms_norm(weights["transformer.wte.weight"], (c.n_embd,), eps=1e-5)
    without = GPT(replace(c, embedding_norm=False, tie_weights=False))
    without.load_state_dict(weights)
    return without


def template_file(name: str) -> str:
    """Return a text with fields for str.format, beside the code of the formats."""
    return Path(hugging_face.__file__).with_name(name).read_text(encoding="utf-8")


def text_to_compare(trained: Trained) -> Tensor:
    """Return token ids (1, T) of real text, this file's, that leave room for one more in the context."""
    text = Path(__file__).read_text(encoding="utf-8")
    chars = trained.tokenizer.meta().get("chars")
    if chars:
        text = "".join(char for char in text if char in chars) or chars
    ids = np.resize(trained.tokenizer.encode(text).astype("int64"), max(1, trained.model.config.block_size - 1))
    return torch.from_numpy(ids)[None]


# ---- model card and Modelfile ----


def size_of(model: GPT) -> str:
    return millions(sum(p.numel() for p in model.parameters()))


def model_card(trained: Trained, name: str, library: str, usage: str) -> str:
    """Return README.md: what the model is, how it is loaded (`usage`), how it was trained."""
    rows: dict[str, Any] = {"parameters": size_of(trained.model)}
    saved = trained.checkpoint
    if saved is not None:
        rows |= training_of(saved)
        rows |= {name: saved.config[name] for name in CARD_SETTINGS if name in saved.config}
        rows["init_from"] = Path(rows.get("init_from", "scratch")).name  # not where this machine has it
    rows |= asdict(trained.model.config)
    cells = {name: "n/a" if value is None else str(value).replace("|", "\\|") for name, value in rows.items()}
    table = "".join(f"| {name} | {value} |\n" for name, value in cells.items())
    return template_file("card.md").format(library=library, name=name, usage=usage.strip(), table=table)


def training_of(saved: Checkpoint) -> dict[str, Any]:
    """Return what a checkpoint says about its training and about the evaluation of its step."""
    c = saved.config
    batch: list[Any] = [c.get(key) for key in ("batch_size", "gradient_accumulation_steps", "block_size")]
    evaluations = (saved.progress or {}).get("evaluations", [])
    losses = [evaluation[2] for evaluation in evaluations if evaluation[0] == saved.iter_num]
    dataset = c["dataset"] if is_local(c.get("dataset")) else ""
    return {
        "data": Path(dataset).name or None,
        "source of the data": read_record(DATA / dataset).get("source") if dataset else None,
        "steps": saved.iter_num,
        "tokens trained on": None if None in batch else f"{saved.iter_num * math.prod(batch):,}",
        "validation loss (nats per token)": f"{losses[0]:.4f}" if losses else None,
        "git commit of deskGPT": (saved.metadata or {}).get("code"),
    }


def modelfile_of(trained: Trained, file: str) -> str:
    """Return what tells Ollama how a dialogue is written in the GGUF file's model, and to sample as sample.py does."""
    text = template_file("Modelfile.txt").format(
        file=file,
        template=template.OLLAMA if trained.saw_chat else "{{ .Prompt }}",
        context=trained.model.config.block_size,
        **asdict(GenerationConfig()),
    )
    return text + (f'PARAMETER stop "{template.FORGED_TURN}"\n' if trained.saw_chat else "")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what is half written is removed
    with one_line_errors("take a machine with four times the model's memory"):
        main(configure(ExportConfig, sys.argv[1:]))
