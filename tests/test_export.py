"""export.py: the folder holds the very model, other programs compute what ours does, and nothing
half-written stays.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import (
    CPU,
    ROOT,
    assert_equal,
    assert_one_line,
    copy_of_repository,
    events,
    needs_bpe,
    raises_one_line,
    run_tiny,
    shell,
    slow,
)
from tiny_models import make, tokens

from data.chat import template
from data.text.prepare import train_bpe
from data.tokenizer import BytesTokenizer, CharTokenizer, Tokenizer, from_meta
from data.tokenizer_json import tokenizer_config_json, tokenizer_json
from deskgpt import deskgpt_ops, export_hugging_face, kernels
from deskgpt.check_model import TOLERANCE, distance
from deskgpt.checkpoint import Checkpoint, save_checkpoint
from deskgpt.engine import GenerationConfig, generate, load_model
from deskgpt.gpt2_weights import load_gpt2
from export import ExportConfig, main
from model import GPT, GPTConfig

CHARS = "".join(map(chr, range(48, 48 + 65)))
# The last two rows are padding
SMALL = GPTConfig(block_size=64, vocab_size=67, n_layer=2, n_head=2, n_embd=16)
MODERN = {"position": "rope", "norm": "rms", "qk_norm": True}
OF_CLASS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {},
    "DeskGPTForCausalLM": MODERN | {"token_shift": True},
}
# Each choice alone, and all.
CHOICES = OF_CLASS["DeskGPTForCausalLM"] | {"activation": "relu2", "bias": True}
COMBINATIONS = [
    {},
    {"activation": "gelu"},
    *({name: value} for name, value in CHOICES.items()),
    CHOICES,
    {"embedding_norm": True},  # which goes into the embedding
]
each_tokenizer = pytest.mark.parametrize(
    "kind", ["bytes", "char", "bpe", pytest.param("gpt2", marks=needs_bpe)]
)

# What transformers copies from folders is remembered by their names: kept out of the user's own
# cache.
_modules = tempfile.TemporaryDirectory()
os.environ.setdefault("HF_MODULES_CACHE", _modules.name)


def saved(
    out_dir: Path,
    model: GPT | GPTConfig = SMALL,
    tokenizer: dict[str, Any] | None = None,
    chat: str | None = None,
) -> GPT:
    """Save a model, a random one if only its settings are given, as a checkpoint in out_dir, and
    return it.
    """
    model = make(model).eval() if isinstance(model, GPTConfig) else model
    out_dir.mkdir(parents=True, exist_ok=True)
    content = Checkpoint(
        model=model.state_dict(),
        model_args=model.config.as_args(),
        iter_num=6,
        best_val_loss=4.5,
        tokenizer=tokenizer or {"name": "char", "chars": CHARS},
        chat=chat,
    )
    save_checkpoint(content, out_dir, best=False)
    return model


def exported(
    folder: Path, model: GPT | GPTConfig = SMALL, *saved_with: Any, to: str = "exported"
) -> tuple[GPT, Path]:
    """Return a model, a random one if only its settings are given, and the folder or file that it
    was exported to.
    """
    model = saved(folder / "out", model, *saved_with)
    main(ExportConfig(out_dir=str(folder / "out"), to=str(folder / to)))
    return model, folder / to


def loaded(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()


# ---- there and back ------------------------------------------------------------------------------


@pytest.fixture
def alone(monkeypatch):
    """Hide the programs that exports are compared with."""
    for name in ("transformers", "xllamacpp"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("name", "bias"), [("GPT2LMHeadModel", False), ("DeskGPTForCausalLM", True)]
)
def test_model_taken_back_is_the_same_to_the_bit(tmp_path, name, bias, alone):
    (tmp_path / "exported").mkdir()  # an empty folder is taken
    config = replace(
        SMALL, **OF_CLASS[name], bias=bias, tie_weights=bias, activation="relu2", dropout=0.1
    )
    model, folder = exported(tmp_path, config)
    found = load_gpt2(str(folder))
    records = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert records["config"]["architectures"] == [name]
    assert records["tokenizer_config"]["model_max_length"] == 64
    # Each id is one of the tokenizer's, or never drawn.
    assert [*range(65), *records["generation_config"]["suppress_tokens"]] == [*range(67)]
    assert GPTConfig.from_args(found.model_args, "") == config
    assert_equal(found.model, dict(model.state_dict()))
    assert load_model(str(folder), "", CPU).tokenizer.meta()["chars"] == CHARS


@slow
def test_exported_run_has_a_card_and_is_trained_on(chars, tmp_path):
    settings = {"position": "rope", "norm": "rms", "eval_iters": 40}
    run_tiny(chars, tmp_path / "out", max_iters=3, **settings)
    folder = tmp_path / "exported"
    main(ExportConfig(out_dir=str(tmp_path / "out"), to=str(folder)))
    run_tiny(chars, tmp_path / "more", init_from=str(folder), max_iters=1, **settings)
    before = events(tmp_path / "out", "eval")[-1]["val_loss"]
    assert events(tmp_path / "more", "eval")[0]["val_loss"] == pytest.approx(before, abs=0.01)

    card = (folder / "README.md").read_text()
    lines = card.split("```python\n")[1].split("```")[0]
    done = shell("python", "-c", lines, cwd=tmp_path, stdin=subprocess.DEVNULL)
    assert len(done.stdout) > 1
    # Whether to run the model's code: nobody may be there to answer.
    assert "[y/N]" not in done.stdout


# ---- what transformers computes ------------------------------------------------------------------


@slow
@pytest.mark.parametrize("choices", COMBINATIONS)
def test_logits_are_ours_for_each_of_the_choices_and_what_transformers_saves_again_is_taken_back(
    tmp_path, choices
):
    from transformers import AutoTokenizer

    x = tokens(2, 26, vocab=65)
    model, folder = exported(tmp_path, replace(SMALL, tie_weights="bias" in choices, **choices))
    theirs = loaded(folder)
    with torch.inference_mode():
        assert (theirs(x).logits - model(x)[0]).abs().max() <= 1e-5
    theirs.save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "again")
    again = load_gpt2(str(tmp_path / "again"))
    assert_equal(again.model, dict(load_model(str(folder), "", CPU).model.state_dict()))
    assert again.tokenizer == {"name": "char", "chars": CHARS}


@slow
@pytest.mark.parametrize("choices", [{}, OF_CLASS["DeskGPTForCausalLM"]])
def test_padding_changes_no_logits_and_none_of_the_vocabularys_padding_is_drawn(tmp_path, choices):
    model = make(replace(SMALL, tie_weights=False, **choices)).eval()
    with torch.no_grad():
        model.lm_head.weight[65:] = 5 * model.lm_head.weight[:2]  # likelier than any other
    theirs = loaded(exported(tmp_path, model)[1])
    rows = tokens(3, 9, vocab=65)
    lengths = (9, 4, 1)
    mask = torch.tensor([[0] * (9 - n) + [1] * n for n in lengths])
    greedy = {"max_new_tokens": 20, "do_sample": False}
    together = theirs.generate(rows, attention_mask=mask, **greedy)[:, 9:]
    config = GenerationConfig(max_new_tokens=20, temperature=0)
    for row, new, n in zip(rows, together, lengths, strict=True):
        alone = generate(model, row[None, -n:], config, vocab_size=65)
        assert new.tolist() == [int(token) for token, _ in alone]


@slow
def test_own_class_trains_and_searches_with_beams_and_names_what_it_lacks(tmp_path):
    model, folder = exported(tmp_path, replace(SMALL, **OF_CLASS["DeskGPTForCausalLM"]))
    theirs = loaded(folder)
    x = tokens(2, 30, vocab=65)
    loss = theirs(x, labels=x).loss
    assert loss.item() == pytest.approx(model(x[:, :-1], x[:, 1:])[1].item(), abs=1e-5)
    loss.backward()
    assert all(p.grad is not None for p in theirs.parameters())
    half = loaded(folder, torch.bfloat16)
    assert distance(half(x).logits, model(x)[0], dim=-1) <= TOLERANCE["bfloat16"].logits
    assert theirs.generate(x, num_beams=4, do_sample=False, max_new_tokens=20).size(1) == 50
    with raises_one_line("block_size=64"):
        theirs(tokens(1, 65, vocab=65))
    with raises_one_line("use_cache=False"):
        theirs.generate(x, max_new_tokens=3, use_cache=True)


def test_padding_anywhere_changes_no_logits_and_what_would_be_ignored_is_refused(monkeypatch):
    """By our forward alone: importing transformers takes seconds."""
    stand_in = SimpleNamespace(GenerationMixin=object, GPT2Config=object)
    stand_in.PreTrainedModel = stand_in.CausalLMOutput = SimpleNamespace
    for name in ("transformers", "transformers.modeling_outputs"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    from deskgpt.modeling_deskgpt import DeskGPTForCausalLM

    ours: Any = DeskGPTForCausalLM.__new__(DeskGPTForCausalLM)
    ours.gpt = make(SMALL)
    x = tokens(1, 30, vocab=65)
    mask = torch.ones_like(x)
    mask[0, [*range(7), 20]] = 0  # at the left, and in the middle
    is_text = mask[0] == 1
    found: Any = ours.forward(x, mask).logits
    found = found[:, is_text]
    torch.testing.assert_close(found, ours.gpt(x[:, is_text])[0])
    for name in ("past_key_values", "position_ids"):
        with raises_one_line(name):
            ours.forward(x, **{name: mask})


# ---- a changed model -----------------------------------------------------------------------------

CHECK = """
import json, sys
sys.path[:0] = ["", "tests"]
import torch
from dataclasses import replace
from pathlib import Path
from test_export import SMALL, exported, loaded
from tiny_models import tokens
from deskgpt.engine import GenerationConfig, generate

