import torch
from torch import nn
from torch.nn import functional as F

from hybridpipe.model.recording import record

from .slicing import cut_places, difference, in_slices, own_forward


class Residual(nn.Module):
    """Blocks in a list, glue between them, a mask that follows from the inputs."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter = nn.Linear(20, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, 5)

    def forward(self, x, mask):
        keep = mask[:, None].to(x.dtype) * 0.5 + 0.5
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x) * keep
        return {"logits": self.head(x)}


def test_slices_do_what_the_forward_does():
    torch.manual_seed(0)
    model = Residual().double()
    inputs = {"x": torch.randn(8, 20, dtype=torch.float64), "mask": torch.arange(8) % 3 > 0}
    targets = torch.randint(5, (8,))

    def loss(out):
        return F.cross_entropy(out["logits"], targets)

    made = record(model, inputs, training=True)
    cuts = cut_places(made)
    assert [layer.name for layer in made.layers] == ["enter", *(f"blocks.{i}.0" for i in range(3)), "head"]
    expected = own_forward(model, inputs, loss)
    for chosen in ([], *([cut] for cut in cuts), cuts):
        assert difference(in_slices(made, chosen, model, inputs, loss), expected) is None, chosen
