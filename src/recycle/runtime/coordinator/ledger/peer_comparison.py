"""Comparison of peers: those of a stage hold the same weights, so an odd one has been corrupted."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from recycle.core.cluster import Worker


@dataclass(frozen=True, slots=True)
class PeersDisagree:
    """Peers of a stage have different checksums after `num_steps` steps; all peers agreed after `agreed_steps`."""

    num_steps: int
    agreed_steps: int
    checksums: Mapping[Worker, str]

    @property
    def odd(self) -> list[Worker]:
        """The peers that differ from a majority of all; none if there is no majority."""
        counts = Counter(self.checksums.values())
        checksum, num = counts.most_common(1)[0]
        return sorted(worker for worker, other in self.checksums.items() if other != checksum) if 2 * num > counts.total() else []

    def __str__(self) -> str:
        names = ", ".join(str(worker) for worker in sorted(self.checksums))
        return f"{names} hold different weights after step {self.num_steps}; all peers agreed after step {self.agreed_steps}"


def compare_peers(num_steps: int, agreed_steps: int, checksums: Mapping[Worker, str]) -> PeersDisagree | None:
    """Compare the peers of every stage, and return the first stage that disagrees; an empty checksum does not count."""
    for stage in sorted({worker.stage for worker in checksums}):
        peers = {worker: checksum for worker, checksum in checksums.items() if worker.stage == stage and checksum}
        if len(set(peers.values())) > 1:
            return PeersDisagree(num_steps, agreed_steps, peers)
    return None
