"""The configuration of a run that goes on: that in its folder, with the changes of the flags, among them another shape."""

import argparse
from pathlib import Path

from recycle.cli.training.job_from_config import SHAPE_KEYS, is_free
from recycle.cli.training.train_config import TrainConfig, changes, load_config, read_config
from recycle.core.cluster import Shape
from recycle.core.errors import FileProblem, ForeignRun
from recycle.core.events.record_file import CHECKPOINTS, CONFIG

_PIPELINES, _STAGES, _MICROBATCHES = SHAPE_KEYS
# Keys that name workers, or are made for one shape: those of the former shape do not count for another.
_OF_ONE_SHAPE = ("cluster.dead", "cluster.plan", "cluster.library", "cluster.profile")


def resumed_config(args: argparse.Namespace) -> TrainConfig:
    """The configuration in the folder `args.resume`, with the changes of the flags; raise if it would compute something else."""
    path: Path = args.resume / CONFIG
    if not path.is_file():
        wanted = "give a folder that 'recycle train --out' wrote"
        raise FileProblem(f"{args.resume} is no run that can be resumed: it has no {CONFIG}; {wanted}")
    before = load_config(path)
    _fit_to_shape(args, before)
    args.config = path
    config = read_config(args)
    for name, (old, new) in changes(before, config).items():
        if not is_free(name):
            raise ForeignRun(
                f"the run in {args.resume} has {name} = {old}, not {new}: what it computes cannot change when it goes on"
            )
    return config


def _fit_to_shape(args: argparse.Namespace, before: TrainConfig) -> None:
    """Add the flags that follow from those of another shape: as many micro-batches in a step, and nobody dead."""
    given = vars(args)
    if given.keys().isdisjoint(SHAPE_KEYS):
        return
    old = _shape_of(args.resume) or before.cluster.shape
    pipelines = given.get(_PIPELINES, old.num_pipelines)
    if _MICROBATCHES not in given and pipelines > 0:
        if old.num_chains % pipelines:
            possible = [str(number) for number in range(1, old.num_chains + 1) if old.num_chains % number == 0]
            raise ForeignRun(
                f"the run in {args.resume} has {old.num_chains} micro-batches in a step, which {pipelines} pipelines cannot "
                f"share equally: choose {', '.join(possible[:-1])} or {possible[-1]} pipelines"
            )
        given[_MICROBATCHES] = old.num_chains // pipelines
    new = pipelines, given.get(_STAGES, old.num_stages), given[_MICROBATCHES]
    if new == (old.num_pipelines, old.num_stages, old.num_microbatches):
        return
    for name in _OF_ONE_SHAPE:
        given.setdefault(name, "")
    if "," in before.cluster.memory:
        given.setdefault("cluster.memory", "")


def _shape_of(run: Path) -> Shape | None:
    """The shape of the newest checkpoint of a run; None if none can be read: why, is said when it is loaded."""
    from recycle.runtime.checkpoint.files import find_checkpoints, read_checkpoint

    for folder in find_checkpoints(run / CHECKPOINTS).values():
        try:
            found = read_checkpoint(folder, checks_sizes=False).fingerprint
            return Shape(*(found[key.removeprefix("cluster.")] for key in SHAPE_KEYS))
        except (FileProblem, KeyError):
            continue
    return None
