"""Under mpirun: split stages over ranks, experts or weights, and compare with one process, in float64.

Usage: splitting.py MODEL NUM_UPDATES PLAN... with a model of MODELS and plans such as 2, 1-2 or 1t2-1t2. A
stage that has replicas splits its experts, if the model has some. In 2w-2 those of the first stage are whole;
in 2t4 a replica has four shards; in 2z1 replicas shard the rest of the update; in 2r ranks are in reverse.
--schedules A,B tries these only, with Adam. With --resume FOLDER each plan resumes from the one before;
--lazily makes models of functions and on the meta device; --precision compares with a stage that is not
split, where one replica has all microbatches.
"""

import contextlib
import copy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

from hybridpipe import Checkpointing, Plan, StageSpec, Trainer
from hybridpipe.callbacks import EMA
from hybridpipe.checkpoint.saved_model import SavedModel, find_checkpoint
from hybridpipe.comm.mpi import MPI
from hybridpipe.model.layers import layers_of
from hybridpipe.model.tensor_plan import called_whole
from tests import blocks
from tests.mixtures import (
    EXPERTS,
    PLAN,
    PLAN_OF_RECORDED,
    Recorded,
    mixtures,
    of_classes,
    points_of,
)
from tests.mpi.programs.exactness import OPTIMIZERS, compare

MINIBATCH, MICROBATCH, SAMPLES, SEED = 12, 2, 41, 7  # the last minibatch has 5 samples
TOKENS, CLIP, DECAY = 50, 0.5, 0.9
SCHEDULES = {"1f1b": {}, "gpipe": {}, "zero-bubble": {}, "recompute": {"recompute": True}}


EAGER = {"experts_implementation": "eager", "use_cache": False}  # grouped products have no float64


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3, "vocab_size": TOKENS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    of_experts = {"num_local_experts": EXPERTS, **EAGER}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, **of_experts))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "moe_intermediate_size": 12, "num_hidden_layers": 3, "vocab_size": TOKENS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 16}
    of_experts = {"num_experts": EXPERTS, "num_experts_per_tok": 2, **EAGER}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **of_experts))


def of_tokens(outputs, targets):
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


@cache
def tokens() -> torch.utils.data.Dataset:
    rows = torch.randint(0, TOKENS, (SAMPLES, 6), generator=torch.Generator().manual_seed(2))
    return [({"input_ids": each[:-1]}, each[1:]) for each in rows]


@cache
def points() -> torch.utils.data.Dataset:
    return torch.utils.data.TensorDataset(*points_of(SAMPLES))


OF_HEADS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": TOKENS + 2}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 16, "head_dim": 4}


def llama(**options) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**OF_HEADS, **HEADS, use_cache=False, attention_bias=True, **options))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True, pad_token_id=1)


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**OF_HEADS, **HEADS, use_cache=False))


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**OF_HEADS, **HEADS, use_cache=False))


class Case(NamedTuple):
    """A model to train; its own configuration names what is split, or `expert_plan` and `tensor_plan` do."""

    make: Any
    loss: Any
    expert_plan: tuple[tuple[str, str], ...] = ()
    tensor_plan: tuple[tuple[str, str], ...] = ()
    has_experts: bool = True

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return self.make().double()

    def data(self) -> torch.utils.data.Dataset:
        return tokens() if self.loss is of_tokens else points()

    def data32(self) -> torch.utils.data.Dataset:
        if self.loss is of_tokens:
            return tokens()
        return torch.utils.data.TensorDataset(points()[:][0].float(), points()[:][1])

    def batch(self, start: int, size: int) -> Any:
        samples = [self.data()[i] for i in range(start, min(start + size, SAMPLES))]
        return torch.utils.data.default_collate(samples)

    def loss_of(self, model: nn.Module, inputs: Any, targets: Any) -> torch.Tensor:
        return self.loss(model(**inputs) if isinstance(inputs, dict) else model(inputs), targets)


MODELS = {
    "sequential": Case(mixtures, of_classes, PLAN),
    "recorded": Case(lambda: Recorded(mixtures()), of_classes, PLAN_OF_RECORDED),
    "mixtral": Case(mixtral, of_tokens),
    "qwen3_moe": Case(qwen3_moe, of_tokens),
    "blocks": Case(blocks.blocks, of_classes, (), blocks.PLAN, has_experts=False),
    "recorded_blocks": Case(blocks.Blocks, of_classes, (), blocks.PLAN_OF_RECORDED, has_experts=False),
    "llama": Case(llama, of_tokens, has_experts=False),
    "tied_llama": Case(tied_llama, of_tokens, has_experts=False),
    "qwen3": Case(qwen3, of_tokens, has_experts=False),
    "mistral": Case(mistral, of_tokens, has_experts=False),
}


