"""A decoder-only GPT in stages: the same model, bit for bit, however many stages it is cut into.

Parameters keep their names in the whole model (`layers.3.attention.out.weight`), wherever the cut is. So the states of all stages
together are the state of the one-stage model. An initial weight depends only on the seed and its name, so that a worker can make
its own stage without the others.

The model is GPT-2's: learned positions, layers of causal attention and a GELU MLP with the norm before each, biases
everywhere but in the head, weights of deviation 0.02, smaller where a layer adds to the residual.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from recycle.core.errors import Uncuttable, UserError
from recycle.core.layers import split_layers
from recycle.runtime.compute.seeds import seed_of
from recycle.runtime.options import refuse_count

_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class GptConfig:
    """The dimensions of a GPT.

    Args:
        vocabulary: The number of different tokens; 256 for bytes.
        context: The largest number of tokens in a sample.
        width: The size of a token's vector, a multiple of `num_heads`.
        num_heads: The number of attention heads.
        num_layers: The number of layers of attention and MLP.
        dropout: The probability of dropout, from 0 to below 1.
        ties_embeddings: Whether the head uses the matrix of the token embedding.

    Raises:
        UserError: A value is out of its range.
    """

    vocabulary: int = 256
    context: int = 64
    width: int = 64
    num_heads: int = 4
    num_layers: int = 4
    dropout: float = 0.0
    ties_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in ("vocabulary", "context", "width", "num_heads", "num_layers"):
            refuse_count(name, getattr(self, name), 1)
        if self.width % self.num_heads:
            raise UserError(f"{self.num_heads} heads do not share a width of {self.width}: choose a width that they divide")
        if isinstance(self.dropout, bool) or not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout!r}, but it must be a number from 0 to below 1")


class _Embedding(nn.Module):
    """Token ids to vectors: the sum of a token embedding and a position embedding."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        length, longest = ids.shape[-1], self.positions.num_embeddings
        if length > longest:
            raise UserError(
                f"a sample of {length} tokens is longer than the context of {longest}: shorten it, or train longer ones"
            )
        embedded: Tensor = self.dropout(self.tokens(ids) + self.positions.weight[:length])
        return embedded


class _Attention(nn.Module):
    """Causal self-attention: every token attends to itself and to earlier tokens."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        # [batch, tokens, 3 * width] becomes three of [batch, heads, tokens, width / heads].
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        mixed: Tensor = self.out(seen.transpose(1, 2).flatten(2))
        return mixed


class _Layer(nn.Module):
    """Attention and MLP, each with a residual connection."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = _Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        up, out = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)
        self.mlp = nn.Sequential(OrderedDict(up=up, gelu=nn.GELU("tanh"), out=out))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(x)))
        return x + added


class GptStage(nn.Module):
    """Consecutive layers of the model; the first stage also has the embedding, the last one the head.

    It takes and returns one float tensor [batch, tokens, width], except that the first stage takes token ids (int64)
    [batch, tokens] and the last returns logits [batch, tokens, vocabulary].
    """

    def __init__(self, config: GptConfig, layers: range, seed: int) -> None:
        super().__init__()
        assert 0 <= layers.start < layers.stop <= config.num_layers
        assert layers.step == 1
        self.config = config
        self.is_first, self.is_last = layers.start == 0, layers.stop == config.num_layers
        # The modules draw weights of their own, which are replaced; torch's global random state stays as it is. On the meta
        # device they would draw none, but for that torch loads its compiler, which takes longer than the weights of a small GPT.
        with torch.random.fork_rng(devices=[]):
            self.embedding = _Embedding(config) if self.is_first else None
            self.layers = nn.ModuleDict({str(number): _Layer(config) for number in layers})
            self.norm = nn.LayerNorm(config.width) if self.is_last else None
            self.head = nn.Linear(config.width, config.vocabulary, bias=False) if self.is_last else None
        self._set_weights(seed)

    @torch.no_grad()
    def _set_weights(self, seed: int) -> None:
        """Initialise every parameter from the seed and its name; norms start as the identity, biases at 0."""
        # Each layer adds to the residual twice; the scale keeps the variance of the sum independent of the depth.
        residual = _DEVIATION / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            deviation = residual if name.endswith(".out.weight") else _DEVIATION
            parameter.normal_(0.0, deviation, generator=torch.Generator().manual_seed(seed_of(seed, name)))

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def split_into_layers(self) -> list[nn.Module]:
        """The layers of the stage; the embedding belongs to the first one of the model, norm and head to the last one."""
        layers: list[list[nn.Module]] = [[layer] for layer in self.layers.values()]
        if self.embedding is not None:
            layers[0].insert(0, self.embedding)
        if self.norm is not None and self.head is not None:
            layers[-1] += [self.norm, self.head]
        return [parts[0] if len(parts) == 1 else nn.Sequential(*parts) for parts in layers]


