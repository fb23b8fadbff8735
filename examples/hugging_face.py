"""Train a Hugging Face model with 2 pipelines of 3 stages, some of the six workers dead. Nothing is downloaded.

    python examples/hugging_face.py                    # GPT-2, whose head uses the matrix of its embedding
    python examples/hugging_face.py --model llama --dead W1_0,W1_1,W0_2
    recycle train examples/hugging_face.py --kill W1_1@5            # as a job file, which other machines can train, too

The model is a small one, made from its configuration, and learns bytes of Python's standard library. `recycle.cut` finds its
embedding, layers, norm and head by their structure. The stages hold the modules of the model: its own code runs, a tie is found
because it is one parameter, and loading a checkpoint into the stages loads it into the model.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import recycle
from recycle.core.events.record import Event, Stepped
from recycle.models.text import Text
from recycle.runtime.coordinator.ledger.run_ledger import Trained

CONTEXT, WIDTH, NUM_HEADS, NUM_BLOCKS = 64, 64, 4, 6


def make_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256,
            n_positions=CONTEXT,
            n_embd=WIDTH,
            n_head=NUM_HEADS,
            n_layer=NUM_BLOCKS,
            # Dropout works, too; without it the losses are those of training the model as a whole.
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            max_position_embeddings=CONTEXT,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_HEADS // 2,
            num_hidden_layers=NUM_BLOCKS,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def make_stages(model: PreTrainedModel) -> list[nn.Module]:
    """Embedding and blocks | blocks | blocks, norm and head."""
    return recycle.cut(model, stages=3)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


make_optimizer = partial(torch.optim.AdamW, lr=3e-3)
MODELS = {"gpt2": make_gpt2, "llama": make_llama}


def job() -> recycle.Job:
    """The job of this file, for `recycle train`, `recycle coordinator` and `recycle agent`: it trains GPT-2."""
    stages, shape = make_stages(make_gpt2()), recycle.Shape(2, 3, 4)
    return recycle.Job(shape, stages, Text(CONTEXT), loss, make_optimizer, steps=30, samples=4)


def show(event: Event) -> None:
    """Print every fifth step."""
    match event:
        case Stepped(iteration=iteration, loss=float(value)) if iteration % 5 == 0:
            print(f"step {iteration + 1:3}  loss {value:.4f}")


def train(stages: Sequence[nn.Module], dead: str, steps: int, out: Path | None = None) -> Trained:
    """Train with the workers in `dead` dead from the start. The stages are left as they were; checkpoints are in `out`."""
    plan = recycle.solve(recycle.problem(2, 3, 4, fail=dead, costs=(1, 1, 1)))
    return recycle.train(plan, stages, Text(CONTEXT), loss, make_optimizer, steps=steps, samples=4, out=out, watch=show)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Train a small Hugging Face model on bytes of text, with dead workers.")
    parser.add_argument("--model", choices=MODELS, default="gpt2", help="what is trained (default: %(default)s)")
    parser.add_argument("--dead", default="W1_1", metavar="WORKERS", help="who is dead, such as W1_1,W0_2 (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="how many steps (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="record the run there; the trained model goes to FOLDER/hugging_face"
    )
    given = parser.parse_args(arguments)
    if given.steps < 1:
        parser.error(f"--steps is {given.steps}, but it must be at least 1")
    model = MODELS[given.model]()
    stages = make_stages(model)
    print(
        f"{type(model).__name__} of {model.num_parameters():,} parameters in {len(stages)} stages, {given.dead or 'nobody'} dead"
    )
    try:
        trained = train(stages, given.dead, given.steps, given.out)
    except recycle.UserError as problem:
        parser.error(str(problem))
    print(f"loss {trained.losses[0]:.4f} at first, {trained.losses[-1]:.4f} at last\nweights sha256 {trained.weights_sha256}")
    if given.out is not None:
        recycle.load(stages, given.out)
        model.save_pretrained(given.out / "hugging_face")
        print(f"written {given.out / 'hugging_face'}")
    return 0


if __name__ == "__main__":  # the recycle command and the agents import this file for its function job
    raise SystemExit(main())
