"""Writes a trained model as a Hugging Face folder, which transformers and other programs load.

    python export.py --out_dir=out-shakespeare-char --to=my-model
    python export.py --out_dir=out/ckpt_best.pt --to=my-model

The folder gets config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json, README.md
(the model card), and for settings that no class of transformers has the model's own code, modeling_deskgpt.py. What is
written is loaded again with transformers, if that is installed, and its logits are compared with those of model.py: a
folder that computes something else, as after a change of model.py, is not left.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configurator import configure
from data.chat import template
from data.token_files import read_record, read_tokens, token_files
from data.tokenizer_json import tokenizer_config_json, tokenizer_json
from deskgpt.checkpoint.store import Checkpoint
from deskgpt.faster.held import SAME_LOGITS, distance
from deskgpt.machine.errors import one_line_errors
from deskgpt.machine.files import check_unused, new_folder
from deskgpt.share import hugging_face
from deskgpt.share.gpt2_weights import load_gpt2, tokenizer_of
from deskgpt.share.hugging_face import MODELING_FILE
from model import GPT
from sample import DATA, Trained, load

# Root mean square of what enlarged matrices make of normalised inputs. With 2, the same models differ by at most 5e-6,
# whether they have 2 layers or 48; with 4, those of 48 layers differ by 4e-2 (LOG.md, 2026-11-23).
LARGE = 2.0

CARD_SETTINGS = (
    *("batch_size", "gradient_accumulation_steps", "optimizer", "learning_rate", "min_lr", "lr_schedule"),
    *("warmup_iters", "max_iters", "weight_decay", "grad_clip", "seed", "init_from"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    init_from: str = "resume"  # resume (a checkpoint in out_dir), gpt2[-medium|-large|-xl], a checkpoint, a folder
    out_dir: str = "out"  # holds ckpt.pt; or the path of a .pt file, such as out/ckpt_best.pt
    to: str = ""  # the new folder

    def __post_init__(self) -> None:
        if not self.to:
            raise ValueError("to is empty; name the folder to write, such as --to=my-model")


def main(c: ExportConfig) -> None:
    """Writes the folder c.to. Raises ValueError and OSError; nothing is left of it then."""
    to = Path(c.to)
    check_unused(to)
    trained = load(c.init_from, c.out_dir, torch.device("cpu"))
    config = trained.model.config
    tokenizer = trained.tokenizer
    kind = hugging_face.class_of(config)
    ids = (tokenizer.vocab_size, tokenizer.end_of_text)
    with new_folder(to) as folder:
        write_json(folder / "config.json", hugging_face.config_json(config, tokenizer.end_of_text))
        write_json(folder / "generation_config.json", hugging_face.generation_config_json(config, *ids))
        write_json(folder / "tokenizer.json", tokenizer_json(tokenizer))
        of_chat = trained.checkpoint is not None and trained.checkpoint.chat == template.NAME
        chat_template = template.JINJA if of_chat else None
        write_json(folder / "tokenizer_config.json", tokenizer_config_json(tokenizer, config.block_size, chat_template))
        if kind.is_own:
            shutil.copyfile(Path(hugging_face.__file__).with_name(MODELING_FILE), folder / MODELING_FILE)
        (folder / "README.md").write_text(model_card(trained, to.resolve().name), encoding="utf-8")
        weights = trained.model.state_dict()
        write_weights(folder / "model.safetensors", hugging_face.to_hugging_face(config, weights))
        shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors lets nobody else read it
        check(folder, trained)
        compared = compare(folder, trained)
    if kind.is_own:
        print(
            f"no class of transformers has {hugging_face.why_own(config)}: the folder has code of its own, "
            f"{MODELING_FILE}, and loading it needs trust_remote_code=True"
        )
    print(f"{to}: {kind.name}, {millions(trained.model)} parameters, tokenizer {tokenizer.meta()['name']}")
    print(compared)


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


def check(folder: Path, trained: Trained) -> None:
    """Reads the folder back. Raises OSError where that does not give the very model that was written."""
    model_args, weights = load_gpt2(str(folder))
    ours = trained.model.state_dict()
    same = model_args == trained.model.config.as_args() and tokenizer_of(str(folder)) == trained.tokenizer.meta()
    if not same or weights.keys() != ours.keys() or not all(torch.equal(weights[key], ours[key]) for key in ours):
        raise OSError("what was written is not what is read back; check the disk")


# ---- what it computes ----------------------------------------------------------------------------------------


@torch.inference_mode()
def compare(folder: Path, trained: Trained) -> str:
    """Compares what transformers makes of the folder with model.py; says how. Raises ValueError where they differ.

    Leaves other weights in trained.model.
    """
    kind = hugging_face.class_of(trained.model.config)
    try:
        import transformers
    except ImportError:
        return "transformers is not installed: nothing was compared with model.py"
    if kind.is_own:
        from deskgpt.share import modeling_deskgpt  # which the folder has a copy of

        cls: Any = getattr(modeling_deskgpt, kind.name)
    else:
        cls = getattr(transformers, kind.name, None)
    if cls is None:
        return f"transformers {transformers.__version__} has no {kind.name}: nothing was compared with model.py"
    tokens, whose = tokens_to_compare(trained)
    problem = difference(cls, folder, trained.model.eval(), tokens)
    if problem:
        raise ValueError(
            f"{kind.name} does not compute what model.py does: {problem}; nothing was exported. It has GPT-2's network "
            "with the choices of docs/export.md; a model that was changed in other ways needs code of its own"
        )
    return f"transformers computes the same logits as model.py on {tokens.numel():,} tokens of {whose}"


def difference(cls: Any, folder: Path, ours: GPT, tokens: Tensor) -> str | None:
    """What the class of transformers computes otherwise than model.py; None if both agree."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # a table of what does not fit would hide our one line
    theirs, found = cls.from_pretrained(
        folder, dtype=torch.float32, ignore_mismatched_sizes=True, output_loading_info=True
    )
    unfit = [*found["unexpected_keys"], *found["mismatched_keys"]]
    if unfit:
        return f"it lacks, or has in another shape, {unfit[0]}"
    off = distance(theirs.eval()(tokens).logits, ours(tokens)[0])
    if not off <= SAME_LOGITS:
        return f"its logits differ by {off:.3g}"
    enlarge(ours)
    theirs.load_state_dict(hugging_face.to_hugging_face(ours.config, ours.state_dict()), strict=False)
    off = distance(theirs(tokens).logits, ours(tokens)[0])
    if not off <= SAME_LOGITS:
        return f"with larger weights its logits would differ by {off:.3g}"
    return None


