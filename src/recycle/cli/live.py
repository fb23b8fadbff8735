"""The live view of a training run: its step, loss, speed and how that compares with the plan, while it goes on."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from recycle.core.record import Event, Saved, Spell, Stepped, Warned
from recycle.core.units import format_us


class LiveView:
    """A line that shows how training goes, on the error stream, so that what the command prints stays clean.

    Where that is no terminal, it says one line for every tenth of the run instead. Warnings are always said.
    """

    def __init__(self, num_steps: int) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("starting workers", total=num_steps)
        self._num_steps, self._saved = num_steps, ""
        self._spell: Spell | None = None
        self._every = max(1, num_steps // 10)

    def __enter__(self) -> "LiveView":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None) -> None:
        self._bar.stop()

    def hear(self, event: Event) -> None:
        """Take in an event of the record."""
        match event:
            case Spell(state="train"):
                self._spell = event
            case Stepped():
                self._show(event)
            case Saved(num_steps=num_steps):
                self._saved = f"  saved at {num_steps}"
            case Warned(text=text):
                self.say(f"warning: {text}")
            case _:
                pass

    def say(self, sentence: str) -> None:
        """Print a line, above the bar if there is one."""
        self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def _show(self, event: Stepped) -> None:
        num_done = event.iteration + 1
        text = describe_step(event, self._spell) + self._saved
        self._bar.update(self._task, completed=num_done, description=text)
        if not self._console.is_terminal and (num_done % self._every == 0 or num_done == self._num_steps):
            self.say(f"step {num_done} of {self._num_steps}  {text}")


def describe_step(event: Stepped, spell: Spell | None) -> str:
    """A step in a line: its loss, and if its spell is known, its speed beside that of the plan."""
    parts = [f"loss {event.loss:.4f}" if event.loss is not None else "loss not finite"]
    if spell is not None and spell.length_us > 0:
        parts.append(f"{spell.samples * 1e6 / spell.length_us:.3g} samples/s")
        parts.append(f"iteration {format_us(spell.length_us)}")
        if event.planned_us:
            parts.append(f"{spell.length_us / event.planned_us:.2f} of the plan's")
    if event.scale is None:
        parts.append("skipped")
    return "  ".join(parts)