def reference(case: Case, optimizer_factory, epochs: int, averages: dict[str, torch.Tensor] | None = None):
    """One process, microbatch by microbatch; its weights' averages as `callbacks.EMA` keeps them."""
    model, losses = case.model(), []
    optimizer = optimizer_factory(model.parameters())
    for start in [*range(0, SAMPLES, MINIBATCH)] * epochs:
        count, total = min(MINIBATCH, SAMPLES - start), 0.0
        for first in range(start, start + count, MICROBATCH):
            size = min(MICROBATCH, start + count - first)
            loss = case.loss_of(model, *case.batch(first, size)) * (size / count)
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        for key, parameter in model.named_parameters() if averages is not None else ():
            now = parameter.detach().clone()
            averages[key] = averages[key].lerp(now, 1 - DECAY) if key in averages else now
    model.eval()
    with torch.no_grad():
        return model.state_dict(), losses, case.loss_of(model, *case.batch(0, SAMPLES)).item()


def make_plan(name: str, case: Case, schedule: str, **options) -> Plan:
    inputs, targets = case.batch(0, MICROBATCH)
    model = case.model()
    closed = called_whole(model, dict(case.tensor_plan)) if case.tensor_plan else ()
    num_layers = layers_of(model, inputs, case.loss, targets, closed=closed).num_layers
    stages = name.split("-")
    cuts = [round(s * num_layers / len(stages)) for s in range(len(stages) + 1)]
    if case.has_experts and case.loss is of_classes and len(stages) == 2:  # a mixture in each
        cuts[1:-1] = (3,) if num_layers == 6 else (2,)
    made = [stage_of(each, a, b, case) for a, b, each in zip(cuts, cuts[1:], stages, strict=False)]
    if "r" in name:
        ranks = iter(range(sum(stage.num_ranks for stage in made))[::-1])
        made = [replace(stage, ranks=tuple(islice(ranks, stage.num_ranks))) for stage in made]
    return Plan(
        tuple(made),
        schedule=schedule,
        num_microbatches=MINIBATCH // MICROBATCH,
        **options,
    )


def stage_of(name: str, start: int, stop: int, case: Case) -> StageSpec:
    replicas, shards = int(name[0]), int(name[2]) if name[1:2] == "t" else 1
    zero = 1 if "z1" in name and replicas > 1 else 0
    experts = case.has_experts and shards == 1 and "w" not in name
    return StageSpec(start, stop, replicas, zero=zero, experts=experts, tensor=shards)


def make_trainer(
    case: Case, plan: Plan, optimizer: str, model=None, minibatch_size: int = MINIBATCH, **options
) -> Trainer:
    return Trainer(
        case.model() if model is None else model,
        loss=case.loss,
        optimizer=OPTIMIZERS[optimizer],
        plan=plan,
        minibatch_size=minibatch_size,
        seed=SEED,
        clip_grad_norm=CLIP,
        expert_plan=dict(case.expert_plan) or None,
        tensor_plan=dict(case.tensor_plan) or None,
        verbose=False,
        **options,
    )


def check(case: Case, plan: Plan, name: str, expected, epochs: int) -> None:
    losses: list[float] = []
    state, expected_losses, loss_after = expected
    with contextlib.closing(make_trainer(case, plan, name)) as trainer:
        trainer.fit(case.data(), epochs, shuffle=False, on_minibatch=lambda done: losses.append(done.loss))
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=1e-10)
        own = trainer.full_state_dict()
        if own is not None:
            what = f"{plan.name} {plan.schedule} {name}"
            print(f"{what}: parameters within {compare(own, state):.1e}", flush=True)
        after = trainer.evaluate(case.data())["loss"]
        assert abs(after - loss_after) < 1e-10, (after, loss_after)
        assert own is None or list(own) == list(state)


def check_resumed(case: Case, folder: Path, plans: Sequence[str]) -> None:
    """Train an epoch under each plan, each from the checkpoint of the one before."""
    averages: dict[str, torch.Tensor] = {}
    expected, *_ = reference(case, OPTIMIZERS["adam"], len(plans), averages)
    before: dict[str, torch.Tensor] | None = None
    for number, name in enumerate(plans):
        plan = make_plan(name, case, "1f1b")
        with contextlib.closing(make_trainer(case, plan, "adam", callbacks=[EMA(decay=DECAY)])) as trainer:
            if number:
                trainer.resume(folder)
                trainer.prepare(case.data())
                now = trainer.full_state_dict()
                assert now is None or all(torch.equal(now[key], before[key]) for key in before), name
            trainer.fit(case.data(), shuffle=False, checkpoint=Checkpointing(folder))
            before = trainer.full_state_dict()
            if before is not None:
                saved = SavedModel(find_checkpoint(folder)[0])
                assert list(saved.forms) == list(before)
                assert all(torch.equal(saved.read(key), before[key]) for key in before), name
                print(f"{name}: resumed and saved", flush=True)
    if before is not None:
        saved = SavedModel(find_checkpoint(folder)[0], averages=True)
        of_averages = compare({key: saved.read(key) for key in averages}, averages)
        print(f"parameters within {compare(before, expected):.1e}, averages within {of_averages:.1e}")