model, folder = exported(Path("tried").absolute(), replace(SMALL, block_size=160))
theirs = loaded(folder)
x = tokens(2, 150, vocab=65)
with torch.inference_mode():
    assert (theirs(x).logits - model(x)[0]).abs().max() <= 1e-5
greedy = {"max_new_tokens": 9, "do_sample": False}
config = GenerationConfig(max_new_tokens=9, temperature=0)
expected = [int(new) for new, _ in generate(model, x[:1], config, vocab_size=65)]
assert theirs.generate(x[:1], **greedy)[0, 150:].tolist() == expected
files = [path.stem for path in folder.glob("*.py")]
print(json.dumps([type(theirs).__name__, files]))
"""


@slow
def test_changed_model_goes_into_the_folder_with_the_files_that_it_needs(tmp_path):
    folder = copy_of_repository(tmp_path)
    shell("git", "apply", ROOT / "docs" / "hacks" / "sliding_window.patch", cwd=folder)
    (folder / "mine.py").write_text(
        "from deskgpt.kernels import relu2\n\ndef act(x):\n    return -relu2(x)\n"
    )
    source = folder / "model.py"
    old = "    if name == "
    new = f"    from mine import act\n\n    return act(x)\n{old}"
    source.write_text(source.read_text().replace(old, new, 1))
    done = shell("python", "-c", CHECK, cwd=folder)
    cls, files = json.loads(done.stdout.splitlines()[-1])
    assert cls == "DeskGPTForCausalLM"
    assert {"model", "modeling_deskgpt", "deskgpt_ops", "mine"} <= {*files}


@pytest.mark.parametrize("line", ["import mine", "from deskgpt import kernels"])
def test_import_that_no_folder_can_have_is_refused_by_its_line(tmp_path, monkeypatch, line):
    folder = copy_of_repository(tmp_path)
    (folder / "mine.py").touch()
    source = folder / "model.py"
    source.write_text(source.read_text() + f"\n\nif False:\n    {line}\n")
    monkeypatch.setattr(export_hugging_face, "ROOT", folder)
    with raises_one_line(
        source, f"line {len(source.read_text().splitlines())}", line, "nothing was exported"
    ):
        export_hugging_face.sources()


def test_plain_functions_of_the_folder_compute_what_the_kernels_do():
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    x = torch.randn(2, 9, 8)
    targets = tokens(2, 9, vocab=8)
    targets[0, 3] = -1
    arguments = {
        "causal_attention": (q, k, v),
        "masked_attention": (q, k, v, torch.rand(9, 9) + torch.eye(9) > 0.5),
        "gelu_tanh": (x,),
        "relu2": (x,),
        "checkpoint_block": (torch.nn.Bilinear(8, 8, 3), x, x.flip(1)),
        "chunked_cross_entropy": (torch.tanh, x, targets, 8),
        "add_norm": (x, x.flip(1), kernels.RMSNorm(8, eps=1e-5)),
        "split_heads": (torch.randn(2, 9, 24), 2, True, torch.randn(2, 9, 2)),
        "token_shift": (x, 3),
    }
    assert arguments.keys() == {*kernels.__all__} - {"LayerNorm", "RMSNorm"}  # torch's, there
    for name, args in arguments.items():
        torch.testing.assert_close(getattr(deskgpt_ops, name)(*args), getattr(kernels, name)(*args))
    none = torch.full((2, 9), -1)
    assert deskgpt_ops.chunked_cross_entropy(torch.tanh, x, none, 8) == 0


@pytest.mark.parametrize("to", ["folder", "a.gguf"])
def test_export_that_nothing_was_compared_with_has_a_status_of_its_own(tmp_path, alone, script, to):
    pytest.importorskip("gguf")
    saved(tmp_path / "out")
    done = script("export.py", f"--out_dir={tmp_path / 'out'}", f"--to={tmp_path / to}")
    assert done.code == 3, done.err
    assert "nothing was compared" in done.out
    assert (tmp_path / to).exists()


# ---- tokenizers ----------------------------------------------------------------------------------

ODD = "\r\n\t\0  \0 a  b\r\r\n\n\n   \ufffd é e\u0301 "
ODD += "👩\u200d👩\u200d👧 नमस्ते ’s don't I'LL 12345 ½² ٣ \u3000x \x85 \u2028 ẞß ﬁ \u00a0"


def tokenizer_and_text(kind: str, text: str) -> tuple[Tokenizer, str]:
    """A tokenizer, and odd text that it can read."""
    # A million bytes: text, every third character of Unicode, and what splits and spaces trip over.
    rare = "".join(chr(c) for c in range(0, 0x110000, 3) if not 0xD800 <= c < 0xE000)
    odd = text[:200_000] + rare[:250_000] + ODD * 500 + " " * 3000 + "\n" * 300 + "🧀" * 500
    if kind == "bpe":
        return train_bpe(text[:100_000], 1000), odd
    if kind == "char":
        known = CharTokenizer.of(odd[:250_000] + ODD)
        chars = set(known.chars)
        return known, "".join(char for char in odd if char in chars)
    return from_meta({"name": kind}), odd


@slow
@each_tokenizer
def test_auto_tokenizer_gives_our_ids_and_the_text_back(text, tmp_path, kind):
    from transformers import AutoTokenizer

    tokenizer, odd = tokenizer_and_text(kind, text)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(tokenizer)))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config_json(tokenizer, 64, None))
    )
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(odd)["input_ids"]
    assert ids == tokenizer.encode(odd).tolist()
    assert theirs.decode(ids) == odd
    assert (
        theirs.eos_token_id == theirs.bos_token_id == theirs.pad_token_id == tokenizer.end_of_text
    )
    if kind == "char":
        with pytest.raises(Exception, match="Missing"):
            theirs("A\U0010fffdB")


DIALOGUE = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who's there?\n"},
]
DIALOGUE += [{"role": "assistant", "content": "Me."}, {"role": "user", "content": "Who?"}]


def prompt_of_dialogue() -> list[int]:
    """What a model of bytes was trained to continue."""
    messages = [template.Message(message["role"], message["content"]) for message in DIALOGUE]
    return template.Template(BytesTokenizer()).prompt(messages).tolist()


@slow
def test_model_of_dialogues_has_their_template(tmp_path):
    from transformers import AutoTokenizer

    _, folder = exported(tmp_path, replace(SMALL, vocab_size=256), {"name": "bytes"}, template.NAME)
    theirs = AutoTokenizer.from_pretrained(folder)
    rendered = theirs.apply_chat_template(DIALOGUE, add_generation_prompt=True, tokenize=False)
    assert theirs(rendered)["input_ids"] == prompt_of_dialogue()
    assert AutoTokenizer.from_pretrained(exported(tmp_path / "plain")[1]).chat_template is None


def test_mistake_is_one_line_and_leaves_nothing(tmp_path, script):
    saved(tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    out = f"--out_dir={tmp_path / 'out'}"
    mistakes = {
        (out, f"--to={tmp_path / 'full'}"): "full must be a new or empty folder",
        (out, f"--to={tmp_path / 'file'}"): tmp_path / "file",
        (out,): "to is empty",
        (f"--init_from={tmp_path / 'full'}", f"--to={tmp_path / 'new'}"): "no config.json",
    }
    for args, named in mistakes.items():
        done = script("export.py", *args)
        assert done.code in (1, 2), args
        assert_one_line(done.err, named)
    assert sorted(tmp_path.rglob("*")) == before
