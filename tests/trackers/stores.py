"""What trackers hold, read through their own libraries.

python tests/trackers/stores.py FOLDER TRACKER...    prints their rows
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Held = dict[str, list[dict[int, dict[str, float]]]]  # by tracker, the rows of each of its runs


def all_rows(folder: Path, trackers: list[str]) -> Held:
    """The rows that trackers hold of the runs in a folder of stores."""
    return {name: READERS[name](folder) for name in trackers}


def of_wandb(folder: Path) -> list[dict[int, dict[str, float]]]:
    """Of an offline run, all starts of which have files of their own; no row may be in two."""
    from ktrainer.callbacks.trackers.wandb_run import rows_in

    runs: dict[str, dict[int, dict[str, float]]] = {}
    for file in sorted(folder.glob("*/wandb/offline-run-*/run-*.wandb")):
        rows = runs.setdefault(file.stem, {})
        for step, values in rows_in(file):
            assert step not in rows, f"step {step} twice"
            rows[step] = {k: float(v) for k, v in values.items() if not k.startswith("_")}
    return list(runs.values())


def of_mlflow(folder: Path) -> list[dict[int, dict[str, float]]]:
    from mlflow import MlflowClient

    client, runs = MlflowClient(f"sqlite:///{folder}/mlflow.db"), []
    experiments = [each.experiment_id for each in client.search_experiments()]
    for run in client.search_runs(experiments):
        rows: dict[int, dict[str, float]] = {}
        for key in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, key):
                values = rows.setdefault(metric.step, {})
                assert key not in values, f"{key} of step {metric.step} twice"
                values[key] = metric.value
        runs.append(dict(sorted(rows.items())))
    return runs


def of_trackio(folder: Path) -> list[dict[int, dict[str, float]]]:
    import trackio

    runs = []
    for run in trackio.Api().runs("digits"):
        rows: dict[int, dict[str, float]] = {}
        for row in logs_of(run):
            step = row["step"]
            assert step not in rows, f"step {step} twice"
            rows[step] = {k: v for k, v in row.items() if k not in ("step", "timestamp")}
        runs.append(rows)
    return runs


def logs_of(run: Any) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(run.project, run.name)


def of_tensorboard(folder: Path) -> list[dict[int, dict[str, float]]]:
    """Of the one run in a folder."""
    import tensorflow as tf

    rows: dict[int, dict[str, float]] = {}
    for file in sorted(folder.glob("*/tensorboard/*/events*")):
        for event in tf.compat.v1.train.summary_iterator(str(file)):
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars" or not value.HasField(
                    "metadata"
                ):
                    row, name = rows.setdefault(event.step, {}), f"{file.parent.name}/{value.tag}"
                    assert name not in row, f"{name} of step {event.step} twice"
                    row[name] = float(tf.make_ndarray(value.tensor))
    return [rows]


def of_csv(folder: Path) -> list[dict[int, dict[str, float]]]:
    """Of the one run in a folder."""
    import csv

    rows: dict[int, dict[str, float]] = {}
    (file,) = folder.glob("*/metrics.csv")
    with file.open(newline="") as lines:
        for line in csv.DictReader(lines):
            row = rows.setdefault(int(line.pop("step")), {})
            part = {"log": "train"}.get(event := line.pop("event"), event)
            del line["epoch"]
            for name, value in line.items():
                if value:
                    validated = part != "train" and name.startswith("val_")
                    home = "validation" if validated else part
                    key = f"{home}/{name.removeprefix('val_') if validated else name}"
                    assert key not in row or validated, f"{key} twice"
                    row[key] = float(value)
    return [rows]


READERS: dict[str, Any] = {
    "csv": of_csv,
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
}


if __name__ == "__main__":
    print("ROWS" + json.dumps(all_rows(Path(sys.argv[1]), sys.argv[2:])))
