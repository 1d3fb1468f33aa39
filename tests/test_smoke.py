"""The shortest way through the real scripts: a run of six steps, resumed to eight, and text from it."""

from __future__ import annotations

from pathlib import Path

from conftest import TINY, events, flags


def test_a_run_trains_resumes_and_writes_text(script, chars: Path, tmp_path: Path):
    out = tmp_path / "out"
    settings = flags(**TINY, dataset=chars, out_dir=out)
    assert script("train.py", *settings).code == 0
    resumed = script("train.py", "--init_from=resume", f"--out_dir={out}", "--max_iters=8", "--resume_changed=True")
    assert resumed.code == 0, resumed.err
    assert [e["iter"] for e in events(out, "iter")] == list(range(8))
    text = script("sample.py", f"--out_dir={out}", "--max_new_tokens=5", "--num_samples=1", "--device=cpu")
    assert text.code == 0, text.err
