from __future__ import annotations

import json
import os

import pytest
from conftest import assert_one_line, events, tiny

from deskgpt.checkpoint import store
from deskgpt.run.log import RunLog, read_events
from train import main


def test_log_continues_after_a_torn_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "iter"}\n{"event": "it')
    log = RunLog(path)
    log.write("start", iter=3)
    log.close()
    lines = path.read_text().splitlines()
    assert lines[:2] == ['{"event": "iter"}', '{"event": "it']
    assert json.loads(lines[2]) == {"event": "start", "iter": 3}
    path.write_text(path.read_text() + '{"event": "end", "crc": "ba2aa0ec"}\n')  # as written until 2026-11-26
    assert [e["event"] for e in read_events(path)] == ["iter", "start", "end"]


@pytest.mark.slow
def test_wandb_offline_logs_and_a_resumed_run_keeps_its_id(chars, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    main(tiny(chars, tmp_path / "out", wandb_log=True, max_iters=3))
    run_id = store.load(tmp_path / "out").wandb_run_id
    assert run_id
    main(tiny(chars, tmp_path / "out", wandb_log=True, init_from="resume"))
    assert store.load(tmp_path / "out").wandb_run_id == run_id
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    # A folder is named run-TIME-ID, and -1 follows if both began in the same second.
    assert all(f"-{run_id}" in run.name and list(run.glob("*.wandb")) for run in runs)


@pytest.mark.skipif(os.name == "nt", reason="needs O_NOFOLLOW")
def test_log_of_a_stranger_that_is_a_link_writes_nowhere_else(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "log.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="link") as e:
        RunLog(tmp_path / "log.jsonl")
    assert_one_line(e.value, tmp_path / "log.jsonl", "--out_dir")
    assert (tmp_path / "mine").read_text() == "precious"


def test_wandb_gets_the_numbers_and_a_run_goes_on_where_it_fails(tmp_path, capsys):
    logged = []

    class Full:
        id = "abc"

        def log(self, figures: dict[str, float], step: int) -> None:
            if step > 7:
                raise OSError("no space left")
            logged.append((step, figures))

        def finish(self):
            raise AssertionError("called after it failed")

    log = RunLog(tmp_path / "log.jsonl", Full())
    log.write("iter", iter=7, loss=2.0, mfu=0.5)
    for step in (8, 9):
        log.write("iter", iter=step, loss=1.0)
    log.close()
    assert logged == [(7, {"iter": 7, "loss": 2.0, "mfu": 50.0})]
    assert [e["iter"] for e in events(tmp_path, "iter")] == [7, 8, 9]
    assert_one_line(capsys.readouterr().err, "wandb", "no space left", "the run goes on")
