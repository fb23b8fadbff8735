"""A question that is small enough to simulate every answer: four servers of two GPUs that fail often."""

from recycle.planner.profiles.catalog import parse_gpu, parse_model
from recycle.sim.advise.choices import NOT_TO_CHOOSE
from recycle.sim.advise.question import DAY_US, ClusterQuestion
from recycle.sim.systems.constants import Constants
from recycle.sim.systems.registry import SYSTEMS

MODEL = "layers=4,hidden=2048,heads=16,sequence=2048,vocabulary=1000"


def small_question(**changes):
    model = parse_model(changes.pop("model", MODEL))
    given = {
        "model": model,
        "gpu": parse_gpu(changes.pop("gpu", "a100-80")),
        "num_gpus": 8,
        "batch": 24,
        "mtbf_us": 2 * DAY_US,
        "repair_us": DAY_US // 4,
        "constants": Constants.for_model(model.num_parameters),
        "systems": tuple(name for name in SYSTEMS if name not in NOT_TO_CHOOSE),
        "gpus_per_server": 2,
        "days": 10.0,
        "num_seeds": 3,
        "batch_tolerance": 0.05,
    }
    return ClusterQuestion(**{**given, **changes})
