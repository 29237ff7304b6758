from functools import partial

from experiments.pathx.losses import losses
from experiments.training import steps


def objective_of(config):
    return steps.Objective(lambda batch: batch, partial(losses, config=config), config.clip)


def training_step(model, optimizer, batch, config, lr):
    return steps.Steps(model, optimizer, objective_of(config), next(model.parameters()).device)(batch, lr)


def compute_gradients(model, batch, config):
    return steps.compute_gradients(model, objective_of(config), batch)