def check_lazily(case: Case, plans: Sequence[str]) -> None:
    """Let each rank make only its part of the weights: bit-equal to the model that is made at once."""
    whole = case.model()
    for name in plans:
        plan = make_plan(name, case, "1f1b")
        with torch.device("meta"):
            on_meta = case.model()
        for what, model in (("function", case.model), ("meta", on_meta)):
            with contextlib.closing(make_trainer(case, plan, "sgd", model=model)) as trainer:
                if what == "meta":
                    trainer.resume(weights_of(whole))
                trainer.prepare(case.data())
                state = trainer.full_state_dict()
                if state is not None:
                    assert all(torch.equal(state[key], each) for key, each in whole.state_dict().items())
                    print(f"{name}: equal to the bit, from a {what}", flush=True)
                for path, module in trainer.model.named_modules():
                    if path.endswith(".experts") and trainer.worker.parts:
                        check_parts(module, trainer)
                trainer.fit(case.data(), shuffle=False)


def check_parts(module: nn.Module, trainer: Trainer) -> None:
    """Check that a rank has its part of a module's experts, or nothing of them."""
    counts = {len(each) for each in module.parameters()}
    replicas = trainer.plan.replicas[trainer.worker.place.stage] if trainer.worker.place else 1
    assert counts <= {EXPERTS, EXPERTS // replicas}, counts
    held = {each.is_meta for each in module.parameters()}
    assert held == {counts == {EXPERTS}} or replicas == 1, (held, counts)


def weights_of(model: nn.Module) -> Path:
    """Save a model's weights for all ranks."""
    path = Path(MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if MPI.COMM_WORLD.rank == 0 else None))
    if MPI.COMM_WORLD.rank == 0:
        save_file(model.state_dict(), path / "model.safetensors")
    MPI.COMM_WORLD.barrier()
    return path / "model.safetensors"


def check_moved(own, other, start) -> None:
    """Check that weights have moved alike: a token whose expert is another by rounding matters little."""
    for key, begin in start.items():
        apart, moved = ((own[key] - each).norm().item() for each in (other[key], begin))
        assert apart < 0.3 * moved, (key, apart, moved)


def check_precision(case: Case, plans: Sequence[str]) -> None:
    """Compare a training in 16 bits with one that is not split; one replica joins in each minibatch."""
    pairs = [*product(("bf16", "fp16"), ["1f1b"]), *product(["bf16-params"], ["1f1b", "zero-bubble"])]
    for (precision, schedule), name in product(pairs, plans):
        found = []
        for each in (name, name.replace("t2", "") if "t" in name else name.replace("2", "2w")):
            plan = replace(make_plan(each, case, schedule), num_microbatches=1)
            given = {"model": case.model().float(), "precision": precision, "minibatch_size": MICROBATCH}
            with contextlib.closing(make_trainer(case, plan, "sgd", **given)) as trainer:
                trainer.fit(case.data32(), shuffle=False)
                found.append(trainer.full_state_dict())
        if MPI.COMM_WORLD.rank == 0:
            check_moved(*found, case.model().float().state_dict())
            print(f"{name} {precision} {schedule}: as without a split", flush=True)


def main() -> None:
    case = MODELS[sys.argv[2]] if sys.argv[1] in ("--lazily", "--precision") else None
    if case is not None:
        {"--lazily": check_lazily, "--precision": check_precision}[sys.argv[1]](case, sys.argv[3:])
        return
    schedules, optimizers = SCHEDULES, OPTIMIZERS
    if sys.argv[1] == "--schedules":
        schedules = {each: SCHEDULES[each] for each in sys.argv.pop(2).split(",")}
        optimizers = {"adam": OPTIMIZERS["adam"]}
        del sys.argv[1]
    if sys.argv[1] == "--resume":
        check_resumed(MODELS[sys.argv[3]], Path(sys.argv[2]), sys.argv[4:])
        return
    model, updates, *plans = sys.argv[1:]
    case, epochs = MODELS[model], int(updates) // -(-SAMPLES // MINIBATCH)
    for name, factory in optimizers.items():
        expected = reference(case, copy.deepcopy(factory), epochs)
        for plan in plans:
            for schedule, options in schedules.items():
                schedule = "1f1b" if schedule == "recompute" else schedule
                check(case, make_plan(plan, case, schedule, **options), name, expected, epochs)


if __name__ == "__main__":
    main()
