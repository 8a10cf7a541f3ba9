"""`ktrainer checkpoint`: list, show, verify and export the checkpoints of a run, import others.

All but `export` and `import` do without TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ktrainer.checkpoint.format.checkpoint_folder import MANIFEST, MODEL
from ktrainer.checkpoint.format.checkpoint_reader import (
    form_problem,
    read_manifest,
    sizes_problem,
    verify,
)
from ktrainer.checkpoint.format.find_checkpoints import (
    FoundCheckpoint,
    checkpoint_folders,
    select_checkpoint,
)
from ktrainer.errors import CheckpointError
from ktrainer.runtime.tensorflow_logging import quiet_tensorflow

_WHERE = (
    "a run's folder, a folder of checkpoints, or one checkpoint; of a script that called fit more "
    "than once, a run's folder has one of checkpoints for each call"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions of `ktrainer checkpoint` and their options."""
    parser.description = (
        "Look at checkpoints, check them, make Keras files of them, and import those of Keras 2."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, what in (
        ("list", "which checkpoints there are: step, epoch, size, time; whether their files are"
         " there in full (`verify` reads them)"),
        ("show", "what is in one: its manifest, and the arrays with shapes and dtypes"),
        ("verify", "read and check everything; status 1 when something is bad"),
        ("export", "write the model as a .keras or .weights.h5 file"),
    ):  # fmt: skip
        action = actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
        action.add_argument("path", metavar="RUN_OR_CHECKPOINT", help=_WHERE)
        if name in ("show", "export"):
            action.add_argument(
                "--best",
                action="store_true",
                help="not the one saved last, but the best one of the fit that saved last",
            )
        if name == "show":
            action.add_argument("--json", action="store_true", help="the manifest, as JSON")
        if name == "export":
            action.add_argument("output", metavar="FILE", help="NAME.keras or NAME.weights.h5")
            action.add_argument(
                "--model",
                metavar="MODULE:FUNCTION",
                help="a function that makes the model, as `fit` takes it; needed for models of "
                "your own classes, or with Lambda layers. This imports and runs MODULE.",
            )
    _add_import(actions)


def _add_import(actions: Any) -> None:
    what = (
        "make a checkpoint of a file that tf.train.Checkpoint wrote in Keras 2 or Horovod, to "
        "continue its training; status 2, and a table, where it does not fit the model"
    )
    action = actions.add_parser(
        "import", help=what, description=what[0].upper() + what[1:] + ". Nothing in FILE is run."
    )
    action.add_argument(
        "path", metavar="FILE", help="its prefix, as in ckpts/ckpt-1, or the folder: the newest"
    )
    action.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        required=True,
        help="a function that builds and compiles the Keras 3 model. This imports and runs MODULE.",
    )
    action.add_argument(
        "--out", metavar="DIR", help="the folder to put the checkpoint in (default: FILE-ktrainer)"
    )
    action.add_argument(
        "--weights-only",
        action="store_true",
        help="without the optimizer's state, which starts new, at step 0",
    )


def run(args: argparse.Namespace) -> int:
    """Run the action; return the exit status."""
    path = Path(args.path)
    if args.action == "list":
        return _list(path)
    if args.action == "verify":
        return _verify(path)
    if args.action == "import":
        return _import(args)
    found = select_checkpoint(path, best=args.best)
    if args.action == "show":
        return _show(found.path, args.json)
    quiet_tensorflow()
    from ktrainer.checkpoint.export.export_model import export_model

    output = Path(args.output)
    averaged = export_model(found.path, output, args.model, as_validated=args.best)
    print(f"wrote {args.output} from {found.path}")
    if averaged:
        print("its weights are the averages that the optimizer keeps (use_ema)")
    return 0


def _import(args: argparse.Namespace) -> int:
    quiet_tensorflow()
    from ktrainer.checkpoint.tf_checkpoint.import_checkpoint import import_checkpoint

    output = Path(args.out) if args.out else None
    path, notes = import_checkpoint(
        Path(args.path), args.model, output, weights_only=args.weights_only
    )
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    step = read_manifest(path)["step"]
    print(f"wrote {path}: step {step}, epoch 0 (the file does not say which epoch it was)")
    print(f"continue with checkpoint.resume={path}")
    return 0


def _list(path: Path) -> int:
    for folder, every in checkpoint_folders(path):
        print(folder)
        rows = [("checkpoint", "step", "epoch", "size", "saved", "")]
        rows += [_row(found) for found in every]
        widths = [max(len(row[k]) for row in rows) for k in range(6)]
        for name, step, epoch, size, saved, marks in rows:
            print(
                f"  {name:<{widths[0]}}  {step:>{widths[1]}}  {epoch:>{widths[2]}}"
                f"  {size:>{widths[3]}}  {saved:<{widths[4]}}  {marks}".rstrip()
            )
    return 0


def _row(found: FoundCheckpoint) -> tuple[str, str, str, str, str, str]:
    if found.manifest is None:
        return found.path.name, "?", "?", "?", "?", f"BAD: {found.problem}"
    manifest, marks = found.manifest, list(found.marks)
    problem = form_problem(manifest) or sizes_problem(found.path, manifest["files"])
    if problem:
        marks.insert(0, f"BAD: {problem}")
    epoch, batch = manifest.get("epoch", "?"), manifest.get("batch", 0)
    return (
        found.path.name,
        str(manifest.get("step", "?")),
        f"{epoch}+{batch}" if batch else str(epoch),
        "?" if problem else size_text(sum(each["size"] for each in manifest["files"].values())),
        str(manifest.get("saved", "?")).replace("T", " "),
        ", ".join(marks),
    )


def _show(path: Path, as_json: bool) -> int:
    manifest = read_manifest(path)
    if as_json:
        print(json.dumps(manifest, indent=2))
        return 0
    if (problem := form_problem(manifest)) is not None:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {problem}")
    print(path)
    for key, value in manifest.items():
        if key not in ("files", "arrays", "versions", "metric"):
            print(f"  {key}: {value}")
    if manifest.get("metric"):
        metric = manifest["metric"]
        print(f"  metric: {metric.get('name')} = {metric.get('value')}")
    versions = manifest.get("versions") or {}
    print(f"  versions: {', '.join(f'{name} {text}' for name, text in versions.items())}")
    print("  files:")
    for name, facts in manifest["files"].items():
        print(f"    {name}  {size_text(facts['size'])}")
    print("  arrays:")
    for name, facts in manifest["arrays"].items():
        print(f"    {name}  {facts['dtype']}{facts['shape']}  in {facts['file']}")
    if MODEL not in manifest["files"]:
        print(f"  It has no {MODEL}: `ktrainer checkpoint export` needs --model.")
    return 0


def _verify(path: Path) -> int:
    bad = 0
    for _, every in checkpoint_folders(path):
        for found in every:
            problems = _problems(found.path)
            bad += bool(problems)
            print(f"{found.path}: {'BAD' if problems else 'whole'}")
            for problem in problems:
                print(f"  {problem}", file=sys.stderr)
    return 1 if bad else 0


def _problems(path: Path) -> list[str]:
    try:
        return verify(path)
    except CheckpointError as error:
        return [str(error)]


def size_text(size: Any) -> str:
    """A number of bytes for people: `1.2 MB`."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.1f} {units[0]}"
