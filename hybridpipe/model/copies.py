"""Copies: copies of a model for measurements, which change buffers and leave gradients.

Knows modules only. Invariant: the model itself stays as it is.
"""

import copy

from torch import nn

from hybridpipe.errors import UserError


def copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model without gradients, for measurements.

    Raises:
        UserError: a layer cannot be copied; names the layer.
    """
    try:
        copy_of = copy.deepcopy(model)
    except Exception as error:  # whatever a layer's own attributes raise
        raise UserError(f"{_not_copied(model, error)}; give a plan, which needs no measuring") from error
    for parameter in copy_of.parameters():
        if not parameter.is_leaf:  # of TorchScript, whose copies follow from the originals
            parameter.detach_().requires_grad_()
    copy_of.zero_grad(set_to_none=True)
    return copy_of


def _not_copied(model: nn.Module, error: Exception) -> str:
    """Return a message with the first layer that cannot be copied, and its error."""
    for name, layer in model.named_children():
        try:
            copy.deepcopy(layer)
        except Exception as refused:
            what = f"layer {name} ({type(layer).__name__})"
            return f"the model is measured on a copy, and {what} cannot be copied: {refused}"
    return f"the model is measured on a copy, and cannot be copied: {error}"
