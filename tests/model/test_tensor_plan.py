"""Which modules shards may have in parts, which stages split them, and what a rank keeps of them."""

import pytest
import torch
from torch import nn

from hybridpipe.model.deferred_init.deferred import build
from hybridpipe.model.held_part import HeldPart, held_part, whole_forms
from hybridpipe.model.holding import hold
from hybridpipe.model.layers import layers_of
from hybridpipe.model.tensor_plan import called_whole, parts_by, split_modules_of
from hybridpipe.planning.plan import Plan, StageSpec
from tests.blocks import PLAN_OF_RECORDED, WIDTH, Blocks
from tests.libraries import skip_without_transformers
from tests.mixtures import of_classes, points_of

GIVEN = dict(PLAN_OF_RECORDED)


def plan_of(*tensor: int, num_layers: int = 2) -> Plan:
    """One stage a layer, each with so many shards."""
    return Plan(tuple(StageSpec(s, s + 1, tensor=count) for s, count in enumerate(tensor)))


def holders(model: nn.Module, stage_of=lambda key: 0) -> dict[str, tuple[int, ...]]:
    return {key: (stage_of(key),) for key in model.state_dict()}


def refused(model: nn.Module, plan) -> str:
    with pytest.raises(ValueError) as raised:
        split_modules_of(model, plan)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_a_plan_names_modules_by_patterns():
    found = split_modules_of(Blocks(), GIVEN)
    assert len(found) == 3 * 5 + 1
    assert [(each.path, each.style, each.around) for each in found[:3]] == [
        ("blocks.0.up", "colwise", "blocks.0"),
        ("blocks.0.down", "rowwise", "blocks.0"),
        ("blocks.0.gates", "packed_colwise", "blocks.0"),
    ]
    assert (found[-1].path, found[-1].around) == ("end", "end")
    assert split_modules_of(Blocks()) == []


@pytest.mark.parametrize(
    "plan, message",
    [
        ({"blocks.*.up": "sequence_parallel"}, "tensor plan: 'blocks.*.up': style must be one of colwise, "),
        (
            {"blocks.*.lift": "colwise"},
            "tensor plan: 'blocks.*.lift' must name a module",
        ),
        (
            {"blocks.*.norm": "colwise"},
            "blocks.0.norm must be an nn.Linear, got LayerNorm: give",
        ),
        ({"start": "embedding_rowwise"}, "start must be an nn.Embedding, got Linear"),
    ],
)
def test_what_a_plan_cannot_mean_is_refused(plan, message):
    assert message in refused(Blocks(), plan)


def test_a_hook_on_a_weight_is_refused():
    model = Blocks()
    model.end.weight.register_hook(print)
    assert "end.weight must have no hooks: register them later" in refused(model, GIVEN)


@pytest.mark.parametrize("name, value", [("sparse", True), ("max_norm", 1.0), ("scale_grad_by_freq", True)])
def test_an_embedding_that_sees_all_entries_is_refused(name, value):
    told = refused(nn.Sequential(nn.Embedding(4, 2, **{name: value})), {"0": "embedding_rowwise"})
    assert "0 must have no sparse, max_norm or scale_grad_by_freq" in told


def test_a_weight_that_is_computed_is_refused():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)))
    assert "0 must have its weight as a parameter" in refused(model, {"0": "colwise_gather_output"})


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8, bias=False))
    model[1].weight = model[0].weight
    return model


def test_a_tied_weight_is_cut_alike_in_both_places():
    plan = {"0": "embedding_rowwise", "1": "colwise_gather_output"}
    model, part = tied(), HeldPart(torch.Size([8, WIDTH]), "shard", 0, 2)
    parts = parts_by(model, plan_of(2), split_modules_of(model, plan), holders(model))
    assert parts == {"0.weight": part, "1.weight": part}
    whole = model[0].weight.detach().clone()
    hold(model, {key: each.all_parts[1] for key, each in parts.items()}, None)
    assert model[0].weight is model[1].weight and torch.equal(model[0].weight, whole[4:])
    for other in ({"0": "embedding_rowwise"}, plan | {"1": "rowwise_split_input"}):
        assert "what is one tensor must be cut alike in all its places" in refused(tied(), other)


