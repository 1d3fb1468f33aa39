"""data/fineweb_edu/prepare.py, export.py --push_to_hub, and a hub of our own, whose connections break."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, assert_one_line, contents, needs_bpe
from fake_hub import OWNER, SHA, TOKEN, Hub, serve
from fineweb import SMALL, as_bytes, harm, tokens, write_documents
from test_export import saved

from data.token_files import write_tokens
from data.tokenizer import from_meta
from model import GPTConfig

pytestmark = pytest.mark.slow


@pytest.fixture
def hub(tmp_path, documents):
    root = tmp_path / "hub"
    repo = root / "HuggingFaceFW" / "fineweb-edu"
    third = len(documents) // 3
    for i in range(3):
        part = documents[i * third : (i + 1) * third if i < 2 else None]
        write_documents(repo / "sample" / "10BT" / f"{i:03}_00000.parquet", part)
    write_documents(repo / "data" / "CC-MAIN-2013-20" / "train-00000.parquet", documents[:3])
    configs = {"default": "data/*/*", "sample-10BT": "sample/10BT/*", "CC-MAIN-2013-20": "data/CC-MAIN-2013-20/*"}
    lines = [f"- config_name: {k}\n  data_files:\n  - split: train\n    path: {v}\n" for k, v in configs.items()]
    (repo / "README.md").write_text(f"---\nconfigs:\n{''.join(lines)}---\n")
    ready = root / "kjj0" / "finewebedu10B-gpt2"
    ready.mkdir(parents=True)
    for name, n in (("val_000000", 5000), ("train_000001", 5000), ("train_000002", 1234)):
        ids = np.arange(n, dtype=np.uint16)
        ids[::500] = 50256
        write_tokens(ready / f"finewebedu_{name}.bin", ids, header=True)
    with serve(root) as server:
        yield server


def online(hub: Hub, tmp_path: Path, *args: str | Path, setup: str = "") -> subprocess.CompletedProcess[str]:
    """Runs prepare.py against our hub, in a process of its own: the hub's address is read on import."""
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "127.0.0.1"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    run = "import sys\nwith p.one_line_errors():\n    p.main(p.arguments(sys.argv[1:]))"
    code = f"import data.fineweb_edu.prepare as p\n{setup}\n{run}"
    command = [sys.executable, "-c", code, *map(str, args), "--out", str(tmp_path / "out")]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_subset_streams_from_the_hub_through_faults_of_the_network(tmp_path, hub, documents):
    hub.faults = ["503", "cut"]
    done = online(hub, tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["source"], meta["revision"]) == ("HuggingFaceFW/fineweb-edu, sample-10BT", SHA)
    hub.requests.clear()
    done = online(hub, tmp_path, *SMALL)
    assert "already prepared" in done.stdout
    assert hub.requests == []
    (tmp_path / "out" / "train_000002.bin").unlink()
    done = online(hub, tmp_path, *SMALL)
    assert done.returncode == 0, done.stderr
    assert tokens(tmp_path / "out").astype(np.uint8).tobytes() == as_bytes(documents)


def test_vocabulary_of_its_own_is_trained_on_another_subset_that_the_hub_streams(tmp_path, hub, documents):
    options = ("--tokenizer=bpe", "--vocab_size=600", "--val_tokens=10_000", "--shard_tokens=200_000")
    done = online(hub, tmp_path, *options, "--subset=CC-MAIN-2013-20")
    assert done.returncode == 0, done.stderr
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["vocab_size"], meta["revision"]) == (600, SHA)
    ids = tokens(tmp_path / "out")
    text = from_meta(meta["tokenizer"]).decode_bytes(ids[ids != 599].tolist()).decode()
    assert text == "".join(documents[:3])


@pytest.mark.parametrize(("subset", "named"), [("sample-10BT", "404"), pytest.param("nope", "--subset nope")])
def test_what_the_hub_does_not_have_is_one_line(tmp_path, hub, subset, named):
    if subset == "sample-10BT":
        (hub.root / "HuggingFaceFW").rename(hub.root / "gone")
    done = online(hub, tmp_path, *SMALL, f"--subset={subset}")
    assert done.returncode == 1
    assert_one_line(done.stderr, named)


