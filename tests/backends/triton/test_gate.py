import json
import logging
import os
import sys
import threading
import time
import warnings
from unittest import mock

import pytest
import torch
from triton import knobs

import sparseflash
from sparseflash import attention, clear_caches, explain, masks, testing
from sparseflash.backends.problem import Problem
from sparseflash.backends.triton import dispatch, gate, kernel_check
from sparseflash.backends.triton.dispatch import decide
from sparseflash.backends.triton.family import Request
from sparseflash.backends.triton.hopper import support
from sparseflash.backends.triton.prepared_call import setting_of
from sparseflash.cli import info
from sparseflash.scores.change import Sizes
from tests.compiling.uninterpreted import python

GPU = torch.device("cuda", 0)
HALF = Request(
    (9, 0), torch.bfloat16, (128, 128), (128, 128), lengths=False, dropout=False, dynamic=False, tokens=(8192, 8192),
    keys=1024.0, backward=False, device=GPU,
)  # fmt: skip
PLAIN = gate.Kind("bfloat16", 128, False, False, (), (), False)
WRONG = "their results are wrong; errors as multiples of the allowed error: out 300"
UNMEASURED = "Triton 9.9.9 is not among the versions that they were measured with, 3.6, 3.7, 3.8 and 3.9"
# The assembler is given another program than Triton's.
BREAKING = """
import sys
from triton.backends.nvidia.compiler import CUDABackend
make = CUDABackend.make_cubin
CUDABackend.make_cubin = lambda self, ptx, *rest: make(self, ptx.replace("ex2.approx", "sin.approx"), *rest)
from sparseflash.backends.triton import kernel_check
kernel_check.main(*sys.argv[1:])
"""


@pytest.fixture
def new_version(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "triton_version", lambda: (9, 9))
    monkeypatch.setattr(gate, "triton_release", lambda: "9.9.9")
    monkeypatch.setattr(dispatch, "_said", dispatch.BoundedDict(64))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    clear_caches()
    yield tmp_path
    clear_caches()


@pytest.fixture
def hopper(monkeypatch, new_version):
    tried, answers = [], {"": ("", True)}
    facts = {"triton": "9.9.9", "device": "NVIDIA H100", "sources": "abc"}

    def outcome(command):
        tried.append(command)
        time.sleep(0.05)
        return answers[""]

    monkeypatch.setattr(gate, "outcome", outcome)
    monkeypatch.setattr(gate, "_facts", lambda device: facts)
    monkeypatch.setattr(gate, "gpu_of", lambda request: GPU)
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    return tried, answers, facts


def forget():
    clear_caches()


# ---------------------------------------------------------------------- the verdict


def test_a_measured_version_is_not_tried(hopper, monkeypatch):
    tried, *_ = hopper
    monkeypatch.setattr(gate, "triton_version", lambda: (3, 9))
    assert decide(HALF).family.name == "hopper" and not tried


def test_another_version_serves_when_its_kernels_pass_and_is_tried_once(hopper, new_version, caplog):
    tried, *_ = hopper
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, "sparseflash"):
        warnings.simplefilter("error")
        assert [decide(HALF).family.name for _ in range(2)] == ["hopper"] * 2
    ((executable, m, module, kind, device),) = tried
    assert (executable, m, device) == (sys.executable, "-m", "cuda:0") and module == kernel_check.__name__
    assert gate.Kind(*json.loads(kind))[:4] == PLAIN[:4]
    assert "9.9.9" in caplog.text and "passed" in caplog.text
    forget()
    assert decide(HALF).family.name == "hopper" and len(tried) == 1, "the file says so"
    (file,) = new_version.iterdir()
    assert json.loads(file.read_text())["device"] == "NVIDIA H100"


