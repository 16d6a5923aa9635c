"""Runtime: where bytes move. Communicators, transport, gradients, executor, failure."""
