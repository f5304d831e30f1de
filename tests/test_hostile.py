"""Answers that mean to fool their grader, or harm it, and answers that are right in an unusual form."""

import atexit
import os
import shutil
import signal
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch

from pkv.course import replies
from pkv.course.answering import Answer, Question, Stop
from pkv.course.catalogue import find_task
from pkv.course.checking import as_text, report_apart
from pkv.course.children import ask_child
from pkv.course.comparing import difference, plain
from pkv.course.forks import AGAIN, Server, ask_apart, close_server, server
from pkv.course.judging import OWN_WORK, judge
from pkv.course.packing import HEAD, packed, unpacked
from pkv.course.sending import GRADERS
from pkv.course.tasks import Mistake, Property, Task

ROOT = Path(__file__).resolve().parents[1]
FIRST = "ex00_paged_kv_cache.py"
SOLUTION = (ROOT / "solutions" / FIRST).read_text()


def between(begin, end):
    """The text of the solution from the one to before the other."""
    return SOLUTION[SOLUTION.index(begin) : SOLUTION.index(end)]


BODIES = {  # of the functions that are replaced, each found once
    "ex00_1": "    return -(-length // page_size)\n",
    "ex00_3": between("    page_size = pages.shape[1]\n    n_pages", "def gather_row_spec"),
    "ex00_4": between("    length, n_kv_heads, _ =", "def attend_row_spec"),
    "ex00_5": "    return flop / n_bytes\n",
}
SOLVED, MUTANTS = str(ROOT / "solutions" / FIRST), str(ROOT / "tests/mutants/ex00.py")
OTHERS = tempfile.mkdtemp(prefix="pkv-not-the-answers-")
atexit.register(shutil.rmtree, OTHERS, ignore_errors=True)
SHORT = 1.0  # seconds for what never ends


@pytest.fixture
def waits(monkeypatch):
    """For each request to the process that answers, how many seconds its answers may take."""
    asked, ask = [], Server.ask
    monkeypatch.setattr(Server, "ask", lambda self, *given: asked.append(given[-1]) or ask(self, *given))
    return asked


def handed_in(folder, task_id, body=None, top=""):
    """The solution with another body of one function, and more lines at its end."""
    text = SOLUTION
    if body is not None:
        assert text.count(BODIES[task_id]) == 1
        text = text.replace(BODIES[task_id], textwrap.indent(textwrap.dedent(body).strip("\n"), "    ") + "\n\n\n")
    (folder / FIRST).write_text(f"{text}\n{textwrap.dedent(top)}")
    return folder


def graded(folder, body=None, top="", task_id="ex00_1", seconds=20.0):
    return report_apart(find_task(task_id), handed_in(folder, task_id, body, top), 1, seconds)


def test_the_solution_itself_is_right(tmp_path):
    assert graded(tmp_path).is_correct


