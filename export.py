"""Writes a trained model for other programs: as a Hugging Face folder, or as a GGUF file for llama.cpp and Ollama.

    python export.py --out_dir=out-shakespeare-char --to=my-model
    python export.py --out_dir=out/ckpt_best.pt --to=my-model --push_to_hub=my-model
    python export.py --out_dir=out-shakespeare-bpe --to=my-model.gguf --ollama

The folder gets config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json, README.md
(the model card), and for a model that is not a GPT-2 its own code, modeling_deskgpt.py. What is written is loaded again
with transformers or llama.cpp (the package xllamacpp), if that is installed, and its logits are compared with those of
model.py: what computes something else, as after a change of model.py, is not left.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch
import torch.nn.functional as F
from torch import Tensor

from configurator import configure
from data.chat import template
from data.token_files import read_record
from data.tokenizer_json import tokenizer_config_json, tokenizer_json
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.export import gguf_format, hub, hugging_face
from deskgpt.export.hugging_face import MODELING_FILE
from deskgpt.kernels.verify import SAME_LOGITS, distance
from deskgpt.sampling.trained import DATA, Trained, load
from deskgpt.system.errors import one_line_errors
from deskgpt.system.files import check_unused, new_folder, replacing, write_atomically
from deskgpt.system.formatting import millions
from deskgpt.system.settings import FilePath, check_fields
from deskgpt.system.untrusted import is_local
from model import GPT, GPTConfig
from sample import SampleConfig

CARD_SETTINGS = (
    *("batch_size", "gradient_accumulation_steps", "optimizer", "learning_rate", "min_lr", "lr_schedule"),
    *("warmup_iters", "max_iters", "weight_decay", "grad_clip", "seed", "init_from"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    init_from: FilePath = "resume"  # resume (a checkpoint in out_dir), gpt2[-medium|-large|-xl], a checkpoint, a folder
    out_dir: FilePath = "out"  # its ckpt.pt, the last model (to resume); or a file: out/ckpt_best.pt, the best (to use)
    to: FilePath = ""  # the new folder; or a file whose name ends in .gguf
    ollama: bool = False  # beside a .gguf: a Modelfile, from which `ollama create` makes a model
    push_to_hub: str = ""  # a repository of the Hugging Face hub to upload to, OWNER/NAME or NAME; a new one is private

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.to:
            raise ValueError("to is empty; name the folder to write, such as --to=my-model")
        if self.ollama and not self.to.endswith(".gguf"):
            raise ValueError(f"ollama=True is for a GGUF file, and to={self.to} is a folder; try --to={self.to}.gguf")


def main(c: ExportConfig) -> None:
    """Writes c.to and uploads it as c says. Raises ValueError and OSError; nothing is left of what is not whole."""
    to = Path(c.to)
    check_unused(to)
    repository = hub.whole_name(c.push_to_hub) if c.push_to_hub else ""
    trained = load(c.init_from, c.out_dir, torch.device("cpu"))
    name = repository or to.resolve().name
    if c.to.endswith(".gguf"):
        written = write_gguf(trained, to, name, c.ollama)
    else:
        written = write_folder(trained, to, name)
    print(f"{to}: {size_of(trained.model)} parameters, tokenizer {trained.tokenizer.meta()['name']}, {written.program}")
    print(written.compared)
    if repository:
        address = hub.push(repository, written.files, f"{to} is whole: `hf upload {repository} {to}` uploads it too")
        print(f"uploaded {', '.join(written.files)} to {address}")


@dataclass
class Written:
    """What an export has made."""

    program: str  # and what it takes to load the model there
    compared: str  # what the comparison with model.py says
    files: dict[str, Path | bytes]  # for the hub, by their names there


def write_folder(trained: Trained, to: Path, name: str) -> Written:
    """Writes the folder, called `name` on its card. Raises ValueError and OSError; nothing is left of it then."""
    model = without_embedding_norm(trained.model)
    config = model.config
    tokenizer = trained.tokenizer
    ids = (tokenizer.vocab_size, tokenizer.end_of_text)
    with new_folder(to) as folder:
        write_json(folder / "config.json", hugging_face.config_json(config, tokenizer.end_of_text))
        write_json(folder / "generation_config.json", hugging_face.generation_config_json(config, *ids))
        write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
        chat_template = template.JINJA if trained.saw_chat else None
        write_json(folder / "tokenizer_config.json", tokenizer_config_json(tokenizer, config.block_size, chat_template))
        if not hugging_face.is_gpt2(config):
            shutil.copyfile(Path(hugging_face.__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
        (folder / "README.md").write_text(model_card(trained, "transformers", usage(trained, name)), encoding="utf-8")
        write_weights(folder / "model.safetensors", hugging_face.to_hugging_face(config, model.state_dict()))
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors lets nobody else read it
        compared = compare(folder, trained.model.eval())
    return Written(class_of(config), compared, {path.name: path for path in sorted(to.iterdir())})


def write_gguf(trained: Trained, to: Path, name: str, ollama: bool) -> Written:
    """Writes the GGUF file, and a Modelfile beside it. Raises ValueError and OSError; nothing is left of it then."""
    model = without_embedding_norm(trained.model)
    config = model.config
    vocabulary = tokenizer_json(trained.tokenizer)
    chat_template = template.JINJA if trained.saw_chat else None
    modelfile = to.with_name("Modelfile")
    if ollama and modelfile.exists():
        raise ValueError(f"{modelfile} exists; remove it first, or name a .gguf in another folder")
    try:
        with replacing(to) as file:
            path = Path(file.name)
            gguf_format.write(path, config, model.state_dict(), vocabulary, chat_template)
            compared = gguf_format.compare(path, trained.model.eval(), trained.tokenizer.vocab_size)
    except OSError as e:
        raise OSError(f"cannot write {to}: {e.strerror or e}; free some disk space or choose another folder") from None
    files: dict[str, Path | bytes] = {to.name: to}
    if ollama:
        write_atomically(modelfile, modelfile_of(trained, to.name).encode())
        files["Modelfile"] = modelfile
    card = model_card(trained, "gguf", GGUF_USAGE.format(name=name, file=to.name, context=config.block_size))
    return Written(f"llama.cpp's {gguf_format.architecture_of(config)}", compared, files | {"README.md": card.encode()})


def class_of(config: GPTConfig) -> str:
    """Which class of transformers loads the folder, and what that takes."""
    name = hugging_face.class_name(config)
    if hugging_face.is_gpt2(config):
        return name
    return f"{name}, in {MODELING_FILE} beside the weights; trust_remote_code=True runs it"


def without_embedding_norm(model: GPT) -> GPT:
    """A model that computes the same without this norm, which other programs lack: its embeddings have it already."""
    c = model.config
    if not c.embedding_norm:
        return model
    weights = model.state_dict()
    weights["transformer.wte.weight"] = F.rms_norm(weights["transformer.wte.weight"], (c.n_embd,), eps=1e-5)
    plain = GPT(replace(c, embedding_norm=False, tie_weights=False))
    plain.load_state_dict(weights)
    return plain


# ---- files ---------------------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")


def write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    """Raises OSError where the disk fails."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as e:  # its own wrapping of the system's errors
        raise OSError(str(e)) from None


