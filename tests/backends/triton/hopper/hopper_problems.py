"""Problems that the Hopper kernels take, their results in our interpreter, and their tolerance."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import torch

from sparseflash.backends.problem import Problem as Asked
from sparseflash.backends.saved import Saved
from sparseflash.backends.triton.hopper import backward as backward_module
from sparseflash.backends.triton.hopper import backward_pass, choices, forward_pass, passes, wide_pass
from sparseflash.backends.triton.hopper import forward as forward_module
from sparseflash.backends.triton.hopper import wide_apart as wide_apart_module
from sparseflash.backends.triton.hopper import wide_dkdv as wide_dkdv_module
from sparseflash.backends.triton.hopper import wide_dq as wide_dq_module
from sparseflash.backends.triton.hopper.configs import HEAD_DIMS, backward_config_for, config_for
from sparseflash.backends.triton.persistent import cuts, plan
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.blockmask.cache import clear_caches
from sparseflash.scores.sink import completed
from sparseflash.testing.comparison import compare_with_draws
from tests.backends.triton.hopper import reference_plan
from tests.compared.closeness import Results
from tests.compared.exactness import plain_draws, results
from tests.drawn.masks import Recipe
from tests.drawn.problems import Problem, problems
from tests.interpreting.gluon import Interpreted

HALF = (torch.float16, torch.bfloat16)
CUT = plan.Rule(far=0.0, chunk=1, worth=1.0)
PARTS = cuts.Rule(far=0, worth=0, parts=1 << 10, shortest=1)


def fixed_among(kinds):
    """The kinds whose tensors have no gradient in the kernels."""
    return ("log_decay", "alibi") if "softcap" in kinds else ("log_decay",)


def inputs(problem):
    return [x.detach() for x in problem.tensors()]


def scale_of(problem):
    return problem.dim**-0.5 if problem.scale is None else problem.scale


@contextmanager
def interpreting(
    *, programs=3, seed=0, rule=plan.RULE, cut=cuts.RULE, edits=None, backward=None, most_filled=None, **config
):
    """Inside, the Hopper kernels run in our interpreter: see `interpreted`."""
    counter = torch.zeros(1, dtype=torch.int32)

    def changed_config(*of):
        return config_for(*of)._replace(**config)

    def changed_backward_config(*of):
        return backward_config_for(*of)._replace(**(backward or {}))

    replaced = [
        (plan, "RULE", rule),
        (cuts, "RULE", cut),
        (forward_pass, "forward_kernel", Interpreted(forward_module, "forward_kernel", seed, edits)),
        (passes, "config_for", changed_config),
        (forward_pass, "counter", lambda device: counter),
        (backward_pass, "backward_kernel", Interpreted(backward_module, "backward_kernel", seed, edits)),
        (wide_pass, "wide_apart_kernel", Interpreted(wide_apart_module, "wide_apart_kernel", seed, edits)),
        (wide_pass, "wide_dkdv_kernel", Interpreted(wide_dkdv_module, "wide_dkdv_kernel", seed, edits)),
        (wide_pass, "wide_dq_kernel", Interpreted(wide_dq_module, "wide_dq_kernel", seed, edits)),
        (backward_pass, "backward_config_for", changed_backward_config),
        (backward_pass, "_planned", reference_plan.planned),
        (choices, "MOST_FILLED", choices.MOST_FILLED if most_filled is None else {128: most_filled}),
        (passes, "multiprocessors", lambda device: programs),
        (wide_pass, "multiprocessors", lambda device: programs),
    ]
    clear_caches()
    with ExitStack() as stack:
        for module, name, other in replaced:
            stack.enter_context(mock.patch.object(module, name, other))
        yield
    assert counter.item() == 0, "the next launch would not begin with the first item"


def interpreted(mask, q, k, v, scale, dout=None, dlse=None, *, lengths=None, changes=None, **how):
    """`(out, lse)` of the kernels, and the gradients if there is a `dout`.

    lengths: int32 `[2, B]`, if not the mask's. edits: see `Interpreted`. backward: changes of its configuration.
    changes: score modifications; the gradients of their tensors come after the others. most_filled: up to this share of
    live blocks of 64 the backward takes these as they are; None: the library's.
    """
    asked = Asked.of(mask, scale=scale, batch=len(q))
    if lengths is not None:
        asked = asked._replace(lengths=lengths)
    with interpreting(**how):
        setting = setting_of(q, k, asked, (9, 0))
        forward = passes.forward(setting, object(), q, k, v, scale, 0, changes)
        out, lse, _ = forward(q, k, v, asked.lengths, None, changes)
        gradients = ()
        if dout is not None:
            wanted = [] if changes is None else [x.requires_grad for x in changes.tensors()]
            run = passes.backward(
                setting, object(), q, k, v, out, dout, scale, 0, dlse=dlse is not None, changes=changes, wanted=wanted
            )
            given = dout, dlse, Saved(q, k, v, out, lse, None), asked.lengths, None
            if changes is None:
                gradients = run(*given)
            else:
                gradients, learned = run.with_learned(*given, changes)
                gradients += tuple(x for x in learned if x is not None)
    sink = None if changes is None else changes.find("sink")
    if sink is not None:
        whole = completed(lse, sink.logits)
        if gradients and dlse is not None and sink.logits.requires_grad:
            *gradients, of_sink = gradients
            gradients += [of_sink + torch.autograd.grad(whole, sink.logits, dlse)[0]]
        lse = whole.detach()
    return (out, lse, *gradients)


def run(problem, *, gradients=False, through_lse=True, **how):
    q, k, v, dout, dlse = inputs(problem)
    mask = None if problem.recipe is None else problem.recipe.mask()
    return interpreted(
        mask, q, k, v, scale_of(problem), *((dout, dlse if through_lse else None) if gradients else ()), **how
    )


def assert_exact(problem, got):
    truth = results(problem, "reference", "cpu", torch.float64)
    magnitude = {"lse": 8.0 * max(1.0, abs(scale_of(problem)) * problem.dim**0.5)}
    names = Results._fields[: len(got)]
    draws, factor = plain_draws(problem, "cpu", None, truth)
    by_name = (dict(zip(names, values, strict=False)) for values in (got, truth))
    found = compare_with_draws(*by_name, draws, factor, magnitudes=magnitude, enough=1.0)
    assert found.exact, f"every error must be at most what is allowed; got\n{found}"


def of_hopper(problem):
    layout = "tokens first" if problem.layout == "sliced" else problem.layout
    scale = None if problem.scale is None else abs(problem.scale)
    recipe = problem.recipe or Recipe("dense", {"q_len": problem.q_len, "k_len": problem.k_len, "block": (128, 128)})
    v_dim = problem.dim if problem.dim in HEAD_DIMS else problem.v_dim
    return replace(problem, layout=layout, scale=scale, recipe=recipe, v_dim=v_dim)


def drawn(**more):
    return problems(
        **{
            "most_tokens": 420,
            "head_dims": HEAD_DIMS,
            "value_dims": (64,),
            "blocks": (128, 128, 64, 32),
            "dtypes": HALF,
        }
        | more
    ).map(of_hopper)


def wide(offsets, near=20):
    """Buckets of 384 offsets each; nearer than `near`, of one offset each."""
    return torch.where(offsets.abs() < near, 8 + offsets % 8, (offsets // 384).clamp(-3, 4) + 3)


def some_small_problem(**more):
    arguments = {**some_problem().recipe.arguments, "q_len": 136, "k_len": 200, "block": (64, 64)}
    recipe = Recipe("from_dense", arguments, (136, 85))
    return some_problem(**{"recipe": recipe, "q_len": 136, "k_len": 200} | more)


def some_problem(**more):
    """Full, partial and dead tiles, a ragged end, empty rows, several lengths, grouped heads."""
    arguments = {"q_len": 272, "k_len": 392, "block": (128, 128), "heads": [[0, 1]], "holes": "both",
                 "patterns": [["full", "full", "dead"], ["upper", "random", "full"]], "seed": 5}  # fmt: skip
    return replace(
        Problem(
            Recipe("from_dense", arguments, (272, 170)), batch=2, heads=2, kv_heads=1, q_len=272, k_len=392, dim=64,
            v_dim=64, dtype=torch.float16, scale=None, layout="tokens first", seed=3,
        ),
        **more,
    )  # fmt: skip
