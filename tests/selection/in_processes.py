"""A layer whose sequence lies on several ranks, in one of the processes of a test."""

import copy

import torch

from sparseflash.selection import Context
from tests.selection.layers import gradients


def part(member, layer, x, pull):
    context = Context(x.shape[1], member.group)
    layer = copy.deepcopy(layer).to(member.device)
    mine = context.part(x.detach()).to(member.device).requires_grad_()
    out = layer(mine, context=context)
    loss = getattr(layer, "loss", None)
    found = gradients(layer, mine, out, loss, context.part(pull).to(member.device))
    return out.detach().cpu(), None if loss is None else loss.detach().cpu(), {k: v.cpu() for k, v in found.items()}


def refused(member, layer, x, more):
    context = Context(x.shape[1], member.group)
    try:
        layer(x if more else x[:, 1:], context=context, **more)
    except ValueError as error:
        return str(error)


def too_few(member):
    try:
        Context(1, member.group)
    except ValueError as error:
        return str(error)


def second_derivative(member, x):
    x = x.unsqueeze(1).to(member.device)
    context = Context(x.shape[2], member.group)
    mine = context.part(x, 2).clone().requires_grad_()
    (found,) = torch.autograd.grad(context.joined(mine).square().sum(), mine, create_graph=True)
    try:  # beside another loss, and with inputs, so that nothing but the refusal tells that a part is missing
        torch.autograd.grad(found.sum() + mine.sum(), mine)
    except NotImplementedError as error:
        return str(error)


def repeats(member, layer, x, pull):
    (out, loss, found), (again, loss_again, found_again) = (part(member, layer, x, pull) for _ in range(2))
    same = torch.equal(out, again) and (loss is None or torch.equal(loss, loss_again))
    return same and all(torch.equal(value, found_again[name]) for name, value in found.items())