@torch.no_grad()
def enlarge(model: GPT) -> None:
    """Scales all matrices, so that scores and logits are large: a cap on them changes nothing while they are small."""
    for p in model.parameters():
        if p.dim() >= 2:
            p.mul_(LARGE / (p.square().mean() * p.size(-1)).sqrt().clamp(min=1e-12))


def tokens_to_compare(trained: Trained) -> tuple[Tensor, str]:
    """Tokens (1, T), as many as the context has or the data, and whose they are: val's, else drawn ones."""
    limit = trained.model.config.block_size
    dataset = trained.checkpoint.config.get("dataset") if trained.checkpoint is not None else None
    with suppress(OSError, ValueError):
        if isinstance(dataset, str):
            ids = read_tokens(token_files(DATA / dataset, "val")[0])[:limit].astype("int64")
            if ids.max() < trained.model.config.vocab_size:
                return torch.from_numpy(ids)[None], "val"
    draw = torch.Generator().manual_seed(0)
    return torch.randint(trained.model.config.vocab_size, (1, limit), generator=draw), "a random text"


# ---- model card ----------------------------------------------------------------------------------------------


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- deskgpt
---

# {name}

A language model trained with deskGPT. {reason}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name!r})
model = AutoModelForCausalLM.from_pretrained({name!r}{remote})
prompt = tokenizer({prompt}, return_tensors='pt')
print(tokenizer.decode(model.generate(**prompt, do_sample=True, max_new_tokens={new_tokens})[0]))
```

The context is {context} tokens.

{facts}

{settings}
"""


def model_card(trained: Trained, name: str) -> str:
    """README.md of the folder `name`: what the model is, how it was trained, how it is loaded."""
    config = trained.model.config
    kind = hugging_face.class_of(config)
    reason = f"Its class is `{kind.name}`; in float32 it computes what deskGPT does."
    if kind.is_own:
        reason = (
            f"No class of transformers has {hugging_face.why_own(config)}, so the folder has its own code, "
            f"`{MODELING_FILE}`. `trust_remote_code=True` runs it: read it before."
        )
    settings = asdict(config)
    facts = {"parameters": millions(trained.model)}
    if trained.checkpoint is not None:
        facts |= training_facts(trained.checkpoint)
        settings |= {k: trained.checkpoint.config[k] for k in CARD_SETTINGS if k in trained.checkpoint.config}
        settings["init_from"] = Path(settings.get("init_from", "scratch")).name  # not where this machine has it
    chars = trained.tokenizer.meta().get("chars")
    return CARD.format(
        name=name,
        reason=reason,
        context=config.block_size,
        prompt=repr("\n" if chars is None or "\n" in chars else chars[0]),  # which the tokenizer knows
        remote=", trust_remote_code=True" if kind.is_own else "",
        new_tokens=max(1, min(100, config.block_size // 2)),
        facts=table("fact", facts),
        settings=table("setting", settings),
    )


def training_facts(saved: Checkpoint) -> dict[str, Any]:
    """What a checkpoint knows of the training and of its step's evaluation."""
    c = saved.config
    facts = saved.facts or {}
    batch: list[Any] = [c.get(key) for key in ("batch_size", "gradient_accumulation_steps", "block_size")]
    trained_on = saved.iter_num * math.prod(batch) if None not in batch else None
    evaluations = (saved.health or {}).get("evaluations", [])
    of_step = [evaluation for evaluation in evaluations if evaluation[0] == saved.iter_num]
    loss = of_step[0][2] if of_step else None
    error = of_step[0][3] if of_step else None
    dataset = c.get("dataset", "")
    return {
        "data": Path(dataset).name or None,
        "source of the data": read_record(DATA / dataset).get("source") if dataset else None,
        "steps": saved.iter_num,
        "tokens trained on": None if trained_on is None else f"{trained_on:,}",
        "validation loss (nats per token)": None if loss is None else f"{loss:.4f}",
        "its standard error": None if error is None else f"{error:.4f}",
        "git commit of deskGPT": facts.get("code"),
        "torch": facts.get("versions", {}).get("torch"),
    }


def table(heading: str, rows: dict[str, Any]) -> str:
    cells = {name: "n/a" if value is None else str(value).replace("|", "\\|") for name, value in rows.items()}
    return "\n".join([f"| {heading} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells.items())])


def millions(model: GPT) -> str:
    return f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M"


if __name__ == "__main__":
    with one_line_errors("take a machine with four times the model's memory"):
        main(configure(ExportConfig, sys.argv[1:]))
