"""Our models in Hugging Face's format: the class that computes them and its sources, config.json,
the names of weights.

config.json has one key of our own, "deskgpt", which transformers keeps and does not read: the
model_args, from which gpt2_weights.py knows the way back.
"""

import ast
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer_json import OUR_KEY
from deskgpt import deskgpt_ops
from deskgpt.check_model import TOLERANCE, distance
from deskgpt.errors import ROOT
from model import GPT, GPTConfig

# Our names, and those of transformers.
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu2": "relu2"}


def is_gpt2(c: GPTConfig) -> bool:
    """Return whether transformers' GPT2LMHeadModel computes what a GPT of c does, unless model.py
    was changed.
    """
    return (c.position, c.norm, c.qk_norm, c.token_shift) == ("learned", "layer", False, False)


def configs(
    c: GPTConfig, vocab_size: int, end_of_text: int | None, gpt2: bool
) -> dict[str, dict[str, Any]]:
    """Return config.json and generation_config.json of a model that GPT-2's class computes, or
    ours.

    vocab_size: the tokenizer's. Ids beyond it are padding, never to be drawn. end_of_text: that
    token's id, if any.
    """
    ids: dict[str, Any] = dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id"), end_of_text
    )
    config = ids | {
        "pad_token_id": None,  # an id here would get no gradient if somebody trains on
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "n_embd": c.n_embd,
        "n_positions": c.block_size,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tie_weights,
        "dtype": "float32",
        OUR_KEY: {"model_args": asdict(c)},
    }
    if gpt2:
        config |= {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": ACTIVATIONS[c.activation],
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), c.dropout),
        }
    else:
        config |= {
            "model_type": "deskgpt",
            "architectures": ["DeskGPTForCausalLM"],
            "use_cache": False,
            "auto_map": {
                "AutoConfig": "modeling_deskgpt.DeskGPTConfig",
                "AutoModelForCausalLM": "modeling_deskgpt.DeskGPTForCausalLM",
            },
        }
    generation = ids | {"use_cache": gpt2}
    padding = list(range(vocab_size, c.vocab_size))
    if padding:
        generation["suppress_tokens"] = padding
    return {"config.json": config, "generation_config.json": generation}


def is_conv1d(key: str, w: Tensor) -> bool:
    """Return whether GPT-2's class keeps this matrix as (in, out); nn.Linear has (out, in)."""
    return w.dim() == 2 and key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))


def write_weights(path: Path, c: GPTConfig, state: dict[str, Tensor], gpt2: bool) -> None:
    """Write our state_dict as GPT-2's class has it, or ours. Raises OSError if the disk fails."""
    from safetensors.torch import save

    found = {}
    for key, w in state.items():
        if key == "lm_head.weight" and c.tie_weights:
            continue
        transposed = gpt2 and is_conv1d(key, w)
        # A copy: blocks may share weights, and safetensors takes no memory of two names.
        copy = (w.t() if transposed else w).clone(memory_format=torch.contiguous_format)
        found[key if gpt2 else f"gpt.{key}"] = copy
    path.write_bytes(save(found, metadata={"format": "pt"}))


# ---- the sources that come along -----------------------------------------------------------------
# model.py's own, for folders that are used without deskgpt. Imports of ours are rewritten: names
# that deskgpt_ops.py has come from there, other files of the checkout come along.

WRAPPER = f"{__package__}.modeling_deskgpt"


def sources() -> dict[str, str]:
    """Return the texts of WRAPPER and of all that it needs, by files' names in the folder.

    Raises ValueError.
    """
    modules = [WRAPPER]
    texts = {}
    for module in modules:
        texts[name_of(module)] = carried(module, modules)
    # transformers 4 copies only files that the first one names.
    texts[name_of(WRAPPER)] += "".join(f"from .{name} import __name__ as _\n" for name in texts)
    return {f"{name}.py": text for name, text in texts.items()}


def name_of(module: str) -> str:
    """Return the module's name in the folder, such as model or deskgpt_kernels_loss."""
    return module.removeprefix(f"{__package__}.").replace(".", "_")


def carried(module: str, modules: list[str]) -> str:
    """Return a module's text with its imports rewritten, and add the modules of the checkout that
    they name.

    Raises ValueError for one that cannot leave the checkout.
    """
    text = file_of(module).read_text(encoding="utf-8")
    nodes = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    statements = {ast.get_source_segment(text, node) or "": node for node in nodes}
    # One may be the beginning of another.
    for statement in sorted(statements, key=len, reverse=True):
        node = statements[statement]
        lines = []
        for alias in node.names:
            source = node.module if isinstance(node, ast.ImportFrom) else alias.name
            if not source or not (
                file_of(source).exists() or file_of(f"{source}.__init__").exists()
            ):
                continue  # it belongs to Python or to another project
            if source.startswith("deskgpt.") and hasattr(deskgpt_ops, alias.name):
                source = deskgpt_ops.__name__
            elif isinstance(node, ast.Import) or not file_of(source).exists():
                raise ValueError(
                    f"{file_of(module)}, line {node.lineno}: `{statement}` cannot go into "
                    "an exported folder: only `from FILE import NAMES` can; nothing was "
                    "exported. Write what model.py needs of it there"
                )
            if source not in modules:
                modules.append(source)
            lines.append(ast.unparse(ast.ImportFrom(name_of(source), [alias], level=1)))
        if lines:  # each import on a line of its own, for which transformers looks
            text = text.replace(statement, ("\n" + " " * node.col_offset).join(lines))
    return text


def file_of(module: str) -> Path:
    return ROOT / f"{module.replace('.', '/')}.py"


# ---- what it computes ----------------------------------------------------------------------------


class Differs(ValueError):
    """Another program does not compute what model.py does."""


@torch.inference_mode()
def compare(folder: Path, ours: GPT, tokens: Tensor) -> None:
    """Compare transformers' logits after each of the tokens (1, T) with model.py's. Raises
    Differs.
    """
    with tempfile.TemporaryDirectory() as copies:
        # transformers copies the folder's Python files there.
        os.environ.setdefault("HF_MODULES_CACHE", copies)
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # a table of what does not fit would hide our one line
        # What the class lacks, or has in another shape, is left out, and then its logits differ.
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "ignore_mismatched_sizes": True,
            "trust_remote_code": True,
        }
        theirs = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    for text in of_two_lengths(tokens):
        check_same("transformers", theirs(text).logits, ours(text)[0])


def of_two_lengths(tokens: Tensor) -> list[Tensor]:
    """Return tokens (1, T) and their first half: a model may compute with T itself."""
    return [tokens, tokens[:, : (tokens.size(1) + 1) // 2]]


def check_same(
    program: str, found: Tensor, expected: Tensor, limit: float = TOLERANCE["float32"].logits
) -> None:
    """Raise Differs if logits (..., V) of another program are further from model.py's than rounding
    anywhere.
    """
    error = distance(found, expected, dim=-1)
    if error > limit:
        raise Differs(
            f"{program} does not compute what model.py does: its logits differ by "
            f"{error:.2g}, and at most {limit:g} is rounding; nothing was exported. A "
            "changed model.py goes into folders only (--to=my-model)"
        )
