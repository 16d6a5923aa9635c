"""A recommender with sparse embeddings learns which links are clicked: `mpirun -n 2 python dlrm.py`.

The clicks are made up, in the form of Criteo's: 13 numbers and 26 categories each. A minibatch names few of
the rows of a large table, so the tables' gradients are sparse: rows that were not named are not updated.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import hybridpipe

NUMBERS, TABLES = 13, 26
ROWS = [int(10 ** (1 + i / 10)) for i in range(TABLES)]  # of each table, 10 to 3162


class DLRM(nn.Module):
    """Naumov et al. 2019: numbers (B, 13) and categories (B, 26) → the logit of a click (B,)."""

    def __init__(self, width: int = 16, sparse: bool = True) -> None:
        super().__init__()
        pairs = (TABLES + 1) * TABLES // 2
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 64), nn.ReLU(), nn.Linear(64, width), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for rows in ROWS)
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Linear(64, 1))
        for table in self.tables:
            nn.init.uniform_(table.weight, -(table.num_embeddings**-0.5), table.num_embeddings**-0.5)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        x = self.bottom(numbers)
        columns = categories.split(1, dim=1)  # a bag may hold several; each of these holds one
        vectors = torch.stack([x, *(table(c) for table, c in zip(self.tables, columns))], dim=1)
        i, j = torch.tril_indices(TABLES + 1, TABLES + 1, offset=-1)
        products = (vectors @ vectors.mT)[:, i, j]  # of each pair of vectors
        return self.top(torch.cat([x, products], dim=1)).squeeze(1)


class Clicks(Dataset[tuple[tuple[Tensor, Tensor], Tensor]]):
    """Made-up clicks: ((numbers (13,), categories (26,)), 1.0 or 0.0), the same on every rank."""

    def __init__(self, train: bool = True, limit: int = 16384) -> None:
        tastes = torch.Generator().manual_seed(0)  # the same for both sets
        of_numbers = 0.3 * torch.randn(NUMBERS, generator=tastes)
        of_categories = [0.7 * torch.randn(rows, generator=tastes) for rows in ROWS]

        draws = torch.Generator().manual_seed(1 if train else 2)
        self.numbers = torch.randn(limit, NUMBERS, generator=draws)
        popular = torch.rand(limit, TABLES, generator=draws) ** 4  # few categories make up most of the visits
        self.categories = (popular * torch.tensor(ROWS)).long()
        logits = self.numbers @ of_numbers - 1
        for taste, column in zip(of_categories, self.categories.T):
            logits += taste[column]
        self.clicks = (torch.rand(limit, generator=draws) < logits.sigmoid()).float()

    def __len__(self) -> int:
        return len(self.clicks)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        return (self.numbers[index], self.categories[index]), self.clicks[index]


def right(logits: Tensor, clicks: Tensor) -> tuple[Tensor, int]:
    """Return the number of right answers, and of answers: hybridpipe adds up both, over all microbatches."""
    return ((logits > 0) == (clicks > 0)).sum(), len(clicks)


def auc(logits: Tensor, clicks: Tensor) -> float:
    """Return the probability that a click has a larger logit than what was not clicked; a guess has 0.5."""
    order = clicks[logits.argsort()]
    clicked = order.sum()
    below = (1 - order).cumsum(0)  # how many without a click lie below each
    return ((order * below).sum() / (clicked * (len(order) - clicked))).item()


if __name__ == "__main__":
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch's default, of which it warns unless told
    torch.manual_seed(0)
    trainer = hybridpipe.Trainer(
        DLRM(),
        loss=F.binary_cross_entropy_with_logits,
        optimizer=partial(torch.optim.Adagrad, lr=0.03),  # as SGD, it takes sparse gradients and dense ones
        plan="auto",
        minibatch_size=128,
        metrics={"accuracy": right},
    )
    held_out = Clicks(train=False, limit=4096)
    trainer.fit(Clicks(), validation=held_out)  # one epoch: rare categories are soon known by heart
    logits = trainer.predict(held_out)  # on rank 0
    if logits is not None:
        accuracy = trainer.history[-1]["validation"]["accuracy"]
        guess = 1 - held_out.clicks.mean().item()
        print(f"accuracy {accuracy:.3f} (a guess: {guess:.3f}), AUC {auc(logits, held_out.clicks):.3f}")
    trainer.close()
