"""LocalStage: the stage that a worker process holds: its place, its state, and its checkpoints. It outlives an epoch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from recycle.control.decide.messages import SAVE, LayerTransfer, ProgressReport, StartEpoch
from recycle.control.drift.message_times import MessageTimer
from recycle.control.drift.op_pace import op_class, pace_of
from recycle.core.cluster import Worker
from recycle.core.errors import FileProblem
from recycle.core.layers import StageLayers
from recycle.runtime.checkpoint.files import MANIFEST, Checkpoint, parse_checkpoint, read_checkpoint, stage_file, step_folder
from recycle.runtime.checkpoint.resume import Loaded, load_stage, put_stage
from recycle.runtime.checkpoint.tensor_file import read_tensors
from recycle.runtime.checkpoint.writer import StageNotSaved, StageSaved, StageWriter
from recycle.runtime.compute.optimizer_step import StepVerdict
from recycle.runtime.compute.state_digests import state_checksum
from recycle.runtime.data.stream_batches import StreamBatches, positions_from_json, positions_to_json
from recycle.runtime.execute.row_program import Instruction
from recycle.runtime.execute.spans import Span, columns_of, now_us
from recycle.runtime.execute.stage_state import StageState
from recycle.runtime.execute.trainer import Trainer
from recycle.runtime.transport.gloo_groups import GlooGroups
from recycle.runtime.transport.links.stamped_body import own_clock
from recycle.runtime.transport.specs import GroupView, TransportBroken
from recycle.runtime.transport.state_transfer import receive_state, send_state
from recycle.runtime.worker.control_thread import ControlThread
from recycle.runtime.worker.epoch_setup import make_stage_state
from recycle.runtime.worker.moved_layers import KeptLayers, ReceivedLayers, own_layer_counts, spec_with_layers
from recycle.runtime.worker.worker_reports import EvaluationDone, IterationApplied, StepUndone, WorkerWarned
from recycle.runtime.worker.worker_spec import WorkerSpec

# A worker that could not load its stage so many times in a row ends.
_MOST_FAILED_LOADS = 3


class CannotLoad(Exception):
    """This worker cannot use its device, or could not load its stage several times in a row; and why."""


class LocalStage:
    """The stage of one process. `place` is the preferred one, or None, before the first epoch.

    `on_saved` is called with the iteration after which a checkpoint was begun. `timer` times the messages of the present epoch.
    """

    def __init__(self, spec: WorkerSpec, place: Worker | None, control: ControlThread, on_saved: Callable[[int], None]) -> None:
        self.place, self.timer = place, MessageTimer(own_clock())
        self._base, self._control, self._on_saved = spec, control, on_saved
        self._spec, self._counts = spec, own_layer_counts(spec)
        self._kept: KeptLayers | None = None
        self._report, self._activity = control.report, control.activity
        self._num_failed_loads = 0
        self._state: StageState | None = None
        self._has_state = False
        self._writes_checkpoints, self._epoch, self._evaluated = False, 0, 0
        self._ops_every, self._first_iteration = 1, 0
        self._op_classes: Mapping[str, str] = {}
        self.origin = 1
        self._writer: StageWriter | None = None

    @property
    def state(self) -> StageState:
        assert self._state is not None
        return self._state

    @property
    def num_steps(self) -> int:
        return self._state.num_steps if self._state is not None else 0

    @property
    def number(self) -> int:
        """The number of the stage, -1 before there is one."""
        return self._state.stage.number if self._state is not None else -1

    @property
    def spec(self) -> WorkerSpec:
        """The spec of the job with the layers that its stages have in the present epoch."""
        return self._spec

    def progress(self) -> ProgressReport | None:
        """The progress of the worker; None while it awaits the state of its stage."""
        if self._kept is not None:
            return self._kept.progress
        return self.state.progress() if self._has_state else None

    @property
    def held_layers(self) -> tuple[int, ...]:
        """The layers whose state this worker holds, if layers may move."""
        if self._base.make_model is None:
            return ()
        held = set(self._held_range) if self._has_state else set[int]()
        return tuple(sorted(held | self._kept.layers if self._kept is not None else held))

    @property
    def _held_range(self) -> range:
        return StageLayers(self._counts, self._base.shared_layers).held(self.number)

    @property
    def _own_range(self) -> range:
        assert self._spec.layers is not None
        return self._spec.layers.ranges[self.number]

    def move_to(self, view: GroupView, start: StartEpoch, device: torch.device) -> None:
        """Take a place in an epoch, with the state at which all resume; `transfer` fetches the state if a peer has it.

        If layers move, `transfer_layers` fetches those that this worker does not hold.
        """
        place = view.worker
        counts = start.layer_counts if self._base.make_model is not None and start.layer_counts else own_layer_counts(self._base)
        is_new = self.number != place.stage or counts != self._counts
        is_fresh = start.checkpoint >= 0 or (start.epoch == 1 and is_new)
        is_copied = str(place) in start.sources
        is_by_layer = (start.transfers_layers or self._kept is not None) and not is_fresh
        if is_by_layer:
            self._keep_layers(start)
        if is_fresh or is_new or is_copied or is_by_layer:
            self._has_state = False
            if counts != self._counts:
                self._spec, self._counts = spec_with_layers(self._base, counts), counts
            self._state = self._make_state(place.stage, start.iteration, device)
        if is_fresh:
            self._kept, self._evaluated = None, 0
            self._load_checkpoint(place, start.checkpoint)
            self._has_state = True
        elif is_by_layer and not start.transfers_layers:
            self._take_layers(ReceivedLayers(self._kept))
            self._kept = None
        elif not is_copied and not is_by_layer:
            self.report_undone(start.iteration, self.state.resume_at(start.iteration, start.ballot, self.on_applied))
        self.place, self._epoch, self.origin = place, view.epoch, start.origin
        self._ops_every, self._first_iteration = start.ops_every, start.iteration
        writers = [peer for peer in view.peers if str(peer) not in start.sources] or view.peers
        self._writes_checkpoints = self._spec.checkpoint_folder is not None and place == writers[0]

    def _make_state(self, stage: int, num_steps: int, device: torch.device) -> StageState:
        if self._spec.checkpoint_folder is not None:
            deliver = self._spec.file_transfer.upload if self._spec.file_transfer is not None else None
            counts = () if self._spec is self._base else self._counts
            self._writer = StageWriter(self._spec.checkpoint_folder, stage, self._report_saved, deliver, self._goes_on, counts)
        last_ballot = self._kept.progress.whole if self._kept is not None else None
        return make_stage_state(self._spec, stage, num_steps, device, last_ballot)

    def _keep_layers(self, start: StartEpoch) -> None:
        """Keep the layers that are held here until all workers have theirs: before that, the transfer may be broken off.

        If layers are kept from a transfer that was broken off, the state is as old as they are.
        """
        if not self._has_state:
            return
        if self._kept is None:
            self.report_undone(start.iteration, self.state.resume_at(start.iteration, start.ballot, self.on_applied))
        self._kept = KeptLayers.of(self.state, self._held_range, self._own_range, self._kept)

    def _take_layers(self, received: ReceivedLayers) -> None:
        assert self._kept is None or self._kept.progress.num_steps == self.state.num_steps, "what is kept is of another iteration"
        received.put_into(self.state, self._own_range)
        self._has_state = True

    def transfer_layers(self, groups: GlooGroups, transfers: Sequence[LayerTransfer]) -> None:
        """Send and receive layers, all workers in the same order; then wait until all workers have theirs, and drop the others.

        Whoever goes on from here knows that nobody needs what it drops.
        """
        received = ReceivedLayers(self._kept)
        for transfer in transfers:
            if transfer.sender == str(self.place):
                assert self._kept is not None
                self._kept.send(groups, transfer)
            else:
                received.receive(groups, transfer)
        self._take_layers(received)
        groups.wait(groups.begin_vote(torch.zeros(1, dtype=torch.float64)), "all")
        self._kept = None

    def _report_saved(self, report: StageSaved | StageNotSaved) -> None:
        if isinstance(report, StageNotSaved):
            report = replace(report, reason=f"{self.place}: {report.reason}")
        self._report(report)

    def _goes_on(self, has_moved: bool) -> bool:
        """Renew the activity if bytes of a file have moved; return whether the epoch goes on."""
        if has_moved:
            self._activity.renew()
        return not self._control.is_over

    def _load_checkpoint(self, place: Worker, num_steps: int) -> None:
        """Load the stage of `place` from the checkpoint after `num_steps` steps, if there is one.

        If that fails, the epoch does, too: the coordinator looks for the newest whole checkpoint again.
        """
        if num_steps <= 0:
            return
        try:
            self._load(num_steps)
            self._num_failed_loads = 0
        except FileProblem as problem:
            self._num_failed_loads += 1
            text = f"{place} could not load its stage, and a checkpoint is looked for again: {problem}"
            self._report(WorkerWarned(place, text))
            if self._num_failed_loads == _MOST_FAILED_LOADS:
                raise CannotLoad(str(problem)) from None
            raise TransportBroken(str(problem)) from None

    def _load(self, num_steps: int) -> None:
        assert self._spec.checkpoint_folder is not None
        folder, file_transfer = self._spec.checkpoint_folder / step_folder(num_steps), self._spec.file_transfer
        module, optimizer = self.state.stage.module, self.state.stepper.optimizer
        if file_transfer is None:
            checkpoint = read_checkpoint(folder, checks_sizes=False)
            self._keep_positions(checkpoint)
            load_stage(checkpoint, self.number, module, optimizer, self._pulse, self._spec.layers)
            return
        name = f"{folder.name}/{MANIFEST}"
        checkpoint = parse_checkpoint(folder, file_transfer.download(name, lambda stream, size: stream.read(size), self._pulse))

        self._keep_positions(checkpoint)

        def read(number: int) -> Loaded:
            name = f"{folder.name}/{stage_file(number)}"
            return file_transfer.download(name, partial(read_tensors, source=name), self._pulse)

        put_stage(checkpoint, read, self.number, module, optimizer, self._spec.layers)

    def _keep_positions(self, checkpoint: Checkpoint) -> None:
        if isinstance(self._spec.microbatches, StreamBatches):
            self._spec.microbatches.restart(positions_from_json(checkpoint.positions))

    def _pulse(self, num_bytes: int) -> None:
        if not self._goes_on(num_bytes > 0):
            raise TransportBroken("the epoch was over before its checkpoint was loaded")

    def transfer(self, groups: GlooGroups, sources: Mapping[str, str]) -> None:
        """Send the state to the peers that copy it from here, or receive it. `sources` are the senders by receiver."""
        module, optimizer = self.state.stage.module, self.state.stepper.optimizer
        for receiver, sender in sorted(sources.items()):
            if sender == str(self.place):
                send_state(groups, Worker.parse(receiver), module, optimizer)
            elif receiver == str(self.place):
                receive_state(groups, Worker.parse(sender), module, optimizer)
                self._has_state = True

    def set_program(self, instructions: Sequence[Instruction]) -> None:
        """Know what the ops of the epoch compute: an iteration before it is reported by then."""
        self._op_classes = {each.label: op_class(each.kind, each.layers) for each in instructions}
        self.timer.reset()

    def report_undone(self, iteration: int, spans: Sequence[Span]) -> None:
        """Report the ops of an iteration that is to be done again."""
        if spans and self.place is not None:
            self._report(StepUndone(self.place, iteration, columns_of(spans)))

    def on_applied(self, iteration: int, losses: Mapping[int, float], spans: Sequence[Span], verdict: StepVerdict) -> None:
        """Report an iteration that is applied for good, and save it if a checkpoint is due."""
        assert self.place is not None
        options = self._spec.options
        is_due = self._spec.checkpoint_folder is not None and options.checkpoint.is_due(iteration + 1, self._spec.num_steps)
        compares = is_due or iteration + 1 == self._spec.num_steps or options.failures.is_compared(iteration + 1)
        checksum = state_checksum(self.state.stepper.optimizer) if compares else ""
        ran = columns_of(spans)
        if iteration % self._ops_every and iteration != self._first_iteration:
            ran = ran.without_text()
        ops = [span for span in spans if span.label in self._op_classes and not span.is_discarded]
        pace = pace_of((self._op_classes[span.label], span.end_us - span.start_us) for span in ops)
        times = pace, self.timer.take()
        positions = self._positions_at(iteration + 1) if is_due else {}
        self._report(IterationApplied(self.place, iteration, losses, ran, verdict, checksum, *times, positions))
        if self._writes_checkpoints and is_due:
            self._activity.begin(SAVE)
            self._save(iteration + 1, is_last=iteration + 1 == self._spec.num_steps)
            self._on_saved(iteration)

    def _positions_at(self, num_steps: int) -> Mapping[str, Mapping[str, str]]:
        """The positions in the streams of the job that this worker knows, in their JSON form."""
        source = self._spec.microbatches
        return positions_to_json(source.positions_at(num_steps)) if isinstance(source, StreamBatches) else {}

    def _save(self, num_steps: int, is_last: bool) -> None:
        assert self._writer is not None
        self._writer.save(num_steps, self.state.stage.module, self.state.stepper.optimizer, is_last, self._epoch)

    def evaluate(self, num_steps: int, trainer: Trainer) -> None:
        """Evaluate the weights, unless a worker of the epoch has done so; at the last stage, report the result.

        After a failure an evaluation that not all have finished is asked for again. Who knows its result has reported it.
        """
        evaluator = trainer.evaluator
        assert evaluator is not None
        assert self.place is not None
        if evaluator.is_known(self._evaluated == num_steps):
            return
        if (result := evaluator.evaluate(num_steps)) is not None:
            self._evaluated = num_steps
            numbers = (num_steps, result.loss, result.num_microbatches, now_us(), result.took_us)
            self._report(EvaluationDone(self.place, *numbers))

    def finish_checkpoints(self, start: StartEpoch) -> None:
        """Wait for the checkpoints that are being written, and first write the last one if its writer may have died."""
        is_last = start.only_saves or (start.iteration == self._spec.num_steps and start.epoch > 1)
        if self._writes_checkpoints and is_last:
            self._save(start.iteration, is_last=True)
        if self._writer is not None and not self._writer.wait():
            raise TransportBroken("the epoch was over before its checkpoint was written")
