"""GPT-2 of Hugging Face, as it is, on the characters of a text: `mpirun -n 2 python gpt2.py [FOLDER]`.

The text is Shakespeare's works where they were fetched (the head of text.py says how), else this repository's
documents. Weights are random; pretrained ones are loaded before training, as in any script.
"""

import sys

import torch
from text import VOCABULARY, character_loss, characters, text_folder

import hybridpipe

try:
    from transformers import GPT2Config, GPT2LMHeadModel
except ImportError as error:
    sys.exit(f"gpt2.py needs transformers: pip install transformers ({error})")


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


def optimizer(named_parameters):
    """Make AdamW for a stage's parameters: biases and norms do not decay."""
    of_decay = {0.1: [], 0.0: []}
    for name, parameter in named_parameters:
        of_decay[0.0 if name.endswith("bias") or ".ln_" in name else 0.1].append(parameter)
    groups = [{"params": parameters, "weight_decay": decay} for decay, parameters in of_decay.items()]
    return torch.optim.AdamW(groups, lr=0.001)


if __name__ == "__main__":
    folder = text_folder(*sys.argv[1:])
    train, held_out = characters(folder, limit=1024), characters(folder, train=False, limit=256)
    torch.manual_seed(0)
    trainer = hybridpipe.Trainer(
        model(),
        loss=loss(),
        optimizer=optimizer,
        plan="auto",
        minibatch_size=32,
        clip_grad_norm=1.0,
    )
    if trainer.world.rank == 0:
        print(f"training on {folder}")
    trainer.fit(train, epochs=2, validation=held_out)
    trainer.close()
