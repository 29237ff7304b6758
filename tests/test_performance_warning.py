import sys
import warnings

import pytest
import torch

import sparseflash
from sparseflash import attention, clear_caches, masks, scores
from sparseflash.backends.triton import dispatch, gate
from sparseflash.backends.triton.hopper import support


@pytest.fixture(autouse=True)
def as_on_an_h100(monkeypatch):
    monkeypatch.setattr(gate, "triton_version", lambda: (3, 9))
    monkeypatch.setattr(gate, "gpu_of", lambda request: torch.device("cuda", 0))
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    monkeypatch.setattr(dispatch, "_said", dispatch.BoundedDict(64))
    monkeypatch.setattr(sys.modules["sparseflash.attention"], "chosen_backend", chosen)
    monkeypatch.setattr(dispatch, "_FEWEST_QUERIES", 70)
    monkeypatch.setattr(support, "LIMITS", support.LIMITS._replace(forward_queries_other=1))
    clear_caches()


def chosen(backend, device):
    return ("triton", "a test") if backend in (None, "triton") else (backend, "asked for")


def said_by(call):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in given if each.category is sparseflash.PerformanceWarning]


def inputs(dim=100, tokens=70, **more):
    return [torch.randn(1, 1, tokens, dim, **more).half().detach() for _ in range(3)]


def test_a_head_dim_that_the_kernels_for_hopper_do_not_take():
    (said,) = said_by(lambda: attention(*inputs()))
    assert said == (
        "sparseflash runs its portable kernels for this call and not its faster ones for Hopper: they take head dims "
        "that are multiples of 8 up to 256; got D = 100 and Dv = 100. It may take up to twice as long. Results are as "
        "exact. `sparseflash.explain` has the full answer for a call; warnings.filterwarnings('ignore', "
        "category=sparseflash.PerformanceWarning) silences this."
    )


def test_each_kind_of_reason_once():
    q, k, v = inputs()
    assert len(said_by(lambda: (attention(q, k, v), attention(*inputs(tokens=71)), attention(*inputs(dim=108))))) == 1
    (said,) = said_by(lambda: attention(*inputs(dim=128), dropout_p=0.5))
    assert "they have no dropout" in said
    own = scores.function(lambda score, b, h, q, k: score * 2)
    (said,) = said_by(lambda: attention(*inputs(dim=128), scores=own))
    assert "got function" in said
    assert not said_by(lambda: attention(*inputs(dim=256), dropout_p=0.5))


def test_gradients_say_no_more_than_the_call():
    q, k, v = (x.requires_grad_() for x in inputs())
    (said,) = said_by(lambda: attention(q, k, v).sum().backward())
    assert "they take head dims" in said


@pytest.mark.parametrize(
    "call",
    [
        lambda: attention(*inputs(), backend="triton"),
        lambda: attention(*(x.float() for x in inputs())),
        lambda: attention(*inputs(tokens=69)),
        lambda: attention(*inputs(dim=64)),
        lambda: attention(*inputs(dim=20)),
        lambda: attention(*inputs(), masks.causal(70, block=16)),
        lambda: attention(*inputs(), backend="blockwise"),
    ],
    ids=[
        "asked for",
        "fp32",
        "few queries",
        "as fast",
        "as fast at narrow heads",
        "as fast, whatever the head dim",
        "blockwise",
    ],
)
def test_no_word_where_it_is_asked_for_or_no_slower(call):
    assert not said_by(call)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_no_word_on_other_gpus(capability, monkeypatch):
    from sparseflash.backends.triton import device as gpu

    monkeypatch.setattr(gpu, "capability_of", lambda device: capability)
    assert not said_by(lambda: attention(*inputs()))


def test_the_standard_filters_silence_it_and_make_it_an_error():
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=sparseflash.PerformanceWarning)
        attention(*inputs())
    assert not given
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=sparseflash.PerformanceWarning)
        with pytest.raises(sparseflash.PerformanceWarning, match="they have no dropout"):
            attention(*inputs(dim=128), dropout_p=0.5)


def test_tests_ignore_it_by_its_first_words():
    (said,) = said_by(lambda: attention(*inputs()))
    assert said.startswith("sparseflash runs its portable kernels") and issubclass(
        sparseflash.PerformanceWarning, UserWarning
    )
