"""Chat data: from dialogues to tokens, masks and windows, the loss of what is learned, and
talking.
"""

import functools
import json
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CPU, contents, fails, needs_bpe, raises_one_line, slow
from hypothesis import given, settings
from hypothesis import strategies as st
from test_fineweb import stopped_at, write_table
from torch.nn.functional import cross_entropy

from data.batches import BatchSplit, Loader, Split
from data.chat import prepare as prepare_chat
from data.chat.dialogues import as_messages
from data.chat.prepare import packed_tokens
from data.chat.template import Message, Template
from data.dataset import fingerprint
from data.sources import local_source
from data.text.prepare import prepare as prepare_text
from data.token_files import read_record
from data.tokenizer import BytesTokenizer, from_meta
from deskgpt.chat import fitting
from deskgpt.compute import ComputeMode
from deskgpt.distributed import DistContext
from deskgpt.evaluation import eval_batches, evaluate, evaluation_loss
from model import GPT, GPTConfig

T = 32
LEARNED = [5, 6, 7, 3 * T, 6 * T + 1]  # places in eight windows
HELLO = [Message("user", "Hello!"), Message("assistant", "Hi.")]


def prepare(path: Path, folder: Path, block_size: int) -> None:
    prepare_chat.prepare(local_source([path]), folder, BytesTokenizer(), block_size)


def write(path: Path, dialogues: list[list[Message]]) -> Path:
    rows = [[{"role": m.role, "content": m.content} for m in dialogue] for dialogue in dialogues]
    return write_table(path, {"messages": rows})


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["<|endoftext|>", "\nUser:\n", "Assistant:\nYes", "<|endoftext|>Assistant:\n", " ", ""]
)
messages = st.lists(
    st.builds(Message, st.sampled_from(["system", "user", "assistant"]), texts, st.just(True)),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=[needs_bpe, slow])])
@given(dialogue=messages, answer=texts)
def test_contents_cannot_forge_a_turn_only_answers_are_learned_and_a_prompt_is_what_they_continue(
    name, dialogue, answer
):
    tokenizer = from_meta({"name": name})
    template = Template(tokenizer)
    prompt = template.prompt(dialogue)
    dialogue = [*dialogue, Message("assistant", answer)]
    ids, mask = template.encode(dialogue)
    assert np.array_equal(ids[: len(prompt)], prompt)
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert ends[0] == 0
    turns = np.split(ids, ends + 1)[1:-1]
    masks = np.split(mask, ends + 1)[1:-1]
    for message, turn, of_turn in zip(dialogue, turns, masks, strict=True):
        content = f"{message.content}<|endoftext|>"
        text = tokenizer.decode_bytes(turn.tolist()).decode()
        assert text == f"{message.role.capitalize()}:\n{content}"
        learned = tokenizer.decode_bytes(turn[of_turn == 1].tolist()).decode()
        assert learned == (content if message.role == "assistant" else "")


@given(st.lists(st.integers(1, 120), min_size=1, max_size=60), st.integers(1, 40), st.booleans())
def test_packing_cuts_no_dialogue_that_fits_and_none_overlap(lengths, block_size, all_fit):
    if all_fit:
        lengths = [1 + n % block_size for n in lengths]
    dialogues = [np.full(n, i) for i, n in enumerate(lengths)]
    packed = packed_tokens(dialogues, block_size, 99)
    for i, n in enumerate(lengths):
        at = np.flatnonzero(packed == i)
        assert len(at) == n == at[-1] - at[0] + 1
        is_cut = at[0] // block_size != at[-1] // block_size
        assert not is_cut or (n > block_size and at[0] % block_size == 0)
    assert packed[-1] == 99  # which is only a target
    fill = (packed[:-1].reshape(-1, block_size) != 99).sum(1)
    assert fill.min() > 0
    if all_fit:  # then any two windows hold more than one could
        assert (2 * fill <= block_size).sum() <= 1


