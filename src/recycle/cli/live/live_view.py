"""The live view of a training run, on a terminal: the grid of workers, step, loss and speed, and what recoveries cost."""

import time
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from recycle.cli.live.event_text import describe_change, describe_step, format_loss
from recycle.cli.live.grid import draw
from recycle.core.cluster import Shape, Worker
from recycle.core.events.record import Evaluated, Event, Stepped, Warned
from recycle.core.units import format_us
from recycle.report.record.run_state import initial_state, state_after

_FRAMES_PER_S = 5


class LiveView:
    """Shows the progress of a run on the error stream, so that standard output has only the result.

    With a shape, of whose workers `dead` are dead from the start, it shows all workers, and the last picture stays; without, it
    is one line that vanishes. `carried` has the number of layers that each stage computes, if layers are
    shared. Without a terminal, it prints a line for every tenth of the run, for every worker that leaves or joins, and for every
    recovery. Warnings are always printed.
    """

    def __init__(
        self,
        num_steps: int,
        shape: Shape | None = None,
        dead: Iterable[Worker] = (),
        console: Console | None = None,
        carried: tuple[float, ...] = (),
    ) -> None:
        self._console = console or Console(stderr=True)
        self._state = initial_state(num_steps, shape, dead, carried)
        self._every = max(1, num_steps // 10)
        self._live = Live(
            self, console=self._console, refresh_per_second=_FRAMES_PER_S, transient=shape is None, redirect_stdout=False
        )

    def __enter__(self) -> "LiveView":
        self._begun_s = time.monotonic()
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # A thread of rich asks for this: the state is replaced whole, so that it never sees half of an event.
        yield draw(self._state, time.monotonic() - self._begun_s, options.max_width, options.ascii_only)

    def observe(self, event: Event) -> None:
        """Update the view with an event of the record."""
        self._state = state_after(self._state, event)
        is_drawn = self._console.is_terminal and self._state.shape is not None
        if isinstance(event, Warned):
            self.say(f"warning: {event.text}")
        elif isinstance(event, Stepped):
            self._print_step(event)
        elif isinstance(event, Evaluated):
            self.say(f"evaluation after step {event.num_steps}  loss {format_loss(event.loss)}  took {format_us(event.took_us)}")
        elif not is_drawn and (sentence := describe_change(event, self._state.processes)):
            self.say(sentence)

    def say(self, sentence: str) -> None:
        """Print a line, above the view if there is one."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def _print_step(self, event: Stepped) -> None:
        num_done, num_steps, checkpoint = event.iteration + 1, self._state.num_steps, self._state.facts.checkpoint
        if self._console.is_terminal or not (num_done % self._every == 0 or num_done == num_steps):
            return
        saved = f"  saved at {checkpoint.num_steps}" if checkpoint else ""
        self.say(f"step {num_done} of {num_steps}  {describe_step(event, self._state.spell)}{saved}")
