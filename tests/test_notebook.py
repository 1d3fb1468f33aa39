"""notebook.ipynb: the nightly test runs it as it is, offline, in a copy of the repository."""

from __future__ import annotations

import base64
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

import tasks
from deskgpt.system import hardware, peaks

nbformat = pytest.importorskip("nbformat")
NOTEBOOK = ROOT / "notebook.ipynb"


def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(book: Any) -> dict[str, Any]:
    """Return the cells of code by their ids."""
    return {cell.id: cell for cell in book.cells if cell.cell_type == "code"}


def test_file_is_valid_holds_no_results_names_files_that_exist_and_never_installs_torch():
    book = notebook()
    nbformat.validate(book)
    cells = code_cells(book)
    assert not any(cell.outputs or cell.execution_count for cell in cells.values())
    named = set(re.findall(r"[\w/-]+\.(?:py|md)\b", "\n".join(cell.source for cell in book.cells)))
    assert {"train.py", "sample.py", "docs/data.md"} <= named
    assert [name for name in named if not (ROOT / name).is_file()] == []
    (packages,) = re.findall(r"for name in \((.*?)\)", cells["packages"].source)
    assert "torch" not in packages


def test_names_of_our_modules_that_the_notebook_uses_exist():
    code = "\n".join(cell.source for cell in code_cells(notebook()).values())
    used = re.findall(r"\b(hardware|peaks|tasks)\.(\w+)", code)
    assert len(used) > 3
    modules = {"hardware": hardware, "peaks": peaks, "tasks": tasks}
    assert [name for module, name in used if not hasattr(modules[module], name)] == []


# ---- a run -----------------------------------------------------------------------------------------------------


def executed(folder: Path, monkeypatch: pytest.MonkeyPatch, **parameters: object) -> Any:
    """Return the notebook after a run in the folder with these parameters and no network. A cell that fails ends it."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("MPLBACKEND", raising=False)
    book = notebook()
    for cell in book.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    client = NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    with suppress(CellExecutionError):
        client.execute()
    return book


def printed(cell: Any) -> str:
    """Return what a cell has printed, errors included."""
    texts = [output.get("text", "") + "\n".join(output.get("traceback", [])) for output in cell.outputs]
    return "".join(texts)


@pytest.mark.nightly
def test_whole_notebook_trains_plots_and_writes_text(tmp_path, monkeypatch):
    folder = tmp_path / "deskgpt"
    ignored = shutil.ignore_patterns(".*", "out*", "wandb", "__pycache__", "*.bin", "meta.*", "input.txt", "results")
    shutil.copytree(ROOT, folder, ignore=ignored)
    settings = "--n_layer=1 --n_head=1 --n_embd=16 --batch_size=4 --eval_tokens=512 --compile=False"
    cells = code_cells(executed(folder, monkeypatch, MINUTES=0.05, SETTINGS=settings))

    assert "No Shakespeare: training on the source code" in printed(cells["data"])
    assert re.search(r"^step \d+: train loss", printed(cells["train"]), re.M)
    assert (folder / "out-notebook" / "ckpt.pt").is_file()
    (picture,) = [o.data["image/png"] for o in cells["plot"].outputs if o.output_type == "display_data"]
    assert base64.b64decode(picture).startswith(b"\x89PNG")
    written = re.findall(r"^==== temperature \S+\ndef (.{400,})\n-{15}$", printed(cells["sample"]), re.M | re.S)
    assert len(written) == 1  # from the first temperature to the second one's end
    assert printed(cells["sample"]).count("---------------") == 2
