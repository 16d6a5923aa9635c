"""Handwritten digits in plain PyTorch: `python plain_pytorch.py`."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS = 5

torch.manual_seed(0)
pixels, classes = load_digits(return_X_y=True)
images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
train, test = random_split(TensorDataset(images, torch.tensor(classes)), [0.8, 0.2])  # shuffles, once
batches = DataLoader(train, batch_size=64)

model = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Linear(1024, 128), nn.ReLU()),
    nn.Linear(128, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = CosineAnnealingLR(optimizer, T_max=EPOCHS * len(batches))

for epoch in range(EPOCHS):
    model.train()
    total = 0.0
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.item() * len(targets)

    model.eval()
    with torch.no_grad():
        right = sum((model(inputs).argmax(1) == targets).sum() for inputs, targets in DataLoader(test, 64))
    print(f"epoch {epoch}: loss {total / len(train):.4f}, accuracy {right / len(test):.4f}")

torch.save(model.state_dict(), "digits.pt")
