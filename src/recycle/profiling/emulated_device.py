"""EmulatedDevice: how long ops take on a device that each worker has for itself, on a machine that has none.

A worker computes an op, and waits until the time of the emulated device has passed. Processes, messages, gradients, sums and
steps are real. With a small model a few cores are enough to measure schedules without the contention of workers that share them.
With a large one on a core for each worker, the cores are paced: as fast as a slow one, each.
"""

from collections.abc import Callable
from dataclasses import dataclass

from recycle.core.op import Kind
from recycle.core.plans.plan import Plan
from recycle.runtime.execute.row_program import Instruction


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """The times of one layer in µs: forward, gradient of the input, gradient of the weights. All layers of the model are equal.

    `num_layers` is the number of layers of a stage of a plan that does not say which layers its stages have.
    """

    forward_us: int
    input_us: int
    weight_us: int
    num_layers: int

    def op_us(self, kind: Kind, num_layers: int) -> int:
        """The time of an op that computes so many layers."""
        backward_us = {Kind.I: self.input_us, Kind.W: self.weight_us, Kind.B: self.input_us + self.weight_us}
        return num_layers * (self.forward_us if kind is Kind.F else backward_us[kind])

    def device_us(self, plan: Plan, stage: int) -> Callable[[Instruction], int]:
        """Return what knows the times of the ops of one stage."""
        layers = plan.problem.profile.layers
        own = len(layers[stage]) if layers else self.num_layers

        def op_us(instruction: Instruction) -> int:
            return self.op_us(instruction.kind, own if instruction.layers is None else len(instruction.layers))

        return op_us
