"""Runs of real processes on data of many kinds: undisturbed, with workers that die, and killed and resumed."""

import torch
from torch import nn

import recycle
from recycle.core.events.failure_script import Action, Injection, Script
from recycle.planner.live_planner import Planner
from recycle.runtime.job import Job
from recycle.runtime.launch.local_launcher import launch
from recycle.runtime.options import CheckpointOptions, FailureOptions, TrainOptions

SHAPE, SAMPLES, WIDTH, SEED = (2, 2, 3), 2, 8, 7


class Augmented:
    """A map-style dataset whose samples are drawn at random."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        x = number + torch.rand(WIDTH)
        return x / 50, x.roll(1).sin()


def stages():
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh()), nn.Linear(16, WIDTH)]


def problem():
    return recycle.problem(*SHAPE, costs=(10, 13, 9), comm=1)


def token_stages():
    torch.manual_seed(4)
    return [nn.Sequential(nn.Embedding(20, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 20)]


def token_loss(made, targets):
    return nn.functional.cross_entropy(made.flatten(0, 1), targets.flatten())


class Sentences:
    """Sequences of tokens of different lengths, up to nine; the next token is to be predicted."""

    def __len__(self):
        return 40

    def __getitem__(self, number):
        ids = torch.arange(3 + number % 7) * (number + 1) % 20
        return ids, ids.roll(-1)


class Embedded(nn.Module):
    """The first stage of a model of packed sequences."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(20, WIDTH), nn.Embedding(9, WIDTH)

    def forward(self, given):
        return (self.tokens(given["input_ids"]) + self.positions(given["position_ids"])).tanh()


def packed_stages():
    torch.manual_seed(4)
    return [Embedded(), nn.Linear(WIDTH, 20)]


def packed():
    """The sequences, one behind the other, in samples of eight tokens."""
    return recycle.pack([ids.tolist() for ids, _ in map(Sentences().__getitem__, range(40))], 8)


def run(dataset, *lines, steps=6, data=None, out=None, resume=False, every=0, model=stages, loss=nn.functional.mse_loss):
    """Train on `dataset` with workers that fail by the script `lines`; return the summary."""
    wanted = problem()
    injections = [Injection.parse(Action(line.split()[0]), line.split()[1]) for line in lines]
    failures = FailureOptions(Planner(wanted), Script.of(injections, wanted.shape, steps), lease_s=5.0, restarts=0)
    checkpoint = CheckpointOptions(every, keep=50, resume=resume)
    options = TrainOptions(SEED, True, data=data or recycle.DataOptions(), checkpoint=checkpoint, failures=failures)
    plan = recycle.solve(wanted, "greedy", effort=20_000)
    return launch(Job(plan, model(), dataset, loss, sgd, steps, SAMPLES, out, options))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05)


class Counted:
    """A stream of numbered samples without a state. Positions in it are reached by reading."""

    def __init__(self, num_samples=400):
        self.num_samples = num_samples

    def __iter__(self):
        for number in range(self.num_samples):
            yield self.sample(number)

    def sample(self, number):
        x = number + torch.rand(WIDTH)
        return x / 100, x.roll(1).sin()


class Stateful(Counted):
    """A stream that knows where it is, and can be divided. `max_skipped` samples are read again at most."""

    def __init__(self, num_samples=400, part=(1, 0)):
        super().__init__(num_samples)
        self.part, self.next = part, 0

    def shard(self, num_shards, index):
        return Stateful(self.num_samples, (num_shards, index))

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]

    def __iter__(self):
        num_parts, index = self.part
        while self.next * num_parts + index < self.num_samples:
            self.next += 1
            yield self.sample((self.next - 1) * num_parts + index)
        self.next = 0


def hugging_face():
    """A stream of Hugging Face, of rows that are mapped as they are read."""
    import datasets  # takes seconds, and only this kind needs it

    rows = datasets.Dataset.from_dict({"number": list(range(200))}).to_iterable_dataset(num_shards=6)
    return rows.map(_with_numbers)


def _with_numbers(row):
    return {"x": [(row["number"] + each) / 200 for each in range(WIDTH)]}


def joined_rows(rows):
    """Collate rows of Hugging Face."""
    x = torch.tensor([row["x"] for row in rows])
    return x, x.roll(1, -1).sin()


class Broken(Augmented):
    """A dataset in which one sample cannot be made, which is read in the second step at the latest."""

    def __getitem__(self, number):
        return super().__getitem__(number if number % 20 else number // 0)