def test_network_that_stays_away_says_what_to_run_next(tmp_path, hub):
    hub.down = True
    quick = "import data.documents; data.documents.LONGEST_PAUSE_S = 0.01"
    done = online(hub, tmp_path, *SMALL, setup=quick)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert_one_line(line, "9 times", "the same command goes on")
    assert done.stdout.count("attempt ") == 8
    assert len([r for r in hub.requests if "fineweb-edu" in r]) >= 9


@needs_bpe
def test_pretokenized_shards_are_fetched_as_many_as_needed(tmp_path, hub):
    small = "p.READY_SHARD, p.READY_TOKENS = 5000, 11234"
    done = online(hub, tmp_path, "--pretokenized", "--tokens=4000", setup=small)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert {p.name for p in out.iterdir()} >= {"meta.json", "train_000001.bin", "val_000000.bin"}
    assert not list(out.glob("train_000002*"))
    done = online(hub, tmp_path, "--pretokenized", setup=small)  # all there are
    assert done.returncode == 0, done.stderr
    meta = json.loads((out / "meta.json").read_text())
    assert [(e["tokens"], e["documents"]) for e in meta["files"].values()] == [(5000, 10), (5000, 10), (1234, 3)]
    assert (meta["source"], meta["revision"]) == ("kjj0/finewebedu10B-gpt2", SHA)
    hub.requests.clear()
    assert "already prepared" in online(hub, tmp_path, "--pretokenized", "--tokens=6200", setup=small).stdout
    assert hub.requests == []
    harm(out / "train_000001.bin")
    done = online(hub, tmp_path, "--pretokenized", setup=small)
    assert "train_000001.bin is damaged" in done.stdout
    ready = hub.root / "kjj0" / "finewebedu10B-gpt2"
    for path in out.glob("*.bin"):
        assert path.read_bytes() == (ready / f"finewebedu_{path.name}").read_bytes()


# ---- uploads -------------------------------------------------------------------------------------------------


@pytest.fixture
def export(hub, tmp_path, script, monkeypatch):
    """Runs export.py against our hub, with the checkpoint in tmp_path/out."""
    from huggingface_hub import constants

    for name, value in {"ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    saved(tmp_path / "out", GPTConfig(block_size=32, vocab_size=256, n_layer=1, n_head=2, n_embd=8), {"name": "bytes"})
    return lambda *args: script("export.py", f"--out_dir={tmp_path / 'out'}", *args)


@pytest.mark.parametrize("to", ["my-model", "my.gguf"])
def test_export_is_uploaded_whole_with_its_card_to_a_private_repository(tmp_path, hub, export, to):
    if to == "my.gguf":
        pytest.importorskip("gguf")
    done = export(f"--to={tmp_path / 'unasked'}")
    assert (done.code, hub.requests) == (0, []), done.err
    done = export(f"--to={tmp_path / to}", "--push_to_hub=mine")
    assert done.code == 0, done.err
    assert f"{hub.url}/{OWNER}/mine" in done.out.splitlines()[-1]
    assert hub.private == {f"{OWNER}/mine": True}
    there = contents(hub.root / OWNER / "mine")
    card = there.pop("README.md") if to == "my.gguf" else there["README.md"]
    assert f"# {OWNER}/mine".encode() in card
    assert there == (contents(tmp_path / to) if to == "my-model" else {to: (tmp_path / to).read_bytes()})
    done = export(f"--to={tmp_path / 'again'}", f"--push_to_hub={OWNER}/mine")  # there is one already
    assert done.code == 0, done.err


def test_upload_that_fails_is_one_line_with_the_remedy(tmp_path, hub, export, monkeypatch):
    new = tmp_path / "new"
    for name, token in (("a/b/c", TOKEN), ("mine", "hf_old"), ("mine", "")):
        monkeypatch.setenv("HF_TOKEN", token)
        done = export(f"--to={new}", f"--push_to_hub={name}")
        assert done.code == 1
        assert_one_line(done.err, f"push_to_hub={name}", "hf auth login")
        assert not new.exists()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.refuses_uploads = True
    done = export(f"--to={new}", "--push_to_hub=mine")
    assert done.code == 1
    assert_one_line(done.err, f"hf upload {OWNER}/mine {new}")
    assert (new / "model.safetensors").exists()
