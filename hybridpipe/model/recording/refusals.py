"""Refusals: why a forward cannot be run in slices, and what to do instead, in one line.

Knows names and lines only. Invariant: the line begins with that of the user's code where there is one, and a
remedy stands at its end, in brackets.
"""

from hybridpipe.model.recording.events import CallsBackward, SetsWeights, Unsplittable

PICKS = ("__getitem__", "nonzero", "masked_select", "argwhere", "unique")  # whose shapes follow from data


def reads_data(where: str, name: str) -> Unsplittable:
    """Return the refusal of glue from whose data Python would learn something."""
    remedy = "multiply by a mask" if name in PICKS else "keep it a tensor, as torch.where does"
    what = f"{name} reads data that only one stage has"
    return Unsplittable(f"{where}: {what} ({remedy}, or do it inside a module)")


def hides_tensors(what: str, kind: str) -> Unsplittable:
    """Return the refusal of an object of this kind, which is no pytree, with tensors inside."""
    remedy = "pass use_cache=False" if kind.endswith("Cache") else "use a tuple, a dict or a list"
    return Unsplittable(f"{what} holds tensors in a {kind}, which is no pytree ({remedy})")


def random_path(told: str) -> Unsplittable:
    """Return the refusal of random numbers that decide over the path; `told` says which guard differs."""
    what = "random numbers decide which way the forward takes"
    return Unsplittable(f"{told}: {what} (draw them inside a module)")


def hooked_and_opened(path: str, kind: str) -> Unsplittable:
    """Return the refusal of hooks on a module that is not called whole."""
    where = path or "the model"
    return Unsplittable(
        f"{where} ({kind}) has hooks, which would run at the recording only (register them on its children)"
    )


def calls_backward(where: str) -> CallsBackward:
    """Return the refusal of gradients that a forward adds by itself."""
    remedy = "use torch.autograd.grad, or return that loss and add it in the loss function"
    return CallsBackward(f"{where}: backward in the forward ({remedy})")


def changes_weight(where: str, name: str) -> SetsWeights:
    """Return the refusal of other memory, or another flag, for a tensor of the model."""
    return SetsWeights(f"{where}: {name}, on a parameter or buffer (write in place, as copy_ does)")


def writes_weight(told: str) -> Unsplittable:
    """Return the refusal of a forward that writes to parameters, under a plan that would reorder it."""
    remedy = "use plan='dp' with schedule = '1f1b' and without recompute"
    return Unsplittable(f"{told} ({remedy})")


def left_earlier(where: str, taker: str, maker: str) -> Unsplittable:
    """Return the refusal of a tensor that goes from one call of the forward to the next."""
    what = f"{taker} uses a tensor that {maker} has left in an earlier call"
    return Unsplittable(f"{where}: {what} (pass it, or keep it in one module)")