@settings(max_examples=20)
@given(
    st.lists(
        messages.filter(lambda d: any(m.role == "assistant" for m in d)), min_size=2, max_size=6
    )
)
def test_every_learned_token_is_a_target_once_in_an_epoch_and_no_other_is(
    tmp_path_factory, dialogues
):
    folder = tmp_path_factory.mktemp("c")
    prepare(write(folder / "d.jsonl", dialogues), folder / "data", 16)
    template = Template(BytesTokenizer())
    for name, of_split in (("train", dialogues[:-1]), ("val", dialogues[-1:])):
        split = Split(folder / "data", name, 16, 256)  # packed data is not aligned
        expected: Counter[int] = Counter()
        for dialogue in of_split:
            ids, mask = template.encode(dialogue)
            expected.update(ids[mask == 1].tolist())
        rows = np.arange(split.n_windows)
        for step in (0, 3):
            _, y = split.train_batch(step * len(rows) + rows)
            assert Counter(y[y >= 0].tolist()) == expected
            assert (split.n_unmasked(step * len(rows), len(rows)) == (y >= 0).sum(1)).all()
        n = split.n_eval_windows(10**6)
        _, y = split.eval_batch(np.arange(n), n)
        assert Counter(y[y >= 0].tolist()) == expected


# ---- files ---------------------------------------------------------------------------------------


def test_dialogues_that_ship_are_prepared_and_text_in_their_place_has_no_mask(tmp_path, script):
    chat = ("data/chat/prepare.py", "--name", tmp_path / "c", f"--block_size={T}")
    done = script(*chat, "--tokenizer=bytes")
    assert (done.code, done.err) == (0, "")
    assert "val.bin has 4 dialogues in " in done.out
    assert "of 48 dialogues are longer than a window and were cut" in done.out
    assert read_record(tmp_path / "c")["chat"] == "deskgpt-chat-1"
    prepare_text("plain text " * 20, tmp_path / "c", "char", "text")  # leaves no mask behind
    assert not list(tmp_path.glob("c/*.mask"))
    assert Split(tmp_path / "c", "train", 8, 256).masks == []
    # It has no end_of_text
    fails(script(*chat, f"--tokenizer={tmp_path / 'c'}"), "tokenizer char", "bytes")
    fails(script(chat[0], "--source=a/b"), "--hub a/b", code=2)


USER = {"role": "user", "content": "Hello!"}
ANSWER = {"role": "assistant", "content": "Hi."}
SAID = {"from": "gpt", "value": "Hi."}
# Rows of public data sets, all of the same dialogue, after the system message SYSTEM in some.
SHAPES = [
    {"messages": [USER, ANSWER], "source": "everyday", "tool_calls": None},  # SmolTalk
    {"prompt": "Hello!", "prompt_id": "f0e3", "messages": [USER, ANSWER]},  # UltraChat
    [{"role": "User", "content": "Hello!"}, {"role": " ASSISTANT", "content": "Hi."}],
    {"conversation": [{"human": "Hello!", "assistant": "Hi."}]},
    {"data": ["Hello!", "Hi."]},
    [USER, {"role": "assistant", "content": [{"type": "text", "text": "H"}, {"text": "i."}]}],
    {"instruction": "Hello!", "input": "", "output": "Hi.", "system": ""},  # Alpaca
    {"prompt": [USER], "completion": [ANSWER | {"weight": 1, "language": "en"}]},
    {"system": "SYSTEM", "conversations": [{"from": "human", "value": "Hello!"}, SAID]},  # ShareGPT
    [{"role": "developer", "content": "SYSTEM"}, USER, ANSWER],
]


@pytest.mark.parametrize("row", SHAPES)
def test_dialogues_as_public_sets_have_them_are_the_same_messages(row):
    system = [Message("system", "SYSTEM")] if "SYSTEM" in json.dumps(row) else []
    assert as_messages(row) == system + HELLO


def test_input_history_and_weight_are_part_of_what_is_learned():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "history": [["Hello!", "Hi."]]}
    assert as_messages(row) == [*HELLO, Message("user", "Add.\n1 and 2"), Message("assistant", "3")]
    unlearned = as_messages([USER, ANSWER | {"weight": 0}, USER, ANSWER])
    assert unlearned == [HELLO[0], Message("assistant", "Hi.", False), *HELLO]
    ids, mask = Template(BytesTokenizer()).encode(unlearned)
    assert bytes(ids[mask == 1].tolist()) == b"Hi.\xff"


