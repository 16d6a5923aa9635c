"""BERT of Hugging Face tells Shakespeare's questions from his other sentences: `mpirun -n 2 python bert.py`.

Sentences differ in length, so a `collate_fn` pads those of a microbatch, and a mask says what is padding.
The head of text.py says how to fetch the texts; `bert.py FOLDER` takes them from elsewhere.
"""

import re
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from text import VOCABULARY, characters, decode, encode
from torch.utils.data import DataLoader

import hybridpipe

try:
    from transformers import BertConfig, BertForSequenceClassification
except ImportError as error:
    sys.exit(f"bert.py needs transformers: pip install transformers ({error})")

LONGEST = 80  # characters


def model(layers: int = 4, width: int = 64, heads: int = 4) -> BertForSequenceClassification:
    """Build a small BERT of two classes over characters."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=LONGEST,
            num_labels=2,
        )
    )


def loss():
    """Return the loss: mean cross-entropy over the sentences."""
    return lambda outputs, is_question: F.cross_entropy(outputs.logits, is_question)


def right(outputs, is_question):
    """Return the number of right answers, and of answers: hybridpipe adds up both, over all microbatches."""
    return (outputs.logits.argmax(1) == is_question).sum(), len(is_question)


def sentences(train: bool = True, limit: int = 2048, **texts) -> list[tuple[torch.Tensor, int]]:
    """Return as many questions (1) as other sentences (0), without their marks, in turns; at most `limit`."""
    text = decode(characters(train=train, **texts).codes.tolist())
    found = re.findall(rf"(?<=[.?!]\s)([A-Z][^.?!]{{8,{LONGEST - 1}}})([.?!])", text)
    questions = [words for words, mark in found if mark == "?"]
    others = [words for words, mark in found if mark != "?"]
    pairs = zip(others, questions, strict=False)
    both = [(words, is_question) for pair in pairs for is_question, words in enumerate(pair)]
    return [(torch.from_numpy(encode(words)).long(), is_question) for words, is_question in both[:limit]]


def collate(samples: list[tuple[torch.Tensor, int]]):
    """Pad a microbatch's sentences to a multiple of 16, as each new shape is recorded once."""
    longest = max(len(words) for words, _ in samples)
    ids = torch.zeros(len(samples), -(-longest // 16) * 16, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (words, _) in enumerate(samples):
        ids[i, : len(words)], mask[i, : len(words)] = words, 1
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([label for _, label in samples])


def loader(batch_size: int = 32, train: bool = True, **options) -> DataLoader:
    """Return the sentences as a DataLoader, whose batch is a minibatch."""
    return DataLoader(sentences(train, **options), batch_size, shuffle=train, collate_fn=collate)


if __name__ == "__main__":
    texts = {"root": Path(sys.argv[1]).resolve()} if len(sys.argv) > 1 else {}
    train, held_out = loader(**texts), loader(train=False, limit=512, **texts)
    torch.manual_seed(0)
    trainer = hybridpipe.Trainer(
        model(),
        loss=loss(),
        optimizer=partial(torch.optim.AdamW, lr=0.001),
        plan="auto",
        minibatch_size=32,
        metrics={"accuracy": right},
    )
    trainer.fit(train, epochs=4, validation=held_out)
    trainer.close()
