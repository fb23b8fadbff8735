"""Routes: which worker runs a micro-batch at each stage of a plan, which decides the messages between workers."""

from recycle.core.cluster import Worker
from recycle.core.plans.plan import Plan


class Routes:
    """The worker of each chain at each stage, from the rows of a plan alone."""

    def __init__(self, plan: Plan) -> None:
        shape = plan.problem.shape
        self._pipeline = [[-1] * shape.num_chains for _ in range(shape.num_stages)]
        for row in plan.rows:
            column = self._pipeline[row.worker.stage]
            for chain in row.chains:
                column[chain] = row.worker.pipeline

    def worker(self, stage: int, chain: int) -> Worker:
        return Worker(self._pipeline[stage][chain], stage)