# ---- what it computes ----------------------------------------------------------------------------------------


@torch.inference_mode()
def compare(folder: Path, ours: GPT) -> str:
    """Compares what transformers makes of the folder with model.py; says how. Raises ValueError where they differ."""
    try:
        from transformers import GPT2LMHeadModel
        from transformers.utils import logging
    except ImportError:
        return "transformers is not installed: nothing was compared with model.py"
    cls: Any = GPT2LMHeadModel
    if not hugging_face.is_gpt2(ours.config):
        from deskgpt.export.modeling_deskgpt import DeskGPTForCausalLM as cls  # which the folder has a copy of

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a table of what does not fit would hide our one line
    theirs, found = cls.from_pretrained(
        folder, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
    )
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(ours.config.vocab_size, (1, ours.config.block_size), generator=draw)
    unfit = [*found["unexpected_keys"], *found["mismatched_keys"]]
    problem = f"it lacks, or has in another shape, {unfit[0]}" if unfit else None
    if problem is None:
        off = distance(theirs.eval()(tokens).logits, ours(tokens)[0])
        problem = None if off <= SAME_LOGITS else f"its logits differ by {off:.3g}"
    if problem is not None:
        raise ValueError(
            f"{cls.__name__} does not compute what model.py does: {problem}; nothing was exported. It has GPT-2's "
            "network with the choices of docs/export.md; a model that was changed in other ways needs code of its own"
        )
    return f"transformers computes the same logits as model.py on {tokens.numel():,} tokens"