def test_stages_that_share_a_weight_have_as_many_shards():
    model = tied()
    modules = split_modules_of(model, {"0": "embedding_rowwise", "1": "colwise_gather_output"})
    both = {"0.weight": (0, 1), "1.weight": (0, 1)}
    assert len(parts_by(model, plan_of(2, 2), modules, both)) == 2
    with pytest.raises(ValueError, match=r"stages\[0\].tensor must be the same in all stages that hold"):
        parts_by(model, plan_of(2, 1), modules, both)


def test_stages_split_what_they_hold():
    model = Blocks()
    modules = split_modules_of(model, GIVEN)
    held = holders(model, lambda key: int(key.startswith(("blocks.1", "blocks.2"))))
    parts = parts_by(model, plan_of(1, 2), modules, held)
    assert parts["blocks.1.up.weight"] == HeldPart(torch.Size([16, WIDTH]), "shard", 0, 2)
    assert parts["blocks.2.down.weight"] == HeldPart(torch.Size([WIDTH, 16]), "shard", 0, 2, dim=1)
    assert parts["blocks.2.gates.bias"] == HeldPart(torch.Size([16]), "shard", 0, 2, packs=2)
    assert "blocks.1.down.bias" not in parts and "blocks.0.up.weight" not in parts
    with pytest.raises(ValueError, match=r"stages\[0\].tensor must be 1, as the tensor plan names nothing"):
        parts_by(model, plan_of(2, 2), modules, holders(model, lambda key: 1))
    with pytest.raises(ValueError, match=r"got 2: the model has none \(tensor_plan names modules"):
        parts_by(model, plan_of(2), [], holders(model))


@pytest.mark.parametrize(
    "count, message",
    [
        (3, r"stages\[0\].tensor must divide the 16 of blocks.0.up.weight, got 3"),
        (
            16,
            r"tensor must divide each of the 2 parts of the 16 of blocks.0.gates.weight, got 16",
        ),
    ],
)
def test_shards_divide_weights(count, message):
    model = Blocks()
    with pytest.raises(ValueError, match=message):
        parts_by(model, plan_of(count), split_modules_of(model, GIVEN), holders(model))


def test_shards_divide_heads():
    class Attention(nn.Module):
        head_dim = 4

        def __init__(self):
            super().__init__()
            self.q, self.k, self.out = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(16, 8)

    model = nn.Sequential(Attention())
    modules = split_modules_of(model, {"0.q": "colwise", "0.k": "colwise", "0.out": "rowwise"})
    assert len(parts_by(model, plan_of(2), modules, holders(model))) == 5
    with pytest.raises(ValueError, match=r"stages\[0\].tensor must divide the 2 heads of 0.k, got 4"):
        parts_by(model, plan_of(4), modules, holders(model))


def test_a_rank_makes_its_part_only():
    """On the meta device one parameter at a time is whole."""
    torch.manual_seed(3)
    whole = Blocks()
    torch.manual_seed(3)
    made = build(Blocks)
    model, numbers = made.model, made.numbers
    parts = parts_by(model, plan_of(2), split_modules_of(model, GIVEN), holders(model))
    before = {key: tensor.shape for key, tensor in model.state_dict().items()}
    hold(model, {key: part.all_parts[1] for key, part in parts.items()}, numbers)
    for key, parameter in model.named_parameters():
        part = held_part(parameter)
        assert parameter.is_meta == (key not in parts)
        assert part is None or torch.equal(parameter, part.of(whole.get_parameter(key)))
    assert {key: form.shape for key, form in whole_forms(model).items()} == before


def test_a_module_whose_parts_are_split_stays_one_layer():
    """It was opened for its size, and a cut between columns and rows would have sent parts of values."""
    inputs, targets = points_of(2)
    model = Blocks().double()
    each = ((), called_whole(model, GIVEN))
    made = [layers_of(model, inputs, of_classes, targets, closed=closed) for closed in each]
    assert "blocks.0.up" in made[0].names
    assert made[1].names == ["start", "blocks.0", "blocks.1", "blocks.2", "end"]


def test_models_of_transformers_say_themselves_what_is_split():
    skip_without_transformers()
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "vocab_size": 10}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    around = {"model.embed_tokens", "model.layers.0.self_attn", "model.layers.0.mlp", "lm_head"}
    assert called_whole(llama) == around
    assert called_whole(nn.ModuleDict({"inner": llama})) == {f"inner.{path}" for path in around}
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=2))
    assert "in the model's own plan: give another one as tensor_plan" in refused(mixtral, None)
