"""Plant one defect at a time in a copy of the last commit, and see whether the tests notice it.

    python tests/mutants.py --sample 20       # drawn at random, as each night
    python tests/mutants.py t_clip_zero       # the ones that are named
    python tests/mutants.py                   # all of them, for hours

tests/mutants.toml lists the defects, each a slip that a careful developer could make: `old` is in
`file` once, and `new` takes its place. When code moves, its entry moves along. `stays` says why a
defect may go unnoticed: nothing that anybody sees depends on it. The exit status is 1 if another
one does.
"""

import argparse
import ast
import random
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKS = {"quick": "not slow and not nightly", "slow": "slow and not nightly"}
MOST_S = 3600  # of the tests of a kind
# Any edit fails these: a token more, a line that a patch looks for, an entry of the list.
NOTICE_ANY_EDIT = {"test_reading.py", "test_hacks.py"}
Mutant = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*")
    parser.add_argument("--sample", type=int, help="plant so many, drawn at random")
    args = parser.parse_args()
    mutants = all_mutants()
    if args.names:
        mutants = [mutant for mutant in mutants if mutant["name"] in args.names]
    if args.sample:
        mutants = random.sample(mutants, args.sample)
    unnoticed = 0
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary, "deskgpt")
        subprocess.run(["git", "clone", "-q", ROOT, copy], check=True)
        for mutant in mutants:
            path = copy / mutant["file"]
            before = path.read_text(encoding="utf-8")
            path.write_text(planted(copy, mutant), encoding="utf-8")
            found = noticed_by(copy, path.stem)
            path.write_text(before, encoding="utf-8")
            print(f"{mutant['name']}: {found or mutant.get('stays', 'NOT NOTICED')}", flush=True)
            unnoticed += not found and "stays" not in mutant
    print(f"{len(mutants) - unnoticed} of {len(mutants)} are noticed, or may stay")
    sys.exit(min(unnoticed, 1))


def all_mutants() -> list[Mutant]:
    """Return the list. Raises ValueError where code has moved, SyntaxError if it is no Python."""
    mutants = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]
    for mutant in mutants:
        text = planted(ROOT, mutant)
        if mutant["file"].endswith(".py"):
            ast.parse(text)
    return mutants


def planted(root: Path, mutant: Mutant) -> str:
    """Return the text of its file with the defect. Raises ValueError if the file has changed."""
    text = (root / mutant["file"]).read_text(encoding="utf-8")
    n = text.count(mutant["old"])
    if n != 1:
        raise ValueError(f"{mutant['name']}: {mutant['file']} has its old text {n} times")
    return text.replace(mutant["old"], mutant["new"])


def noticed_by(copy: Path, module: str) -> str:
    """Return the first test that fails, or "" if none does. Tests that name the module go first."""
    paths = sorted((copy / "tests").glob("test_*.py"), key=lambda p: module not in p.read_text())
    files = [str(path) for path in paths if path.name not in NOTICE_ANY_EDIT]
    for kind, marks in MARKS.items():
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "2", "-m", marks, *files]
        try:
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=MOST_S)
        except subprocess.TimeoutExpired:
            return f"{kind}: the tests do not end"
        if done.returncode:
            lines = [line for line in done.stdout.splitlines() if "FAILED" in line]
            return f"{kind}: {lines[0] if lines else done.stdout.strip()[-100:]}"
    return ""


if __name__ == "__main__":
    main()