def gpt_stages(config: GptConfig, num_stages: int, seed: int, layers: Sequence[int] | None = None) -> list[nn.Module]:
    """Make a GPT as a list of stages that together compute the same as the one-stage model, bit for bit.

    Args:
        config: The dimensions of the model.
        num_stages: The number of stages, at most the number of layers.
        seed: The seed of the initial weights.
        layers: The number of layers of each stage; by default `balanced_layers` decides.

    Returns:
        The stages in order. The first takes token ids (int64) [batch, tokens], the last returns logits.

    Raises:
        Uncuttable: The layers cannot be distributed over so many stages.

    Example:
        >>> [len(stage.layers) for stage in gpt_stages(GptConfig(num_layers=4), num_stages=2, seed=0)]
        [2, 2]
    """
    numbers = balanced_layers(config, num_stages) if layers is None else _checked_split(config, num_stages, layers)
    stops = [sum(numbers[: stage + 1]) for stage in range(num_stages)]
    stages = [GptStage(config, range(stop - number, stop), seed) for stop, number in zip(stops, numbers, strict=True)]
    if config.ties_embeddings:
        _tie(stages[0], stages[-1])
    return list(stages)


def _tie(first: GptStage, last: GptStage) -> None:
    """Let the head use the matrix of the token embedding: the same parameter object, in whichever stages the two are."""
    assert first.embedding is not None
    assert last.head is not None
    last.head.weight = first.embedding.tokens.weight


def balanced_layers(config: GptConfig, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least one, such that the slowest stage has the fewest FLOPs.

    For each token a layer of width w and context s computes w(24w + 4s) FLOPs forward, and the head 2wV; backward both cost
    twice that. So the head counts as V / (12w + 2s) layers. The embedding is a look-up without FLOPs.
    """
    _refuse_stages(config, num_stages)
    layer_cost = 12 * config.width + 2 * config.context
    return split_layers(config.num_layers, layer_cost, [0] * (num_stages - 1) + [config.vocabulary])


def next_byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the logits [..., vocabulary] and the targets over all tokens, a scalar."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refuse_stages(config: GptConfig, num_stages: int) -> None:
    if not _is_count(num_stages):
        raise Uncuttable(f"the number of stages is {num_stages!r}, but it must be a whole number of at least 1")
    if num_stages > config.num_layers:
        raise Uncuttable(
            f"{num_stages} stages are more than the {config.num_layers} layers of the model: every stage needs a layer"
        )


def _checked_split(config: GptConfig, num_stages: int, layers: Sequence[int]) -> tuple[int, ...]:
    _refuse_stages(config, num_stages)
    if len(layers) != num_stages or not all(map(_is_count, layers)) or sum(layers) != config.num_layers:
        raise Uncuttable(
            f"the split {', '.join(map(str, layers)) or 'of no stages'} does not give {config.num_layers} layers to {num_stages} "
            "stages, at least one to each"
        )
    return tuple(layers)
