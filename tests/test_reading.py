"""What must be read: the files of one training step, the imports of train.py, main, tokens.

    python tests/test_reading.py        # prints the figures that the tests hold

A figure that rises wants something else to give: a feature is paid for in what others must read.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from mutants import all_mutants

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ["configurator", "model", "train", "sample", "export", "tasks"]
# What kernels.py calls, one or the other: C++, or plain torch.
LEAVES = {"deskgpt/cpu_kernels.py", "deskgpt/deskgpt_ops.py"}
AT_MOST = {
    "files of a step": 8,
    "lines of these files": 2_713,
    "files that train.py imports": 30,
    "lines of those files": 8_533,
    "lines of main": 94,
    "nesting of main": 4,
    "names of main": 38,
    "line of the first setting": 38,
    "tokens of production": 96_443,
    "tokens of tests": 86_000,
}

# One iteration of main's loop that neither evaluates nor saves, up to its log block, with the
# threads that read its data. What train.py imports and what is entered is printed.
CODE = """
import ast, dataclasses, json, sys, threading
from pathlib import Path
sys.path.insert(0, ROOT := sys.argv[1])
folder = Path(sys.argv[2])
import numpy as np
import train

imported = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
print("imported:", *sorted(f[len(ROOT) + 1 :] for f in imported if f.startswith(ROOT + "/")))
tokens = np.random.default_rng(0).integers(0, 65, 5000).astype(np.uint16)
data = folder / "data"
data.mkdir()
for split in ("train", "val"):
    tokens.tofile(data / f"{split}.bin")
chars = "".join(map(chr, range(40, 105)))
meta = {"tokenizer": {"name": "char", "chars": chars}, "vocab_size": 65}
(data / "meta.json").write_text(json.dumps(meta))
source = Path(train.__file__).read_text(encoding="utf-8").splitlines()
first = next(n for n, line in enumerate(source, 1) if line.strip() == "while True:")
last = next(n for n, line in enumerate(source, 1) if n > first and "# ---- log" in line)
entered = set()
state = {"inside": False}


def in_loop(frame, event, arg):
    if event == "line":
        step = frame.f_locals.get("step")
        state["inside"] = first < frame.f_lineno < last and step == 2
    return in_loop


def trace(frame, event, arg):
    name = frame.f_code.co_filename
    is_loader = threading.current_thread().name.startswith("loader")
    if name.startswith(ROOT) and (state["inside"] or is_loader):
        entered.add(name[len(ROOT) + 1 :])
    return in_loop if frame.f_code is train.main.__code__ else None


settings = dict(
    dataset=str(data), out_dir=str(folder / "out"), device="cpu", dtype="bfloat16", compile=False,
    cpu_kernels=False, n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=2, dropout=0.1,
    gradient_accumulation_steps=2, max_iters=4, eval_interval=4, eval_iters=1, log_interval=4,
    optimizer="muon",
)
known = {field.name for field in dataclasses.fields(train.TrainConfig)}
config = train.TrainConfig(**{name: value for name, value in settings.items() if name in known})
threading.settrace(trace)
sys.settrace(trace)
train.main(config)
sys.settrace(None)
threading.settrace(None)
entered.add("train.py")
print("entered:", *sorted(entered))
"""


def files_of(folder: Path) -> list[list[str]]:
    """Return our files that train.py imports, and those that one of its steps enters."""
    command = [sys.executable, "-c", CODE, str(ROOT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    printed = re.findall("^(?:imported|entered): (.*)", done.stdout, re.M)
    # Without those of an environment within.
    return [[name for name in line.split() if not name.startswith(".")] for line in printed]


def lines_of(files: list[str]) -> int:
    return sum(len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in files)


def size_of_main() -> list[int]:
    """Return the lines of train.py's main, how deep its blocks are nested, its names, and the line
    of the first setting.
    """
    text = (ROOT / "train.py").read_text(encoding="utf-8")
    tree = ast.parse(text)
    setting = next(node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    constants = compile(text, "train.py", "exec").co_consts
    code: Any = next(c for c in constants if getattr(c, "co_name", "") == "main")
    names = len(code.co_varnames) + len(code.co_cellvars)
    main = next(node for node in tree.body if getattr(node, "name", "") == "main")
    blocks = (ast.If, ast.For, ast.While, ast.With, ast.Try)

    def depth(node):
        below = max((depth(child) for child in ast.iter_child_nodes(node)), default=0)
        return below + isinstance(node, blocks)

    assert isinstance(main, ast.FunctionDef)
    return [(main.end_lineno or 0) - main.lineno + 1, depth(main), names, setting.lineno]


def tokens_of(text: str) -> int:
    """Return how many tokens Python has without comments, docstrings and line ends."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
    n_docs = sum(ast.get_docstring(node) is not None for node in nodes)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = [t for t in tokens if t.string.strip() and t.type != tokenize.COMMENT]
    return len(kept) - n_docs


def python_files() -> list[str]:
    """Return the tracked Python files; where there is no git, those that would be."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    found = [name for name in listed.stdout.split() if (ROOT / name).is_file()]
    if not found:
        pytest.skip("this copy has no git, which says what is tracked")
    return found


def figures(folder: Path) -> dict[str, int]:
    closure, entered = files_of(folder)
    step = [name for name in entered if name not in LEAVES]
    tokens = {True: 0, False: 0}
    for name in python_files():
        text = (ROOT / name).read_text(encoding="utf-8")
        tokens[name.startswith("tests/")] += tokens_of(text)
    found = [len(step), lines_of(step), len(closure), lines_of(closure), *size_of_main()]
    return dict(zip(AT_MOST, [*found, tokens[False], tokens[True]], strict=True))


@pytest.mark.slow
def test_what_must_be_read_does_not_grow(tmp_path):
    found = figures(tmp_path)
    assert {name: n for name, n in found.items() if n > AT_MOST[name]} == {}


def test_package_is_one_flat_folder():
    folders = {path.parent for path in (ROOT / "deskgpt").rglob("*.py")}
    assert folders == {ROOT / "deskgpt"}


def test_imports_go_down_and_no_file_imports_itself_through_others():
    paths = [ROOT / f"{name}.py" for name in SCRIPTS]
    for folder in ("deskgpt", "data", "bench"):
        paths += (ROOT / folder).rglob("*.py")
    files = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in paths
    }
    graph = {}
    for module, path in files.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.module, f"{path}: a relative import"
                imported |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
        ours = {name for name in imported if name in files and name != module}
        graph[module] = {name for name in ours if files[name].name != "__init__.py"}
        if module.startswith(("deskgpt", "data")):  # a type counts like any other name
            assert not {name for name in ours if name.startswith(("bench", *SCRIPTS[2:]))}, path
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_list_of_planted_defects_moves_along_with_the_code():
    assert all_mutants()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        for key, value in figures(Path(temporary)).items():
            print(f"{key}: {value:,} (at most {AT_MOST[key]:,})")