@pytest.mark.parametrize(("fact", "other"), [("device", "NVIDIA H200"), ("triton", "9.9.10"), ("sources", "abd")])
def test_what_may_change_a_verdict_is_tried_again(hopper, fact, other):
    tried, _, facts = hopper
    decide(HALF)
    forget()
    facts[fact] = other
    decide(HALF)
    assert len(tried) == 2


@pytest.mark.parametrize(
    "change",
    [{"backward": True}, {"dtype": torch.float16}, {"dims": (96, 96)}, {"block": (64, 64)}, {"lengths": True},
     {"changes": ("softcap",)}],
)  # fmt: skip
def test_other_kernels_are_tried_themselves(hopper, change):
    tried, *_ = hopper
    decide(HALF), decide(HALF._replace(**change))
    assert len(tried) == 2


def test_a_kind_that_fails_does_not_serve_and_says_why(hopper, new_version):
    tried, answers, _ = hopper
    answers[""] = WRONG, True
    for _ in range(2):
        found = decide(HALF)
        assert found.family.name == "portable" and found.refusals == {"hopper": f"{UNMEASURED}, and {WRONG}"}
        forget()
    assert len(tried) == 1
    with pytest.raises(ValueError, match=r"the hopper kernels cannot serve this call: Triton 9\.9\.9 is not among"):
        decide(HALF, "hopper").serving()
    (file,) = new_version.iterdir()
    assert gate.remedy(HALF) == (
        f"install a PyTorch whose Triton was measured (2.11 to 2.15), or delete {file} to repeat the check"
    )


def test_what_could_not_be_tried_is_not_kept(hopper, new_version):
    tried, answers, _ = hopper
    answers[""] = "there is too little memory to check them", False
    assert decide(HALF).family.name == decide(HALF).family.name == "portable" and len(tried) == 1
    assert not list(new_version.iterdir()) and "start another process to repeat" in gate.remedy(HALF)
    forget()
    answers[""] = "", True
    assert decide(HALF).family.name == "hopper"


def test_kernels_that_would_not_serve_are_not_tried(hopper):
    tried, *_ = hopper
    assert support.refuses(HALF._replace(dims=(20, 20))) and support.yields(HALF._replace(block=(64, 128)))
    decide(HALF._replace(dims=(20, 20))), decide(HALF._replace(block=(64, 128), backward=True))
    assert not tried


def test_threads_wait_for_the_one_that_tries(hopper):
    tried, *_ = hopper
    found = []
    threads = [threading.Thread(target=lambda: found.append(decide(HALF).family.name)) for _ in range(4)]
    [each.start() for each in threads], [each.join() for each in threads]
    assert found == ["hopper"] * 4 and len(tried) == 1


def test_a_file_that_is_not_ours_is_replaced_and_a_disk_that_takes_none_does_no_harm(hopper, new_version, monkeypatch):
    tried, *_ = hopper
    decide(HALF)
    (file,) = new_version.iterdir()
    for content in ("", "{", "[]", "{}", "[" * 100_000):
        file.write_text(content)
        forget()
        assert decide(HALF).family.name == "hopper" and json.loads(file.read_text())["why"] == ""
    file.unlink()
    forget()
    with mock.patch.object(os, "replace", side_effect=OSError("read-only")):
        assert decide(HALF).family.name == "hopper"
    assert len(tried) == 7 and not list(new_version.iterdir())


def test_others_may_read_a_verdict(hopper, new_version):
    decide(HALF)
    (file,) = new_version.iterdir()
    usual = new_version / "usual"
    usual.touch()
    assert file.stat().st_mode == usual.stat().st_mode


def test_a_version_without_triton_knobs_serves_too(hopper, new_version, monkeypatch):
    monkeypatch.delattr("triton.knobs")
    monkeypatch.setitem(sys.modules, "triton.knobs", None)
    assert decide(HALF).family.name == "hopper"
    assert [file.suffix for file in new_version.iterdir()] == [".json"]


# ---------------------------------------------------------------------- the process that tries


