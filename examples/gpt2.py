"""GPT-2 of Hugging Face on the characters of Shakespeare's works, as it is: `mpirun -n 2 python gpt2.py`.

Weights are random. Pretrained ones are loaded before training, as in any script.
"""

import sys
from functools import partial

import torch
from text import VOCABULARY, character_loss, characters

import hybridpipe

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as error:
    sys.exit(f"gpt2.py needs transformers: pip install 'hybridpipe[examples]' ({error})")


def model(n_layer: int = 4, n_embd: int = 128, n_head: int = 4, n_positions: int = 64) -> GPT2LMHeadModel:
    """Build a small GPT-2: int64 characters (B, T ≤ n_positions) → an output with logits (B, T, 96).

    The head is the embedding. A cache of keys and values serves generation only.
    """
    sizes = {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_head, "n_positions": n_positions}
    no_words = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
    return GPT2LMHeadModel(GPT2Config(use_cache=False, **no_words, **sizes))


def loss():
    """Return the loss: mean cross-entropy (in nats) of the output's logits for the next characters (B, T)."""
    of_logits = character_loss()
    return lambda outputs, targets: of_logits(outputs.logits, targets)


if __name__ == "__main__":
    texts = {"root": sys.argv[1]} if len(sys.argv) > 1 else {}
    torch.manual_seed(0)
    trainer = hybridpipe.Trainer(
        model(),
        loss=loss(),
        optimizer=partial(torch.optim.AdamW, lr=0.001),
        plan="auto",
        minibatch_size=32,
        clip_grad_norm=1.0,
    )
    train, held_out = characters(limit=1024, **texts), characters(train=False, limit=256, **texts)
    for epoch in trainer.fit(train, epochs=2, validation=held_out):
        if trainer.world.rank == 0:
            print(f"epoch {epoch['epoch']}: loss {epoch['loss']:.3f}, held out {epoch['validation']}")
    trainer.close()