LOST = [
    ([USER, ANSWER | {"reasoning_content": "hm"}], "reasoning_content"),
    ([USER, ANSWER | {"weight": 2}], "weight"),
    ([USER, ANSWER, {"role": "tool", "content": "x"}], "'tool'"),
    ({"messages": [USER, ANSWER], "tools": [{"name": "f"}]}, "'tools'"),
    ({"prompt": "Other.", "messages": [USER, ANSWER]}, "'prompt'"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "chosen, rejected; wanted are messages"),
]


@pytest.mark.parametrize(("row", "named"), LOST)
def test_key_that_is_not_known_to_change_nothing_is_an_error_that_names_it(row, named):
    with raises_one_line(named):
        as_messages(row)


@pytest.mark.parametrize("name", ["d.parquet", "d.csv", "folder/d.jsonl.gz", "hub/d.jsonl"])
def test_dialogues_of_each_format_and_of_the_hub_give_the_same_tokens(tmp_path, script, name):
    questions = [f"Q {i}" for i in range(30)]
    dialogues = [[Message("user", text), Message("assistant", "A")] for text in questions]
    path = write_table(tmp_path / name, {"prompt": questions, "completion": ["A"] * 30})
    words = ["--hub", path.parent] if "hub" in name else [path.parent if "/" in name else path]
    options = ("--tokenizer=bytes", "--block_size=64", "--out", tmp_path / "a")
    assert script("data/chat/prepare.py", *words, *options).code == 0
    prepare(write(tmp_path / "same.jsonl", dialogues), tmp_path / "b", 64)
    differ = contents(tmp_path / "a").items() ^ contents(tmp_path / "b").items()
    assert {file for file, _ in differ} == {"meta.json"}  # which names the source


def test_killed_in_the_middle_dialogues_are_continued_and_the_bytes_are_the_same(
    tmp_path, monkeypatch
):
    path = write(tmp_path / "d.jsonl", [HELLO] * 400)
    monkeypatch.setattr(prepare_chat, "BATCH_MESSAGES", 10)
    monkeypatch.setattr("data.prepared.usable_cores", lambda: 1)
    prepare(path, tmp_path / "a", T)
    monkeypatch.setattr("data.prepared.SAVED_TOKENS", 1000)
    monkeypatch.setattr(prepare_chat, "as_messages", stopped_at(300, as_messages, []))
    with pytest.raises(KeyboardInterrupt):
        prepare(path, tmp_path / "b", T)
    read: list[Any] = []
    monkeypatch.setattr(prepare_chat, "as_messages", stopped_at(0, as_messages, read))
    prepare(path, tmp_path / "b", T)
    assert 100 < len(read) < 300  # of 400, most were saved
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


NO_DIALOGUE = [
    b"[" * 100_000,
    b"7",
    b'[{"role": "assistant", "content": [{"type": "image"}]}]',
    b'[{"role": "user", "content": "nobody answers"}]',
]


def test_line_that_is_no_dialogue_is_named_and_nothing_is_written(tmp_path):
    good = write(tmp_path / "d.jsonl", [HELLO]).read_bytes()
    for line in NO_DIALOGUE:
        (tmp_path / "d.jsonl").write_bytes(good * 2 + line + b"\n" + good)
        with raises_one_line(tmp_path / "d.jsonl", "row "):
            prepare(tmp_path / "d.jsonl", tmp_path / "c", T)
    assert contents(tmp_path / "c") == {}


# ---- the loss ------------------------------------------------------------------------------------


def masked(folder: Path, split: str, learned: list[int]) -> Path:
    """Make a folder of eight windows, of which the tokens at these places are learned."""
    folder.mkdir(exist_ok=True)
    n = 1 + 8 * T
    mask = np.zeros(n, np.uint8)
    mask[learned] = 1
    np.resize(np.arange(250, dtype="<u2"), n).tofile(folder / f"{split}.bin")
    mask.tofile(folder / f"{split}.mask")
    (folder / "meta.json").write_text(
        json.dumps({"tokenizer": {"name": "bytes"}, "vocab_size": 256, "packed": T})
    )
    return folder


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=T, vocab_size=256, n_layer=1, n_head=2, n_embd=16))


