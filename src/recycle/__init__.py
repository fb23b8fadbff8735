"""ReCycle: pipeline-parallel training that goes on when workers die.

The names below are the whole public interface; the planner behind them is imported when it is first used, so that a worker which
only plays plans never loads it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recycle.core.cluster import Cluster, Shape, Worker
from recycle.core.errors import UserError
from recycle.core.library import Library
from recycle.core.plan import Plan
from recycle.core.problem import Memory, Problem, Techniques
from recycle.core.profile import Profile
from recycle.core.release import RELEASE as __version__
from recycle.core.rules import check

if TYPE_CHECKING:
    from recycle.planner.build import build
    from recycle.planner.describe import problem
    from recycle.planner.estimate import estimate
    from recycle.planner.solve import solve, solve_normalized

_PLANNER = {"build": "build", "problem": "describe", "estimate": "estimate", "solve": "solve", "solve_normalized": "solve"}

__all__ = [
    "Cluster",
    "Library",
    "Memory",
    "Plan",
    "Problem",
    "Profile",
    "Shape",
    "Techniques",
    "UserError",
    "Worker",
    "__version__",
    "build",
    "check",
    "estimate",
    "problem",
    "solve",
    "solve_normalized",
]


def __getattr__(name: str) -> Any:
    if name not in _PLANNER:
        raise AttributeError(f"module 'recycle' has no attribute {name!r}")
    return getattr(import_module(f"recycle.planner.{_PLANNER[name]}"), name)
