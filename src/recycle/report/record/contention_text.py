"""Workers that share a machine, as text: how much slower ops are beside others, and a note where cores are too few."""

from recycle.core.profile import Profile
from recycle.core.units import count_text

# A smaller contention than this share counts as none.
_LEAST_SHARE = 0.001


def contention_text(profile: Profile) -> str:
    """Describe how much slower ops are while other workers compute on the same machine."""
    levels = profile.contention
    if len(levels) < 2:
        return "none: no other worker computed"
    most = len(levels) - 1
    if levels[-1] / levels[0] - 1 < _LEAST_SHARE:
        return f"none found: ops are as fast with {most} others as alone"
    some = [num for num in (most // 3, 2 * most // 3) if 0 < num < most]
    between = [f"{levels[num]:.3f} with {num} other{'s' * (num > 1)}" for num in some]
    return ", ".join([f"alone, ops take {levels[0]:.3f} of their cost", *between, f"{levels[-1]:.3f} with all {most}"])


def oversubscription_note(num_workers: int, num_cores: int) -> str | None:
    """Return a note for workers that share too few cores; None if there are enough."""
    if num_workers <= num_cores:
        return None
    return (
        f"note: {num_workers} workers share {count_text(num_cores, 'core')}: "
        "much of the measured time is time in which they wait for each other"
    )