def reference_loss(model: GPT, x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean cross-entropy over the learned targets, 0 without any."""
    logits = model(torch.from_numpy(x))[0].flatten(0, 1)
    total = cross_entropy(logits, torch.from_numpy(y).flatten(), ignore_index=-1, reduction="sum")
    return total.item() / max(1, (y >= 0).sum())


# In the last case, one of two steps has nothing to learn, the other one micro-batch of four.
@pytest.mark.parametrize(("micro", "steps", "world"), [(2, 2, 2), (1, 4, 1)])
def test_loss_of_a_step_is_the_cross_entropy_of_the_assistants_tokens_however_it_is_split(
    tmp_path, model, micro, steps, world
):
    n = row0 = micro * steps * world  # rows of an earlier part of the run, of other batches
    learned = [3 * T + 5, 3 * T + 6] if n == 4 else LEARNED
    split = Split(masked(tmp_path / "m", "train", learned), "train", T, 256, seed=1)
    losses = []
    for step in (0, 1):
        total = 0.0
        for rank in range(world):  # whose mean is taken, as DDP does
            batch_split = BatchSplit(micro, steps * world, rank=rank, world=world)
            loader = Loader(split, batch_split, CPU, step, row0)
            for batch in loader.step(step):
                total += (model(batch.x, batch.y)[1] * batch.weight).item() / world
            loader.close()
        expected = reference_loss(model, *split.train_batch(row0 + step * n + np.arange(n)))
        assert total == pytest.approx(expected, rel=1e-5)
        losses.append(total)
    assert (min(losses) == 0) == (n == 4)


# Of five, some ranks have padding only.
@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (1, 2), (1, 5), (3, 1)])
def test_evaluation_is_the_mean_over_learned_targets_though_batches_have_none(
    tmp_path, model, batch_size, world
):
    split = Split(masked(tmp_path / "m", "val", LEARNED), "val", T, 256)
    expected = reference_loss(model, *split.eval_batch(np.arange(8), 8))
    shares = []
    for rank in range(world):
        batch_split = BatchSplit(batch_size, world, eval_tokens=99, rank=rank, world=world)
        shares.append([*eval_batches(split, batch_split, CPU)])
    assert len({len(share) for share in shares}) == 1
    loss_of = functools.partial(evaluation_loss, model, ComputeMode())
    found = evaluate(model, ComputeMode(), chain(*shares), DistContext(CPU), loss_of)
    assert found.loss == pytest.approx(expected, rel=1e-5)


def test_masks_are_part_of_the_fingerprint_and_wrong_ones_and_other_windows_are_named(tmp_path):
    for k in (5, 6):
        masked(tmp_path / str(k), "train", [k])
    five, six = (fingerprint(Split(tmp_path / name, "train", T, 256)) for name in "56")
    assert five != six
    with raises_one_line(f"--block_size={T}"):
        Split(tmp_path / "5", "train", 16, 256)
    folder = masked(tmp_path / "m", "val", [])
    with raises_one_line("val.mask", "no token to learn"):
        Split(folder, "val", T, 256)
    masked(folder, "train_1", [5])
    (folder / "train_2.bin").write_bytes((folder / "train_1.bin").read_bytes())
    with raises_one_line("train_2.mask"):  # which is missing
        Split(folder, "train", T, 256)
    for n in (7, 9 * T):
        (folder / "train_2.mask").write_bytes(b"\1" * n)
        with raises_one_line("train_2.mask"):
            Split(folder, "train", T, 256)


def test_dialogue_forgets_its_oldest_turns_entirely_and_keeps_the_system_message():
    template = Template(BytesTokenizer())
    messages = [Message("system", "Be kind.")]
    for n in range(9):
        before = [*messages, Message("user", f"question {n}")]
        messages = fitting(template, 160, before)
        assert len(template.prompt(messages)) <= 140  # an eighth is left for the answer
        assert messages[0] == before[0]
        assert messages[1:] == before[-len(messages) + 1 :]
        assert messages[1].role == "user"
        messages.append(Message("assistant", f"answer {n}"))
    assert len(messages) == 7  # three turns fit
    with raises_one_line("context of 160", 207):
        fitting(template, 160, [Message("user", "x" * 200)])
    with raises_one_line("context of 160", "system"):
        fitting(template, 160, [Message("system", "x" * 200), *HELLO[:1]])
