"""Inspect: the command that says what is made of a config's model. It measures nothing.

Knows the config and the report; no MPI. Invariant: the model is that of the training, recorded on the first
microbatch of its data.
"""

import json
from dataclasses import asdict

from hybridpipe.cli.data import data_of, first_microbatch
from hybridpipe.cli.profile import build_model
from hybridpipe.config.file import Config
from hybridpipe.model.explanation import ModelExplanation
from hybridpipe.model.layers import explain, layers_of
from hybridpipe.model.precision import Precision
from hybridpipe.model.tensor_plan import called_whole
from hybridpipe.report.model import model_text


def inspect_model(config: Config) -> ModelExplanation:
    """Return what is made of the config's model.

    Raises:
        UserError: the model is no `nn.Module`, or the data are missing or refused.
    """
    model, loss = build_model(config), config.loss.build()
    inputs, targets = first_microbatch(config, data_of(config))
    given = config.plan.tensor_plan
    closed = () if given is None else called_whole(model, given)
    return explain(layers_of(model, inputs, loss, targets, Precision(config.train.precision), closed))


def text_of(found: ModelExplanation, as_json: bool) -> str:
    """Return an explanation as text for people, or as JSON."""
    return json.dumps(asdict(found)) if as_json else model_text(found)