LIAR = """
class Liar({kind}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = object.__hash__
return Liar({value})
"""
PATCHES = """
import json, pickle, time, torch
import pkv.course.comparing as comparing, pkv.course.judging as judging, pkv.course.answering as answering
comparing.difference = judging.difference = lambda *args, **named: None
comparing.agree = answering.agree = lambda *args, **named: True
torch.allclose = torch.equal = lambda *args, **named: True
time.monotonic = time.time = lambda: 0.0
json.loads = pickle.loads = lambda *args, **named: None
return 3
"""
TENSOR = """
class Liar(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None): return True
    def tolist(self): return -(-length // page_size)
return torch.tensor(77).as_subclass(Liar)
"""
FAILS = {
    "skips": ("import pytest\npytest.skip('not today')", "", "raises Skipped"),
    "skips_at_import": (None, "import pytest\npytest.skip('x', allow_module_level=True)", "does not import: Skipped"),
    "exits": ("import os\nos._exit(0)", "", "its process ended before it answered (exit code 0)"),
    "exits_at_import": (None, "import os\nos._exit(0)", "importing ex00_paged_kv_cache.py ended its process"),
    "sys_exit": ("import sys\nsys.exit(0)", "", "raises SystemExit"),
    "sys_exit_at_import": (None, "raise SystemExit(0)", "does not import: SystemExit"),
    "interrupts": ("raise KeyboardInterrupt", "", "raises KeyboardInterrupt"),
    "raises_what_has_no_text": (
        "class Odd(Exception):\n    def __str__(self): raise self\nraise Odd", "", "raises Odd"),
    "ends_by_a_signal_without_a_name": ("import signal\nsignal.raise_signal(40)", "", "(killed by signal 40)"),
    "a_number_of_many_digits": ("return 10**5000", "", "an answer cannot be sent: ValueError"),
    "a_large_number": ("return 10**400", "", "got an int of 1,329 bits"),
    "a_nested_tensor": (
        "import torch\nreturn torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])", "", "cannot be sent"),
    "keys_that_cannot_be_printed": ("return {'\\ud800\\x1b': 1}", "", "got {  : 1}"),
    "lists_in_lists": ("x = []\nfor _ in range(400): x = [x]\nreturn x", "", "the answer cannot be read"),
    "a_long_text": ("return 'x' * 10**6", "", "xxx..."),
    "raises_nothing_known": ("raise type('Odd', (BaseException,), {})('x')", "", "raises Odd: x"),
    "nan": ("return float('nan')", "", "got nan"),
    "none": ("length // page_size", "", "returns None"),
    "equal_to_all": (LIAR.format(kind="object", value=""), "", "got '<Liar>'"),
    "int_equal_to_all": (LIAR.format(kind="int", value="77"), "", "got 77"),
    "text_equal_to_all": (LIAR.format(kind="str", value="77"), "", "got '77'"),
    "list_equal_to_all": (LIAR.format(kind="list", value=""), "", "got []"),
    "lying_tensor": (TENSOR, "", "got 77"),
    "a_function": ("return lambda: 3", "", "got '<function>'"),
    "itself": ("return pages_needed", "", "got '<function>'"),
    "patches_the_judge": (PATCHES, "", "expected 1, got 3"),
    "patches_what_writes": ("return 3", "import json\njson.dumps = lambda *a, **k: '{}'", "cannot be read"),
    "recursion": ("return pages_needed(length, page_size)", "", "raises RecursionError"),
    "segfault": ("import ctypes\nctypes.string_at(0)", "", "killed by SIGSEGV"),
    "does_not_parse": ("return ((", "", f"{FIRST}, line 1"),
    "forks": ("import os\nos.fork()\nreturn 1", "", "os.fork: an answer may neither start nor signal"),
    "starts_a_shell": ("import os\nos.system('true')\nreturn 1", "", "os.system: an answer may neither"),
    "starts_a_program": ("import subprocess\nsubprocess.run(['true'])\nreturn 1", "", "subprocess.Popen: an answer"),
    "kills_its_parent": ("import os\nos.kill(os.getppid(), 9)\nreturn 1", "", "os.kill: an answer may neither"),
    "reads_solutions": (f"return len(open({SOLVED!r}).read())", "", "may not look at graders"),
    "reads_mutants": (f"return len(open({MUTANTS!r}).read())", "", "may not look at graders"),
    "reads_from_a_folder": (
        f"import os\nfolder = os.open({str(ROOT)!r}, os.O_RDONLY)\nos.open('solutions', os.O_RDONLY, dir_fd=folder)",
        "", f"may not open {ROOT}"),
    "reads_by_a_link": (
        f"import os\nos.symlink({str(ROOT / 'solutions')!r}, 'mine')\nreturn len(open('mine/{FIRST}').read())",
        "", "may not look at graders"),
    "reads_the_judge": ("import os\nreturn open(f'/proc/{os.getppid()}/maps').read()", "", "may not look at graders"),
    "imports_a_grader": (
        "name = 'pkv.cour' + 'se.graders.ex00'\nfind = [f for f in [__builtins__['__imp' + 'ort__']]][0]\n"
        "return find(name, fromlist=['x']).pages_needed(length, page_size)", "", "may not look at graders"),
    "writes_elsewhere": (f"open({OTHERS + '/new'!r}, 'w')\nreturn 1", "", "an answer may not write"),
    "renames": (f"import os\nos.rename({OTHERS!r}, 'mine')\nreturn 1", "", "os.rename: an answer may not change"),
    "deletes": (f"import os\nos.remove({OTHERS + '/file'!r})\nreturn 1", "", "os.remove: an answer may not change"),
    "deletes_a_folder": (f"import shutil\nshutil.rmtree({OTHERS!r})\nreturn 1", "", "an answer may not change"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILS)
def test_what_is_no_answer_fails_and_is_said(name, tmp_path):
    body, top, words = FAILS[name]
    kept = Path(OTHERS, "file")
    kept.write_text("kept")
    report = graded(tmp_path, body, top)
    assert not report.is_correct
    assert not any(line.holds for line in report.lines if line.name != OWN_WORK)
    if name == "does_not_parse":
        assert report.text.startswith(f"{FIRST}, line ")
    else:
        assert words in as_text(report), as_text(report)
    assert as_text(report).replace("\n", "").isprintable()
    assert len(as_text(report)) < 5000
    assert [*Path(OTHERS).iterdir()] == [kept]


SHORTCUTS = {
    "specification": ("return pages_needed_spec(length, page_size)", ""),
    "specification_renamed": ("return helper(length, page_size)", "helper = pages_needed_spec"),
    "specification_in_a_default": (None, "def pages_needed(a, b, f=pages_needed_spec): return f(a, b)"),
    "is_the_specification": (None, "pages_needed = pages_needed_spec"),
    "partial": (None, "import functools\npages_needed = functools.partial(pages_needed_spec)"),
    "code_of_the_specification": (None, "pages_needed.__code__ = pages_needed_spec.__code__"),
    "copy_of_the_specification": ("return len({n // page_size for n in range(length)})", ""),
    "specification_by_its_name": ("return globals()['pages_needed' + '_spec'](length, page_size)", ""),
    "specification_put_together": (
        "return pages_needed.__globals__['pages_needed' + '_sp' + 'ec'](length, page_size)", ""),
    "specification_kept": ("return KEPT[0](length, page_size)", "KEPT = [value for name, value in globals().items() "
                           "if name.startswith('pages_needed_s')]"),
    "eval": ("return eval('pages' + '_needed_sp' + 'ec')(length, page_size)", ""),
    "grader": ("from pkv.course.graders.ex00 import pages_needed as it\nreturn it(length, page_size)", ""),
    "grader_by_its_name": ("import importlib\nreturn importlib.import_module('pkv.course.graders.ex00')", ""),
    "frames": ("import sys\nreturn sys._getframe(1).f_locals", ""),
    "memory": ("import gc\nreturn len(gc.get_objects())", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SHORTCUTS)
def test_what_is_not_ones_own_work_fails(name, tmp_path):
    report = graded(tmp_path, *SHORTCUTS[name])
    assert not report.is_correct
    assert report.diagnosis == "shortcut", as_text(report)


READY_MADE = """
import torch.nn.functional as F
length, n_kv_heads, _ = k.shape
group = q.shape[0] // n_kv_heads
k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
out = {attention}(q[:, None], k.transpose(0, 1), v.transpose(0, 1), scale=scale)[:, 0]
return out, torch.logsumexp(scale * torch.einsum("hd,thd->ht", q, k), 1)
"""


@pytest.mark.parametrize(
    "attention", ["F.scaled_dot_product_attention", "vars(F)['scaled_dot_' + 'product_attention']"]
)
def test_ready_made_attention_is_found_whatever_it_is_called(attention, tmp_path):
    report = graded(tmp_path, READY_MADE.format(attention=attention), task_id="ex00_4")
    assert report.diagnosis == "shortcut", as_text(report)


def test_a_process_holds_no_right_answer(tmp_path):
    body = """
    import gc, sys
    functions = [one for one in gc.get_objects() if type(one).__name__ == "function"]
    return sorted({*sys.modules, *(str(one.__module__) for one in functions)})
    """
    handed_in(tmp_path, "ex00_1", body)
    (answer,) = ask_apart(find_task("ex00_1"), tmp_path, [{"length": 3, "page_size": 4}])
    assert "pkv.course.answering" in answer.value
    assert [name for name in answer.value if GRADERS.match(name) or "solutions" in name or "mutants" in name] == []


GATHERED = "p = pages.shape[1]\nx = pages[block_table[row, :-(-length // p)].long()].flatten(0, 1)[:length]\n"
TOKENS = "p = pages.shape[1]\ntokens = [pages[block_table[row, t // p], t % p] for t in range(length)]\n"
UNUSUAL = {
    "a_numpy_int": ("ex00_1", "import numpy\nreturn numpy.int64(-(-length // page_size))"),
    "a_tensor_for_an_int": ("ex00_1", "return torch.tensor(-(-length // page_size))"),
    "ceil": ("ex00_1", "import math\nreturn math.ceil(length / page_size)"),
    "a_variable_called_as_a_shortcut": ("ex00_1", "decode = solutions = -(-length // page_size)\nreturn decode"),
    "a_tensor_for_a_float": ("ex00_5", "return torch.tensor(flop / n_bytes, dtype=torch.float64)"),
    "a_fraction": ("ex00_5", "from fractions import Fraction\nreturn Fraction(flop, n_bytes)"),
    "float32": ("ex00_5", "return torch.tensor(flop / n_bytes).item()"),
    "prints": ("ex00_5", "print('x' * 100)\nreturn flop / n_bytes"),
    "a_list_for_a_tensor": ("ex00_3", TOKENS + "return [token.tolist() for token in tokens] or pages[0, :0]"),
    "a_tuple_of_tensors": ("ex00_3", TOKENS + "return tuple(tokens) or pages[0, :0]"),
    "numpy": ("ex00_3", GATHERED + "return x.numpy()"),
    "a_view_with_strides": ("ex00_3", GATHERED + "return x.transpose(0, 2).contiguous().transpose(0, 2)"),
    "a_parameter": ("ex00_3", GATHERED + "return torch.nn.Parameter(x)"),
    "a_list_for_a_pair": ("ex00_4", "k = k.repeat_interleave(q.shape[0] // k.shape[1], 1)\n"
                          "v = v.repeat_interleave(q.shape[0] // v.shape[1], 1)\n"
                          "if len(k) == 0: return [torch.zeros_like(q), torch.full(q.shape[:1], -torch.inf)]\n"
                          "s = scale * torch.einsum('hd,thd->ht', q, k)\n"
                          "return [torch.einsum('ht,thd->hd', s.softmax(1), v), s.logsumexp(1)]"),
    "starts_a_thread": ("ex00_1", "import threading, time\nthreading.Thread(target=time.sleep, args=[999]).start()\n"
                        "return -(-length // page_size)"),
    "prints_100_MB": ("ex00_1", "import os\nif length == 3:\n    for _ in range(50): os.write(1, bytes(1 << 20)), "
                      "os.write(2, bytes(1 << 20))\nreturn -(-length // page_size)"),
    "deletes_its_own_folder": ("ex00_1", "import pathlib, shutil\nshutil.rmtree(pathlib.Path(__file__).parent, True)\n"
                               "return -(-length // page_size)"),
    "writes_beside_itself": ("ex00_1", "open('notes.txt', 'a').write('x')\nreturn -(-length // page_size)"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNUSUAL)
def test_right_is_right_in_whatever_form(name, tmp_path):
    task_id, body = UNUSUAL[name]
    report = graded(tmp_path, body, task_id=task_id)
    assert report.is_correct, as_text(report)
    assert [path.name for path in tmp_path.iterdir()] == [FIRST], "an answer works on a copy"


@pytest.mark.parametrize(
    ("encode", "ends"),
    [("utf-8-sig", "\n"), ("utf-8", "\r\n"), ("latin-1", "\n")],
    ids=["byte_order_mark", "windows_line_ends", "latin_1"],
)
def test_files_of_other_editors_are_read(encode, ends, tmp_path):
    text = SOLUTION.replace('"""Exercise', '"""Übung')
    text = f"# -*- coding: {encode.removesuffix('-sig')} -*-\n{text}".replace("\n", ends)
    (tmp_path / FIRST).write_bytes(text.encode(encode))
    report = report_apart(find_task("ex00_1"), tmp_path, 1)
    assert report.is_correct, as_text(report)


@pytest.mark.parametrize(
    ("body", "top", "words"),
    [
        ("while True: pass", "", "no answer within 1 s: does a loop ever end?"),
        (None, "while True: pass", f"importing {FIRST} takes longer than 1 s"),
        ("if length > 3:\n    while True: pass\nreturn -(-length // page_size)", "", "no answer within 1 s"),
    ],
)
def test_what_never_ends_costs_its_seconds_once(body, top, words, tmp_path, waits):
    report = graded(tmp_path, body, top, seconds=SHORT)
    assert not report.is_correct
    assert words in as_text(report)
    assert waits == [SHORT]


def test_a_wrong_answer_that_never_ends_on_smaller_inputs_is_no_trap(tmp_path, waits):
    report = graded(
        tmp_path, "if page_size not in (4, 16): \n    while length == 1 < page_size: pass\nreturn 77", seconds=20
    )
    assert not report.is_correct
    assert waits[0] == 20
    assert set(waits[1:]) == {AGAIN}


def test_processes_left_behind_are_ended(tmp_path):
    """Started so that the guard does not see it, out of its process group's reach, and with the pipe in its hands."""
    body = """
    import ctypes, os, time
    if ctypes.CDLL(None).fork() == 0:
        os.setsid()
        if ctypes.CDLL(None).fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.05)
    return -(-length // page_size)
    """
    pid = server().process.pid
    before = set(children_of(pid))
    report = graded(tmp_path, body, seconds=5)
    assert all(line.holds for line in report.lines if line.name != OWN_WORK), as_text(report)
    assert server().process.pid == pid
    assert set(children_of(pid)) == before


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_server_that_was_killed_is_replaced(tmp_path):
    before = server().process.pid
    report = graded(tmp_path, "import ctypes, os\nctypes.CDLL(None).kill(os.getppid(), 9)\nreturn 1")
    assert not report.is_correct
    assert server().process.pid != before
    assert graded(tmp_path).is_correct


def test_a_servers_folder_is_empty_between_requests(tmp_path):
    assert graded(tmp_path, "import os\nos.makedirs('a/b')\nreturn -(-length // page_size)").diagnosis == "kept"
    assert os.listdir(server().folder.name) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("held = []\nwhile True: held.append(bytes(1 << 24))", "it takes too much memory"),
        ("return torch.zeros(1 << 25)", "an answer is too large: more than 64 MiB"),
        ("return torch.zeros(1 << 40)", "raises RuntimeError"),
        ("return 'x' * (1 << 27)", "an answer is too large"),
    ],
)
def test_memory_has_an_end(body, words, tmp_path):
    report = graded(tmp_path, body, seconds=60)
    assert not report.is_correct
    assert words in as_text(report), as_text(report)


def test_answers_come_as_bytes_that_hold_no_code_and_no_more_memory_than_they_are():
    values = [1, 2.5, "x", None, True, [torch.arange(3), torch.ones(2, 0, 3)], {"a": torch.tensor(1.5).bfloat16()}]
    again = unpacked(packed(values))
    assert plain(again)[:5] == values[:5]
    assert torch.equal(again[5][0], values[5][0])
    assert again[5][1].shape == (2, 0, 3)
    assert again[6]["a"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text",
    [
        b'{"dtype": "float32", "shape": [1000000000]}', b'{"dtype": "object", "shape": [1]}', b'{"dtype": "int8"}',
        b'{"dtype": "float32", "shape": [-1]}', b'{"dtype": "int8", "shape": [true, "x"]}', b"[" * 100_000, b"[",
        b'{"dict": 3}', b"\xff", b"", b'{"dtype": "float32", "shape": [0, 1000000000000000000000000000000]}',
        b'{"dtype": "float32", "shape": [0, 4611686018427387904, 4611686018427387904]}', b"[" * 400 + b"]" * 400,
    ],
    ids=range(13),
)  # fmt: skip
def test_bytes_that_are_no_answer_are_refused(text):
    with pytest.raises(ValueError):  # noqa: PT011 (of whatever kind)
        unpacked(HEAD.pack(len(text), len(text)) + text)


@pytest.mark.parametrize("value", [None, 3, [], {"stop": 3}, {"stop": [1, 2]}, {"raised": []}, {"value": 1}, {}])
def test_whatever_comes_is_an_answer_or_a_stop(value):
    assert isinstance(replies.answer_in(value), Answer | Stop)


ONES = torch.ones(2)  # neither true nor false


@pytest.mark.parametrize(
    "value", [ONES, {"loaded": ONES}, {"value": 1, "changed": ONES, "printed": ""}, {"stop": [ONES, ONES, ONES]}]
)
def test_an_answer_that_writes_its_replies_itself_cannot_end_its_judge(value):
    parts = [packed(one) for one in ({"started": True}, value, value, value)]
    for n in range(len(parts) + 1):
        given = replies.answers_of(parts[:n], replies.ENDED, 0, 2, "file.py", 1.0)
        assert any(isinstance(one, Stop) for one in given)


def test_what_an_answer_says_of_itself_is_one_short_line():
    stop = replies.answer_in({"stop": ["not started", "\x1b[2J\n" + "x" * 10_000, 1]})
    assert len(stop.text) <= replies.MOST_TEXT
    assert stop.text.isprintable()


def asked(function, seconds=5.0):
    """The answers of a function that is asked in a fork of this process, as in a notebook."""
    return ask_child(Question.of(find_task("ex00_1")), lambda: function, [(3, 4), (5, 4)], "", seconds)


def right(length, page_size):
    return -(-length // page_size)


def test_a_fork_of_an_answer_answers_nothing():
    """Else each question would have two answers, and the second one's would count for the next question."""

    def forks(length, page_size):
        if length == 5:
            time.sleep(0.5)
        elif os.fork() == 0:
            time.sleep(0.1)
        return right(length, page_size)

    assert [answer.value for answer in asked(forks)] == [1, 2]


@pytest.mark.parametrize("ask", ["in a fork", "apart"])
def test_answers_come_where_children_are_not_waited_for(ask, tmp_path):
    """As in a process that was started with SIGCHLD ignored."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    close_server()
    try:
        if ask == "in a fork":
            assert [answer.value for answer in asked(right)] == [1, 2]
            assert "ended before it answered" in asked(lambda length, page_size: os._exit(3))[0].text
        else:
            report = graded(tmp_path, "import os\nos._exit(3)")
            assert "ended before it answered (exit code 3)" in as_text(report)
    finally:
        close_server()
        signal.signal(signal.SIGCHLD, before)


TWO = Task(
    id="ex00_1", title="twice", function="twice", lines=1, arguments=lambda spec: (spec["n"],), right=lambda n: 2 * n,
    properties=(Property("small", lambda rng: [{"n": 1}]), Property("large", lambda rng: [{"n": 50}, {"n": 60}])),
    mistakes=(Mistake("three", "takes it three times", lambda n: 3 * n),),
)  # fmt: skip


@pytest.mark.parametrize("n_answers", [0, 1, 2])
def test_answers_that_are_missing_count_as_wrong(n_answers):
    report = judge(TWO, lambda specs: [Answer(2), Answer(100)][:n_answers], 1, set())
    assert not report.is_correct
    assert report.diagnosis is None
    assert "some answers are missing" in as_text(report)


def test_more_answers_than_questions_count_for_nothing():
    assert judge(TWO, lambda specs: [Answer(2 * spec["n"]) for spec in specs] + [Answer(0)], 1, set()).is_correct


@pytest.mark.parametrize(
    ("right", "got", "tolerance"),
    [
        (torch.tensor([[1000.0, 1000.0], [1.0, 2.0]]), torch.tensor([[1000.0, 1000.0], [1.0, 2.05]]), 1e-4),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), 1e-4),
        (torch.tensor([1.0]), torch.tensor([torch.inf]), 1e9),
        (torch.tensor([-torch.inf]), torch.tensor([torch.inf]), 1e-4),
        (torch.tensor([2**60 + 1]), torch.tensor([2**60]), 0.0),
        (1.0, True, 1e-4),
        (1.0, 10**400, 1e9),
        (-1.0, -(10**400), 1e9),
        (True, 1, 0.0),
        (1.0, float("nan"), 1e9),
        ([1, 2], [1], 0.0),
        ({"a": 1}, {"a": 1, "b": 2}, 0.0),
        (torch.zeros(2), torch.zeros(2, dtype=torch.complex64), 0.0),
        (torch.zeros(2, 2), torch.zeros(4), 0.0),
    ],
)
def test_what_differs_is_seen(right, got, tolerance):
    assert difference(plain(right), plain(got), tolerance) is not None