def ends(source, **environment):
    with mock.patch.dict(os.environ, environment):
        return gate.outcome([sys.executable, "-c", source])


SAYS = f"print({gate.TRYING!r}, flush=True); "


def test_the_process_has_our_modules_and_compiles(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/somewhere", *sys.path])
    source = "import json, os, sparseflash; print(json.dumps({'why': os.environ['PYTHONPATH'], 'certain': True}))"
    why, _ = ends(source + "; assert 'TRITON_INTERPRET' not in os.environ", TRITON_INTERPRET="1")
    assert why.startswith(f"/somewhere{os.pathsep}")


def test_the_process_starts_whatever_is_on_the_path_and_where_the_folder_is_gone(monkeypatch, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", tmp_path, b"bytes", "/somewhere"])
    source = "import json, os; print(json.dumps({'why': os.environ['PYTHONPATH'], 'certain': True}))"
    assert ends(source) == ("/somewhere", True)


def test_a_process_that_is_lost_with_its_kernels_is_a_verdict():
    why, certain = ends(SAYS + "import sys; sys.exit('illegal memory access')")
    assert why == "the process that checks them ended with status 1: illegal memory access" and certain
    why, certain = ends(SAYS + "import os; os.abort()")
    assert why.startswith("the process that checks them ended with status -6") and certain


def test_a_report_of_the_assembler_behind_the_verdict_changes_nothing():
    says = SAYS + "import json; print(json.dumps({'why': 'wrong', 'certain': True})); "
    assert ends(says + "print('ptxas info    : Used 168 registers')") == ("wrong", True)
    assert ends(says + "print('168'); print('[]')") == ("wrong", True)


def test_a_process_that_came_to_no_kernel_is_none():
    assert ends("raise SystemExit('no device')") == (
        "the process that checks them ended with status 1: no device",
        False,
    )
    why, certain = gate.outcome(["/no/such/python"])
    assert why.startswith("the process that checks them could not be started: ") and not certain
    assert ends("print('welcome')") == ("the process that checks them ended with status 0", False)
    assert ends("print('{}')") == ("the process that checks them ended with status 0", False)


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT", "SIGTERM", "SIGKILL"])
def test_a_process_that_others_end_is_none(name):
    usual = {"SIGHUP": "SIG_DFL", "SIGINT": "default_int_handler"}
    heard = f"signal.signal(signal.{name}, signal.{usual[name]}); " if name in usual else ""
    why, certain = ends(SAYS + f"import os, signal; {heard}os.kill(os.getpid(), signal.{name})")
    assert why.startswith("the process that checks them ended with ") and not certain


@pytest.mark.skipif(sys.version_info < (3, 11), reason="PYTHONSAFEPATH came with Python 3.11")
def test_the_process_runs_nothing_of_the_current_folder(monkeypatch, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('a stranger')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    assert gate.outcome([sys.executable, "-m", "json.tool", "--help"]) == (
        "the process that checks them ended with status 0",
        False,
    )


def test_the_process_is_none_of_ours_to_be_warned_or_asked():
    source = "import json, sys, warnings; warnings.warn('new'); why = sys.stdin.read(); "
    source += "print(json.dumps({'why': why, 'certain': True}))"
    assert ends(source, PYTHONWARNINGS="error", PYTHONINSPECT="1") == ("", True)


def test_no_process_that_checks_starts_another():
    source = """
import json, sys
from sparseflash.backends.triton import gate
why, certain = gate.outcome([sys.executable, "-c", "raise SystemExit('a process of a process')"])
print(json.dumps({"why": why, "certain": certain}))
"""
    assert ends(source) == (
        "they are checked only where sys.executable is Python and does not check kernels itself",
        False,
    )


def test_a_frozen_program_does_not_start_itself(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    why, certain = ends("raise SystemExit('the program again')")
    assert why.startswith("they are checked only where sys.executable is Python") and not certain


def test_kernels_that_hang_are_left(monkeypatch):
    monkeypatch.setattr(gate, "_SECONDS", 2)
    why, certain = ends(SAYS + "import time; time.sleep(60)")
    assert why == "the process that checks them did not end within 2 seconds" and certain


# ---------------------------------------------------------------------- what it tries

CHANGES = [(), ("softcap",), ("alibi", "sink"), ("log_decay",), ("relative", "sink"), ("key_bias",), ("bias",),
           ("tile_bias",)]  # fmt: skip


@pytest.mark.parametrize("cut", [False, True], ids=["whole rows", "rows that are cut"])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("changes", CHANGES, ids="+".join)
def test_the_inputs_are_served_by_kernels_of_that_kind(changes, backward, cut, monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    learned = tuple(each for each in changes if backward and each not in ("softcap", "log_decay"))
    kind = PLAIN._replace(changes=changes, learned=learned, backward=backward, lengths=True)
    q, k, v, mask, change = kernel_check.example(kind, torch.device("cpu"), cut=cut)
    found = explain(q, k, v, mask, scores=change, capability=(9, 0), backend="hopper")
    assert {each.chunks > 0 for each in found.kernels} == {cut}
    problem = Problem.of(mask, scale=1.0, batch=len(q), kernels="hopper")
    setting = setting_of(q, k, problem, (9, 0))
    prepared = None if change is None else change.prepared(Sizes(*q.shape[:3], k.shape[2], q.device, mask))
    wanted = [] if prepared is None else [x.requires_grad for x in prepared.tensors()]
    assert gate.kind_of(Request.of(setting, q, v, prepared, wanted, backward=backward)) == kind


@pytest.mark.parametrize("cut", [False, True], ids=["whole rows", "rows that are cut"])
@pytest.mark.parametrize("kind", [PLAIN._replace(dim=80), PLAIN._replace(dim=192, v_dim=128, backward=True)], ids=str)
def test_other_head_dims_are_tried_with_values_of_their_own(kind, cut, monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    q, k, v, mask, _ = kernel_check.example(kind, torch.device("cpu"), cut=cut)
    found = explain(q, k, v, mask, capability=(9, 0), backend="hopper")
    assert (found.forward.family, found.backward.family) == ("hopper", "hopper")
    setting = setting_of(q, k, Problem.of(mask, scale=1.0, batch=len(q), kernels="hopper"), (9, 0))
    assert gate.kind_of(Request.of(setting, q, v, backward=kind.backward)) == kind


@pytest.mark.parametrize("dim", [64, 96, 128])
def test_small_blocks_are_tried_as_they_are(dim, monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    for cut in (False, True):
        given = kernel_check.example(PLAIN._replace(dim=dim, small=True), torch.device("cpu"), cut=cut)
        found = explain(*given[:4], capability=(9, 0), backend="hopper").kernels[0]
        assert (found.block_m, found.block_n) == (64, 64) and (found.chunks > 0) == cut


@pytest.mark.parametrize(
    ("kind", "forms"),
    [
        ({"small": True}, {((64, 64), True), ((128, 128), False)}),
        ({}, {((128, 128), False)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_all_forms_of_a_backward_are_tried(dim, kind, forms, monkeypatch):
    monkeypatch.setattr(support, "is_interpreted", lambda: False)
    kind = PLAIN._replace(dim=dim, backward=True, **kind)
    examples = [kernel_check.example(kind, torch.device("cpu"), cut=cut) for cut in (False, True)]
    assert {kernel_check._backward_form(kind, each) for each in examples} == forms
    for q, k, v, mask, change in examples:
        assert explain(q, k, v, mask, scores=change, capability=(9, 0), backend="hopper").backward.family == "hopper"
        setting = setting_of(q, k, Problem.of(mask, scale=1.0, batch=len(q), kernels="hopper"), (9, 0))
        assert gate.kind_of(Request.of(setting, q, v, change, backward=True)) == kind


REPORT = """
ptxas info    : 11 bytes gmem
ptxas info    : Compiling entry function 'forward_kernel' for 'sm_90a'
ptxas info    : Function properties for forward_kernel
    {} bytes stack frame, 96 bytes spill stores, 128 bytes spill loads
ptxas info    : Used {} registers, used 10 barriers
ptxas info    : Compiling entry function 'begin_kernel' for 'sm_90a'
ptxas info    : Function properties for begin_kernel
    900 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers
"""
GOOD_REPORT = REPORT.format(0, 168) + REPORT.format(0, 168).replace("forward", "backward")
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        (REPORT.format(56, 168), ""),
        (REPORT.format(56, 160), "forward_kernel has 160 registers a thread; it needs 168"),
        (REPORT.format(512, 168), "forward_kernel spills 512 bytes a thread; it may spill 256"),
        (REPORT.format(0, 168) + REPORT.format(512, 168), "forward_kernel spills 512 bytes a thread; it may spill 256"),
        (SERIALISED + REPORT.format(0, 168),
         "the assembler serialises matrix products: (C7510) Potential Performance Loss: wgmma.mma_async instructions "
         "are serialized"),
        ("", "the assembler reports nothing about forward_kernel"),
    ],
)  # fmt: skip
def test_the_assemblers_report_is_read(report, fault):
    assert kernel_check.fault_in(report, {"forward_kernel": 168}) == fault


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(kernel_check, "_LENGTH", 300)
    monkeypatch.setattr(kernel_check, "_CUT_LENGTH", 512)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(knobs.nvidia, "dump_ptxas_log", False)
    monkeypatch.setattr(knobs.compilation, "always_compile", False)
    served = []

    def serve(change, says=GOOD_REPORT):
        def served_by(q, k, v, mask, *, backend, **more):
            served.append((backend, gate.refuses(HALF)))
            print(says)
            return change(attention(q, k, v, mask, backend="blockwise", **more))

        monkeypatch.setattr(kernel_check, "attention", served_by)

    serve.served = served
    return serve


HALF_64 = PLAIN._replace(dim=64, dtype="float16")


def checked(capsys, kind=HALF_64):
    kernel_check.main(json.dumps(kind), "cpu")
    *_, trying, found = capsys.readouterr().out.splitlines()
    assert trying == gate.TRYING
    found = json.loads(found)
    return found["why"], found["certain"]


@pytest.mark.parametrize("backward", [False, True])
def test_kernels_that_are_exact_pass(small, hopper, capsys, backward):
    small(lambda results: results)
    kind = HALF_64._replace(changes=("alibi",), learned=("alibi",) * backward, backward=backward)
    assert checked(capsys, kind) == ("", True)
    assert small.served == [("hopper", None)] * 2, "with the gate open, rows that are cut included"


def test_kernels_that_are_not_exact_do_not_pass(small, capsys):
    small(lambda results: (results[0] * 1.01, results[1]))
    why, certain = checked(capsys)
    assert why.startswith("their results are wrong; errors as multiples of the allowed error: out ") and certain


def test_what_is_raised_is_said(small, capsys):
    def broken(results):
        raise RuntimeError("PassManager::run failed\nand more")

    small(broken)
    assert checked(capsys) == ("they do not run: RuntimeError: PassManager::run failed", True)


@pytest.mark.parametrize(
    "error",
    [torch.cuda.OutOfMemoryError("Tried to allocate 2 GiB."), RuntimeError("Triton Error [CUDA]: out of memory"),
     RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
     MemoryError("Unable to allocate 2 GiB")],
)  # fmt: skip
def test_memory_that_others_have_is_no_verdict(small, capsys, error):
    small(mock.Mock(side_effect=error))
    assert checked(capsys) == (f"there is too little memory to check them: {error}", False)


def test_a_full_disk_is_no_verdict(small, capsys):
    small(mock.Mock(side_effect=OSError(28, "No space left on device")))
    assert checked(capsys) == ("they do not run: OSError: [Errno 28] No space left on device", False)


def test_kernels_of_which_the_assembler_says_nothing_do_not_pass(small, capsys):
    small(lambda results: results, says="")
    assert checked(capsys) == ("the assembler reports nothing about forward_kernel", True)


COMPILED = """
import io, contextlib, torch
from tests.backends.triton.hopper.hopper_compiled import compiled
from sparseflash.backends.triton.kernel_check import fault_in
from triton import knobs
knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
report = io.StringIO()
with contextlib.redirect_stdout(report):
    compiled(128, torch.bfloat16)
print(repr(fault_in(report.getvalue(), {"forward_kernel": 168, "backward_kernel": 168, "finish_kernel": 1})))
"""


def test_the_installed_triton_prints_such_a_report():
    """The last kernel is checked against a wrong number of registers."""
    done = python("-c", COMPILED)
    assert done.stdout.startswith("'finish_kernel has"), done.stdout + done.stderr[-2000:]


# ---------------------------------------------------------------------- explain


def test_explain_says_what_another_version_means(hopper, monkeypatch):
    q = torch.empty(1, 4, 8192, 128, dtype=torch.bfloat16, device="meta")
    said = explain(q, q, q, capability=(9, 0))
    unmeasured = "Triton 9.9.9 is not among the versions that the kernels for Hopper were measured with: "
    assert said.forward.family == "hopper" and said.versions == f"{unmeasured}they passed their check on this GPU"
    assert said.versions in str(said).splitlines()
    monkeypatch.setattr(gate, "gpu_of", lambda request: None)
    said = explain(q, q, q, capability=(9, 0))
    assert said.forward.family == "hopper"
    assert said.versions == f"{unmeasured}they are checked on a GPU before they serve"
    assert explain(q, q, q, capability=(8, 0)).versions is None
    monkeypatch.setattr(gate, "triton_version", lambda: (3, 9))
    assert explain(q, q, q, capability=(9, 0)).versions is None


INSTALLED = """
import torch
from sparseflash import explain, masks
q = torch.empty(1, 16, 16384, 128, dtype=torch.bfloat16, device="meta")
found = explain(q, q, q, masks.causal(16384), capability=(9, 0))
print(found.forward.family, found.backward.family, found.versions)
"""


def test_with_the_installed_versions_the_kernels_for_hopper_serve():
    done = python("-c", INSTALLED)
    assert done.stdout.split() == ["hopper", "hopper", "None"], done.stdout + done.stderr[-2000:]


# ---------------------------------------------------------------------- calls


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(sys.modules["sparseflash.attention"], "chosen_backend", lambda *asked: ("triton", "a test"))


def warnings_of(call):
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = call()
    return result, [each for each in given if issubclass(each.category, sparseflash.PerformanceWarning)]


def test_where_they_fail_the_portable_kernels_serve_exactly_and_a_warning_says_so_once(hopper, as_on_a_gpu):
    tried, answers, _ = hopper
    answers[""] = WRONG, True
    q, k, v = (torch.randn(1, 1, 1030, 128).half() for _ in range(3))
    mask = masks.local(1030, window=100, block=128)

    def ours(q, k, v):
        return attention(q, k, v, mask, return_lse=True)

    found, said = warnings_of(lambda: testing.compare(ours, q, k, v, mask))
    assert found.exact
    (warning,) = said
    text = str(warning.message)
    assert text.startswith(
        "sparseflash runs its portable kernels on this GPU and not its faster ones for Hopper: "
        f"{UNMEASURED}, and {WRONG}. Long sequences may take up to twice as long; to get those kernels back, install a "
        "PyTorch whose Triton was measured (2.11 to 2.15), or delete "
    )
    assert text.endswith(
        ".json to repeat the check. Results are as exact. `sparseflash.explain` has the full answer for a call; "
        "warnings.filterwarnings('ignore', category=sparseflash.PerformanceWarning) silences this."
    )
    assert len(tried) == 2, "forward and backward"
    _, again = warnings_of(lambda: attention(q[:, :, :1024], k, v))
    assert not again and len(tried) == 2
    assert UNMEASURED in str(explain(q, k, v, mask, capability=(9, 0)))


def test_a_warning_names_the_line_of_the_call(hopper, as_on_a_gpu):
    _, answers, _ = hopper
    answers[""] = WRONG, True
    q = torch.randn(1, 1, 128, 128).half()
    _, (warning,) = warnings_of(lambda: attention(q, q, q))
    assert warning.filename == __file__


# ---------------------------------------------------------------------- on a GPU


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


needs_hopper = pytest.mark.skipif("not is_hopper()", reason="needs a GPU of compute capability 9.0")


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    "kind",
    [PLAIN, PLAIN._replace(dim=64, backward=True), PLAIN._replace(backward=True, lengths=True, dtype="float16"),
     PLAIN._replace(small=True), PLAIN._replace(changes=("softcap",), backward=True),
     PLAIN._replace(changes=("relative", "sink"), learned=("relative", "sink"), backward=True),
     PLAIN._replace(changes=("bias",), learned=("bias",), backward=True)],
)  # fmt: skip
def test_these_kernels_pass_their_check_here(kind):
    assert gate.outcome(gate.command(kind, torch.device("cuda", torch.cuda.current_device()))) == ("", True)


@pytest.mark.gpu
@needs_hopper
def test_another_version_whose_kernels_pass_serves_without_a_warning(new_version):
    q = torch.randn(1, 2, 1024, 128, dtype=torch.bfloat16, device="cuda")
    found, said = warnings_of(lambda: explain(q, q, q))
    assert found.forward.family == found.backward.family == "hopper" and not said
    assert found.versions.endswith("they passed their check on this GPU")
    assert len([each for each in new_version.iterdir() if each.suffix == ".json"]) == 2
    usable, versions = info.usable("cuda:0")
    assert usable["hopper"] is None and versions == found.versions
    with mock.patch.object(gate, "outcome", side_effect=AssertionError("tried again")):
        clear_caches()
        assert explain(q, q, q).forward.family == "hopper"


@pytest.mark.gpu
@needs_hopper
def test_a_kernel_that_is_broken_here_does_not_serve(new_version, monkeypatch):
    whole = gate.command
    monkeypatch.setattr(
        gate, "command", lambda kind, device: [sys.executable, "-c", BREAKING, *whole(kind, device)[-2:]]
    )  # fmt: skip
    q, k, v = (torch.randn(2, 4, 1100, 128, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    mask = masks.causal(1100).to("cuda")
    found, said = warnings_of(
        lambda: testing.compare(lambda q, k, v: attention(q, k, v, mask, return_lse=True), q, k, v, mask)
    )  # fmt: skip
    assert found.exact, found
    (warning,) = said
    assert "and their results are wrong; errors as multiples of the allowed error: out " in str(warning.message)
    chosen = explain(q, k, v, mask)
    assert chosen.forward.family == chosen.backward.family == "portable"
    assert UNMEASURED in chosen.forward.refusals[0][1]


@pytest.mark.gpu
@needs_hopper
def test_a_first_call_inside_a_capture_is_refused_as_ever_and_the_graph_is_not_broken_by_the_check(new_version):
    """Another process runs the check."""
    q = torch.randn(1, 2, 1024, 128, dtype=torch.bfloat16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        x += 1
        with pytest.raises(RuntimeError, match="before the capture, call it once with the same mask"):
            attention(q, q, q)
    graph.replay()
    assert x.tolist() == [1.0] * 4
    attention(q, q, q)
    assert explain(q, q, q).forward.family == "hopper"
