"""Write the band of a config from finished runs with other seeds: where the val losses of one more
run are expected.

    for i in 1 2 3 4 5 6 7 8; do python train.py config/x.py --seed=$i --out_dir=out-x-$i; done
    python bench/band.py config/x.py out-x-*

Writes config/loss_bands/x.json. From then on a run of the config ends with a line that says whether
it is as usual.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# The repository; Python adds only this folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.analysis.logs import read_runs
from deskgpt import loss_bands
from deskgpt.errors import OneLineParser, one_line_errors
from deskgpt.files import write_atomically

RUNS = 8


def main() -> None:
    parser = OneLineParser(__doc__)
    parser.add_argument("config")
    parser.add_argument("runs", nargs="+", metavar="OUT_DIR")
    a = parser.parse_args()
    runs = read_runs(a.runs)
    seeds = [run.settings.get("seed") for run in runs]
    experiments = []
    losses: dict[int, list[float]] = {}
    for run in runs:
        data = (run.start.get("val_sha256"), run.start.get("train_tokens"))
        experiments.append(loss_bands.seed_invariant_key(run.settings, *data))
        for e in run.val:
            losses.setdefault(e["iter"], []).append(round(e["val_loss"], 4))
    are_alike = all(x == experiments[0] is not None for x in experiments)
    if (
        not are_alike
        or len(set(seeds)) < len(runs)
        or {len(of_step) for of_step in losses.values()} != {RUNS}
    ):
        raise ValueError(
            f"{' '.join(a.runs)}: name {RUNS} finished runs from scratch that differ in "
            "their seeds alone"
        )
    record = {
        "about": f"val losses by step of runs of {a.config} with other seeds, in nats per token",
        "seeds": seeds,
        "experiment": experiments[0],
        "val_losses": losses,
    }
    path = loss_bands.FOLDER / f"{Path(a.config).stem}.json"
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in record.items()]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    print(path)


if __name__ == "__main__":
    with one_line_errors():
        main()