# ---- model card ----------------------------------------------------------------------------------------------


CARD = """\
---
library_name: {library}
pipeline_tag: text-generation
tags:
- deskgpt
---

{usage}

The context is {context} tokens.

{facts}

{settings}
"""

# The tokenizer by its own class: AutoTokenizer of transformers 5 reads config.json first, and asks before it runs the
# code that a model of our own class names there.
USAGE = """\
# {name}

A language model trained with deskGPT. Its class is {of_class}. In float32 it computes what deskGPT does.

```python
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

tokenizer = PreTrainedTokenizerFast.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}{remote})
prompt = tokenizer({prompt}, return_tensors='pt')
print(tokenizer.decode(model.generate(**prompt, do_sample=True, max_new_tokens={new_tokens})[0]))
```"""

GGUF_USAGE = """\
# {name}

A language model trained with deskGPT, in float32, for llama.cpp and the programs that are built on it.

```sh
llama-server -m {file} -c {context}
```"""


def size_of(model: GPT) -> str:
    return millions(sum(p.numel() for p in model.parameters()))


def usage(trained: Trained, name: str) -> str:
    """How transformers loads the folder `name`."""
    config = trained.model.config
    chars = trained.tokenizer.meta().get("chars", "\n")
    return USAGE.format(
        name=name,
        of_class=class_of(config),
        prompt=repr(chars[0]),  # which the tokenizer knows
        remote="" if hugging_face.is_gpt2(config) else ", trust_remote_code=True",
        new_tokens=max(1, min(100, config.block_size // 2)),
    )


def model_card(trained: Trained, library: str, usage: str) -> str:
    """README.md: what the model is, how it is loaded (`usage`), how it was trained."""
    config = trained.model.config
    settings = asdict(config)
    facts = {"parameters": size_of(trained.model)}
    if trained.checkpoint is not None:
        facts |= training_facts(trained.checkpoint)
        settings |= {k: trained.checkpoint.config[k] for k in CARD_SETTINGS if k in trained.checkpoint.config}
        settings["init_from"] = Path(settings.get("init_from", "scratch")).name  # not where this machine has it
    return CARD.format(
        library=library,
        usage=usage,
        context=config.block_size,
        facts=table("fact", facts),
        settings=table("setting", settings),
    )


def training_facts(saved: Checkpoint) -> dict[str, Any]:
    """What a checkpoint knows of the training and of its step's evaluation."""
    c = saved.config
    batch: list[Any] = [c.get(key) for key in ("batch_size", "gradient_accumulation_steps", "block_size")]
    evaluations = (saved.health or {}).get("evaluations", [])
    losses = [evaluation[2] for evaluation in evaluations if evaluation[0] == saved.iter_num]
    dataset = c["dataset"] if is_local(c.get("dataset")) else ""
    return {
        "data": Path(dataset).name or None,
        "source of the data": read_record(DATA / dataset).get("source") if dataset else None,
        "steps": saved.iter_num,
        "tokens trained on": None if None in batch else f"{saved.iter_num * math.prod(batch):,}",
        "validation loss (nats per token)": f"{losses[0]:.4f}" if losses else None,
        "git commit of deskGPT": (saved.facts or {}).get("code"),
    }


def table(heading: str, rows: dict[str, Any]) -> str:
    cells = {name: "n/a" if value is None else str(value).replace("|", "\\|") for name, value in rows.items()}
    return "\n".join([f"| {heading} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells.items())])


# ---- Ollama --------------------------------------------------------------------------------------------------


def modelfile_of(trained: Trained, file: str) -> str:
    """What Ollama is told of the GGUF file beside it: how a dialogue is written, and to draw as sample.py does."""
    plain = SampleConfig()
    lines = [
        "# ollama create my-model -f Modelfile",
        f"FROM ./{file}",
        f'TEMPLATE """{template.OLLAMA if trained.saw_chat else "{{ .Prompt }}"}"""',
        f"PARAMETER num_ctx {trained.model.config.block_size}",
        f"PARAMETER temperature {plain.temperature}",
        f"PARAMETER top_k {plain.top_k}",
        f"PARAMETER top_p {plain.top_p}",
        "PARAMETER repeat_penalty 1",
    ]
    if trained.saw_chat:
        lines.append(f'PARAMETER stop "{template.FORGED_TURN}"')
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with one_line_errors("take a machine with four times the model's memory"):
        main(configure(ExportConfig, sys.argv[1:]))
