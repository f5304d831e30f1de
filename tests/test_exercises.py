"""What makes the tasks of all exercises a course: statements, cases that show mistakes, solutions, graders, budgets."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest
import torch

import pkv
from pkv.course import telling
from pkv.course.answering import BROKEN, Answer, Question, Stop, answers, ask, function_of, load
from pkv.course.catalogue import all_tasks, file_of, find_task
from pkv.course.checking import as_text, failure, report_apart
from pkv.course.comparing import agree, difference, plain
from pkv.course.coursefiles import material
from pkv.course.diagnosing import wrong_answer
from pkv.course.forks import Server
from pkv.course.glossary import WORDS, meaning_of, needs_words
from pkv.course.graders import asking
from pkv.course.graphs import Watch
from pkv.course.home import unsolved
from pkv.course.judging import NOT_STARTED, judge
from pkv.course.meaning import first_line
from pkv.course.sending import received, sent
from pkv.course.tasks import Mistake, Property, Raised, Task
from pkv.course.telling import KEPT
from pkv.tile import LOG2_E

TASKS = all_tasks()
SEEDS = (1, 2)
LARGEST_FOR_SPECS = 10**6
MOST_STEPS = 125  # about a hundred, each some milliseconds
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.id)


@pytest.fixture(scope="module")
def skeletons(tmp_path_factory) -> Path:
    """Exercises as the course brings them, whatever this clone's reader has made of exercises/."""
    folder = tmp_path_factory.mktemp("skeletons")
    for name, text in unsolved().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@every_task
def test_a_solution_passes_and_a_skeleton_fails(task, skeletons):
    solved = report_apart(task, material("solutions"), SEEDS[0])
    assert solved.is_correct, as_text(solved)
    untouched = report_apart(task, skeletons, SEEDS[0])
    assert untouched.state == NOT_STARTED, as_text(untouched)
    assert not any(line.holds for line in untouched.lines)


def test_files_of_one_name_in_two_folders_are_two(skeletons):
    """Twice in turn, so that nothing of the one is left when the other is graded."""
    (task, *_) = TASKS
    for _ in range(2):
        assert report_apart(task, material("solutions"), 1).is_correct
        assert not report_apart(task, skeletons, 1).is_correct


def is_small(value):
    """Slow and plain specifications count to whatever the numbers are."""
    if isinstance(value, dict | list | tuple):
        return all(map(is_small, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or value < LARGEST_FOR_SPECS


def split_by_split(module):
    """ex01_4's answer by its specification, which is of one split and one KV head."""

    def attend(q, cache, splits, tile, scale):
        outs, lses = torch.zeros(q.shape), torch.full(q.shape[:2], -torch.inf)
        lengths = cache.lengths.tolist()
        for row, length in enumerate(lengths):
            k, v = (side.float() for side in cache.gather(row))
            for kv_head, query in enumerate(q[row].float().chunk(cache.n_kv_heads)):
                states = [
                    module.attend_split_spec(query.T, k[:, kv_head], v[:, kv_head], begin, end, scale * LOG2_E)
                    for begin, end in module.split_bounds_spec(max(lengths), length, splits, tile)
                ]
                heads = slice(kv_head * len(query), (kv_head + 1) * len(query))
                outs[row, heads], lses[row, heads] = module.merge_many_spec(
                    torch.stack([out.T for out, _ in states]), torch.stack([lse for _, lse in states])
                )
        return outs, lses

    return attend


def into_one_tensor(module):
    """ex05_6's specification decodes anew each time; what is asked for stays where it is."""

    def capture(q, cache):
        out, decode = torch.empty_like(q), module.capture_spec(q, cache)
        return lambda: out.copy_(decode())

    return capture


OTHERWISE = {"ex01_4": split_by_split, "ex05_6": into_one_tensor}


@every_task
def test_a_specification_gives_the_right_answers(task, monkeypatch):
    """Simply called, or as the task calls its function. It launches no kernel of the task's, and replays no graph."""
    monkeypatch.setattr(asking, "must_launch", lambda n_launches: None)
    monkeypatch.setattr(Watch, "launch", lambda watch, launch, *given, **named: launch(*given, **named))
    module = load(file_of(material("solutions"), task.exercise))
    name = next((name for name in (f"{task.function}_spec", f"{task.writes}_spec") if hasattr(module, name)), "")
    specification = OTHERWISE[task.id](module) if task.id in OTHERWISE else getattr(module, name)
    specs = [(prop, spec) for prop, spec in task.specs(SEEDS[0]) if is_small(spec)]
    for call in (None, task.call):
        question = Question("", "", (), call, frozenset())
        # what is asked of a kernel besides its answer stands in later properties
        asked = [spec for prop, spec in specs if call is None or prop is task.properties[0] or task.id in OTHERWISE]
        given = [ask(question, specification, task.arguments(spec)).value for spec in asked]
        if not any(isinstance(answer, Raised) or answer is None for answer in given):
            break
    for spec, answer in zip(asked, given, strict=True):
        fault = difference(plain(task.case(spec).right), answer, task.tolerance, task.axes)
        assert fault is None, (spec, fault)


@every_task
def test_a_task_is_stated(task):
    module = load(file_of(material("solutions"), task.exercise))
    statements = [
        value.__doc__ or ""
        for value in (getattr(entry, "fn", entry) for entry in vars(module).values())
        if getattr(value, "__doc__", None) and str(value.__doc__).startswith(f"{task.id}: ")
    ]
    assert statements, f"no docstring begins with {task.id}"
    assert any("hand" in text for text in statements), "an example worked by hand"
    assert any(re.search(r"\blines?\b", text) for text in statements), "about how many lines to write"
    assert task.title
    assert task.title[0].islower() or not task.title[0].isalpha()
    assert task.points in (2, 4, 6)
    assert 1 <= task.lines <= 40
    assert 3 <= len(task.properties) <= 8
    assert len({prop.name for prop in task.properties}) == len(task.properties)
    assert all(mistake.name and mistake.says and (mistake.wrong or mistake.shows) for mistake in task.mistakes)
    assert len({mistake.name for mistake in task.mistakes}) >= 3


def test_there_is_a_course_of_them():
    assert len({task.id for task in TASKS}) == len(TASKS)
    assert [task.id for task in TASKS] == sorted(task.id for task in TASKS)
    for exercise in {task.exercise for task in TASKS}:
        assert 3 <= sum(task.exercise == exercise for task in TASKS) <= 6
    assert 20 <= len(TASKS) <= 40


@every_task
def test_other_seeds_give_other_cases_and_one_seed_the_same(task):
    specs = [[spec for _, spec in task.specs(seed)] for seed in (*SEEDS, SEEDS[0])]
    assert specs[0] == specs[2]
    assert specs[0] != specs[1]
    counts = {prop.name: sum(owner is prop for owner, _ in task.specs(SEEDS[0])) for prop in task.properties}
    assert min(counts.values()) >= 1, counts


@every_task
def test_questions_travel_without_right_answers(task):
    """Arguments are made here and sent; what is asked there brings no grader's file along."""
    for _, spec in task.specs(SEEDS[0])[:2]:
        received(sent((Question.of(task), task.arguments(spec))))


@every_task
def test_every_known_mistake_shows_in_the_cases(task):
    """Who makes it fails, and no mistake is, on all inputs, another one by another name."""
    cases = [task.case(spec) for seed in SEEDS for _, spec in task.specs(seed)]
    right = [plain(case.right) for case in cases]
    mistakes = [mistake for mistake in task.mistakes if not mistake.shows]
    wrong = functools.cache(lambda number, index: wrong_answer(task, mistakes[number], cases[index]))

    def differ(one, other):
        return any(not agree(one(index), other(index), task.tolerance) for index in range(len(cases)))

    for number, mistake in enumerate(mistakes):
        mine = functools.partial(wrong, number)
        assert differ(right.__getitem__, mine), f"{mistake.name} gives right answers"
        for before, other in enumerate(mistakes[:number]):
            same = mistake.name != other.name and not differ(functools.partial(wrong, before), mine)
            assert not same, f"{mistake.name} is {other.name} by another name"


@pytest.mark.parametrize("seed", [SEEDS[0], *(pytest.param(seed, marks=pytest.mark.slow) for seed in SEEDS[1:])])
@every_task
def test_a_check_is_within_the_interpreters_budget(task, seed, steps):
    given = list(answers(task, function_of(task, material("solutions")), [spec for _, spec in task.specs(seed)]))
    assert len(given) == len(task.specs(seed))
    assert steps.count <= MOST_STEPS


def test_steps_are_counted(steps):
    """Rows of 20 and 7 tokens, tiles of 16: one half of the programs has two tiles, the other one."""
    k, v = torch.randn(2, 2, 20, 2, 16)
    cache = pkv.PagedKVCache.from_dense(k, v, lengths=[20, 7], page_size=16)
    pkv.decode(torch.randn(2, 4, 16), cache, stage="row_local", splits=1, tile=16)
    assert len(steps.tiles) >= 4
    assert steps.count == 3 * len(steps.tiles) // 2


def test_kernels_are_among_the_tasks(steps):
    kernels = [task for task in TASKS if task.kernel]
    assert kernels
    for task in kernels[:1]:
        list(answers(task, function_of(task, material("solutions")), [task.specs(1)[0][1]]))
    assert steps.tiles, "a kernel task launches programs"


def test_a_judgement_asks_once_of_a_process_that_runs_already(monkeypatch):
    """Starting one takes seconds, a fork of it some milliseconds."""
    (task, *_) = TASKS
    report_apart(task, material("solutions"), 1)
    called = []
    for name in ("start", "ask"):
        method = getattr(Server, name)

        def spied(*given, name=name, method=method):
            called.append(name)
            return method(*given)

        monkeypatch.setattr(Server, name, spied)
    report_apart(task, material("solutions"), 2)
    assert called == ["ask"]


ONLY_TL = "inside of a kernel only tl's functions work, not those of torch, numpy or math"
SHAPES = "shapes do not fit: axes are compared from the last one on, and [:, None] or [None, :] adds one"
LOADS, LARGEST = "tl.load(offsets + row), tl.load(offsets + row + 1)", "tl.max(scores, 0)"
IN_KERNELS = [  # of ex01_5 or ex01_4: what is put in the place of what, and what is said of that
    (LOADS, "offsets[row], offsets[row + 1]",
     "TypeError: 'int' object is not iterable, line LINE: a kernel reads memory with tl.load(pointer + offset), not "
     "with [...]; there offsets is a pointer to int32, row is a number (int32)"),
    (LOADS, "offsets, torch.exp(offsets)",
     "TypeError: exp(): argument 'input' (position 1) must be Tensor, not tensor, line LINE: " + ONLY_TL
     + ": use tl.exp; there offsets is a pointer to int32"),
    (LARGEST, "scores.no_such_thing()",
     "AttributeError: 'tensor' object has no attribute 'no_such_thing', line LINE: there running_max is a "),
    (LARGEST, "torch.max(scores, 0)", "but expected one of: * (Tensor input, "),
    (LARGEST, "torch.max(scores, 0)", f"..., line LINE: {ONLY_TL}: use tl.max; there running_max is a block [8]"),
    (LARGEST, "np.max(scores)", f", line LINE: {ONLY_TL}: use tl.max; there running_max is a block [8]"),
    (LARGEST, "scores[0]", "'int' object is not iterable, line LINE: a block's numbers are not taken out by [...]"),
    (LARGEST, "torch.no_such_thing", "AttributeError: module 'torch' has no attribute 'no_such_thing', line LINE: "),
    (LARGEST, "torch.zeros(8)", f", line LINE: {ONLY_TL}: use tl.zeros; there running_max is a block [8]"),
    ("multiply(k, query)", "(k @ query)", ", line LINE: a kernel has no @: use the given multiply(a, b); there "),
    ("exists[:, None]", "exists", f"incompatible dimensions at index 1: 16 and 8, line LINE: {SHAPES}; there exists"),
    ("running_sum = tl.zeros([BLOCK_H], tl.float32)", "running_sum = tl.zeros([BLOCK_H])",
     "TypeError: zeros() missing 1 required positional argument: 'dtype', line LINE: zeros() is called with other "
     "arguments than it takes; there BLOCK_H is "),
    ("tl.zeros([BLOCK_D], tl.float32)", "tl.zeros([BLOCK_D])", "missing 1 required positional argument: 'dtype', line "
     "LINE: zeros() is called with other arguments than it takes; there BLOCK_D is "),
    ("running_max = new_max\n        total", "running_max = other = new_max\n        total",
     "Multiple assignments are not supported, line LINE: a kernel takes one assignment a line: a = c, and in the "),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "words"), IN_KERNELS)
def test_what_a_kernel_raises_is_named_and_explained_and_not_what_wraps_it(old, new, words, tmp_path):
    path = file_of(material("solutions"), "ex01")
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    at = text.index(old)
    (tmp_path / path.name).write_text(text.replace(old, new, 1), encoding="utf-8")
    task = find_task("ex01_4" if at < text.index("def attend_split_spec") else "ex01_5")
    said = report_apart(task, tmp_path, 1).lines[0].text
    line = text[:at].count("\n") + 1
    found = int(re.search(r", line (\d+): ", said)[1])
    assert found in (line, line + 1)  # the interpreter's count is its own
    assert words.replace("LINE", str(found)) in said


def test_a_message_that_ends_with_a_colon_goes_on_and_another_is_its_first_line():
    assert first_line(ValueError("one of these:\n  a\n  b")) == "one of these: a b"
    assert first_line(ValueError("one\ntwo:\n")) == "one"
    assert first_line(ValueError("")) == ""
    assert first_line(ValueError("x" * 1000)).endswith("xx...")


SCALE = "; there scale is 0.3"
EMPTY = "there is nothing to take the largest of, or the smallest: it is empty"
EXPLAINED = {  # what attend_row(q, k, v, scale) returns, and what is said of that
    "q[:2] + k[0]": f"{SHAPES}; there q is a tensor [3, 8] of float32, k is a tensor [1, 3, 8] of float32",
    "range(scale)": f"a count or an index is an int: / gives a float, // an int{SCALE}",
    "[*scale]": f"one value stands where several are taken apart{SCALE}",
    "scale[0]": f"it has fewer axes than are indexed{SCALE}",
    "len(scale)": f"it is one value, and no list{SCALE}",
    "max(q, k[0])": "`if`, `and` and max() want one truth, and here are many: torch.where, & and torch.maximum",
    "k[len(k)]": "an index goes past the end: n entries are 0 to n - 1; there k is a tensor [1, 3, 8] of float32",
    "k[q]": "what is used as an index must be an int, or a tensor of them: .long(); there k is a tensor",
    "q.double() @ k[0].T": "two dtypes meet: .to(...) makes one; there q is a tensor",
    "q(k)": "what is called here is no function: is a name used twice, or an operator missing?",
    "{}.get(scale).exp()": f"something is None: does what gives it lack a `return`?{SCALE}",
    "sums; sums = 0": "it is used before it is given a value: on every way through the function?",
    "nowhere": "nothing in the file has that name there",
    "1 // 0": "it divides by 0: what of a row without tokens?",
    "attend_row(q)": "attend_row() is called with other arguments than it takes",
    "attend_row(q, q=q)": "attend_row() is called with other arguments than it takes",
    "q.sum(q=q)": "sum() is called with other arguments than it takes",
    "k[:0].amax(0)": EMPTY,
    "k[:0].max()": EMPTY,
    "max(())": EMPTY,
    "[].pop()": "there is nothing left to take: it is empty",
    "q.sum(2)": "it has no such axis: n axes are 0 to n - 1, or from the end -1 to -n; there q is a tensor [3, 8]",
    "__import__('numpy').zeros(0).max()": EMPTY,
    "attend_row(q, k, v, scale)": "it calls itself without end",
}


def answer_of(tmp_path, statement):
    """The function attend_row of a file, with one line in it."""
    path = tmp_path / "ex00.py"
    path.write_text(f"def attend_row(q, k, v, scale):\n    {statement}\n")
    return load(path).attend_row


@pytest.mark.parametrize("returned", EXPLAINED)
def test_what_python_says_is_explained(returned, tmp_path):
    said = judged(find_task("ex00_4"), answer_of(tmp_path, f"return {returned}")).lines[0].text
    assert re.search(r"raises \w+: .*, line 2: ", said)
    assert EXPLAINED[returned] in said


def test_a_head_that_was_changed_is_said_to_be_the_exercises_own(tmp_path):
    for function in (lambda q: q, lambda q, *, key: q, lambda: None):
        said = judged(find_task("ex00_4"), function).lines[0].text
        assert "the exercise calls <lambda>() with other arguments than stand in its head, which must stay as" in said


def test_what_is_not_known_is_not_explained(tmp_path):
    said = judged(find_task("ex00_4"), answer_of(tmp_path, "raise ValueError('mine')")).lines[0].text
    assert said.endswith(": raises ValueError: mine, line 2")


# --- what is said of a wrong answer ---


def judged(task, function, shrinks=True):
    """The report of a function that answers in this process."""
    return judge(task, lambda specs: list(answers(task, function, specs)), 1, set(), shrinks=shrinks)


POWERS = Task(
    id="ex00_1", title="cubes", function="cube", lines=1, arguments=lambda spec: (spec["n"],), right=lambda n: n**3,
    properties=(
        Property("small", lambda rng: [{"n": 2}, {"n": 3}, {"n": 9}]),
        Property("two", lambda rng: [{"n": 2}]),
        Property("large", lambda rng: [{"n": 50}, {"n": 60}]),
    ),
    mistakes=(
        Mistake("doubles", "doubles it", lambda n: 2 * n),
        Mistake("squares", "squares it", lambda n: n * n),
    ),
)  # fmt: skip


def test_one_exception_is_said_once(tmp_path):
    report = judged(find_task("ex00_4"), answer_of(tmp_path, "raise ValueError('the very same')"))
    first, *others = [line.text for line in report.lines[:-1]]
    assert "raises ValueError: the very same" in first
    assert others == ['the same as under "out and lse of a few tokens"'] * len(others)
    assert as_text(report).count("the very same") == 1
    assert f'✗ {len(others)} properties: the same as under "out and lse of a few tokens"\n' in as_text(report)
    assert [failure(report, line).count("hint 1") for line in report.lines[:-1]] == [1] + [0] * len(others)


def test_one_mistake_is_said_once_and_so_is_an_answer_of_none():
    report = judged(find_task("ex00_2"), lambda length, page_size: -length % page_size)
    assert as_text(report).count("free slots") == 1
    assert [line.diagnosis for line in report.lines[:2]] == ["free_slots"] * 2
    assert report.lines[1].text == 'the same as under "a part-filled last page counts"'
    assert as_text(judged(find_task("ex00_2"), lambda *given: None)).count("`return`") == 1


def test_what_differs_from_property_to_property_is_said_of_each():
    report = judged(find_task("ex00_1"), lambda length, page_size: 1000 + length)
    assert [line.text.count("expected") for line in report.lines[:-1]] == [1, 1, 1, 0]
    report = judged(POWERS, lambda n: 1 // 0 if n == 2 else n.another)
    assert [line.text.count("raises") for line in report.lines[:-1]] == [1, 0, 1]


def test_steps_are_not_judged_of_wrong_numbers_but_of_right_ones():
    """Whether the mistake has a name, or not; one wrong number is shown, in whatever property."""
    for wrong in (lambda length, page_size: 1000 + length, lambda length, page_size: length // page_size + 1):
        report = judged(find_task("ex00_1"), wrong)
        assert report.lines[3].text == "not judged until the numbers are right"
        assert not report.lines[3].holds
    report = judged(
        find_task("ex00_1"), lambda length, page_size: 7 if 500 <= length < 900 else -(-length // page_size)
    )
    assert report.lines[3].text.endswith("got 7")
    report = judged(find_task("ex00_1"), lambda length, page_size: sum(1 for _ in range(0, length, page_size)))
    assert report.lines[3].text.startswith("loops over tokens or pages: the task is to do without; for length = ")


def test_of_many_faults_without_a_name_the_first_is_shown_in_full():
    """Of the others what is another input, and one number. Nothing else is said of them."""
    report = judged(find_task("ex02_1"), lambda length, n_splits, tile: [(3, 5)] * n_splits, shrinks=False)
    assert report.diagnosis is None
    assert [line.text.count("expected") for line in report.lines] == [1, 1, 1, 1, 0]
    for line in report.lines[1:4]:
        assert re.search(r": split \d+, bound \d+: expected \d+, got [35]$", line.text), line.text
    table = dataclasses.replace(
        POWERS, right=lambda n: [[n, n]] * 3, mistakes=(), arguments=lambda spec: (spec["n"],),
        properties=tuple(
            Property(f"of {n}", lambda rng, n=n: [{"n": n, "rows": [[1] * 10] * 4, "pages": [[2] * 10] * 4}])
            for n in (1, 2)
        ),
    )  # fmt: skip
    first, second, _ = judged(table, lambda n: [[n, -1]] * 3, shrinks=False).lines
    assert first.text.startswith("for n = 1, rows = [[1, 1")
    assert second.text == "for n = 2 (else as above): entry 0, entry 1: expected 2, got -1"


def test_where_answers_end_the_input_is_said_first():
    """Also where an earlier input of the same property has a wrong answer."""

    def ask_until(end):
        return lambda specs: (
            [Answer(-1 if spec["n"] == 2 else spec["n"] ** 3) for spec in specs[:end]]
            + [Stop(BROKEN, "no answer within 60 s", asked=True)]
        )

    for end, words in ((2, "for n = 9"), (4, "for n = 50")):
        out = as_text(judge(POWERS, ask_until(end), 1, set()))
        assert f"{words}: no answer within 60 s" in out
        assert out.count("within 60 s") == 1
        assert out.index("within 60 s") < out.find("not asked any more") or end == 4
    report = judge(POWERS, ask_until(0), 1, set())
    assert "helps" in as_text(report)
    first, *others = (failure(report, line) for line in report.lines)
    assert first.startswith("ex00_1 small: for n = 2: no answer within 60 s\nhint 1 of 3: ")
    assert others == ['ex00_1 two: the same as under "small"', 'ex00_1 large: the same as under "small"']


def test_what_is_named_is_not_said_again():
    ready = judged(
        find_task("ex00_4"), lambda q, k, v, scale: torch.nn.functional.scaled_dot_product_attention(q, k, v)
    )
    text = as_text(ready)
    assert text.count("scaled_dot_product_attention") == 1
    assert "✗ it is your own work: no ready-made attention, and not the task's own specification: scaled_dot_" in text
    assert "5 properties: not judged: it is not your own work" in text
    loops = judged(find_task("ex00_1"), lambda length, page_size: sum(1 for _ in range(0, length, page_size)))
    assert as_text(loops).count("loop") == 2, "in the property's name, and in the mistake's"
    assert "raises" not in as_text(loops)
    empty = judged(find_task("ex00_3"), lambda pages, table, row, n: torch.stack(
        [pages[table[row, t // pages.shape[1]], t % pages.shape[1]] for t in range(n)]))  # fmt: skip
    (line,) = (line for line in empty.lines if line.name == "an empty row")
    assert "fails for a row without tokens" in line.text
    assert "raises RuntimeError: stack expects a non-empty TensorList, line " in line.text
    assert "there " not in line.text


def test_tuples_are_shown_as_the_statement_has_them():
    """Whatever the answer's are: lists, or tuples that have travelled."""
    task = find_task("ex02_1")
    for kind in (tuple, list):
        text = judged(task, lambda length, n, tile, kind=kind: [kind((0, 16, 7))] * n, shrinks=False).lines[0].text
        assert text.endswith(": split 0: expected 2 entries, (0, 16), got 3, (0, 16, 7)")
        text = judged(task, lambda length, n, tile, kind=kind: [kind((0, 16))], shrinks=False).lines[0].text
        assert text.endswith(": expected 2 entries, [(0, 16), (16, 40)], got 1, [(0, 16)]")
    assert difference(plain((1,)), [2], 0.0) == "expected (1,), got (2,)"
    assert difference(plain([1, 2]), plain((2, 1)), 0.0) == "expected [1, 2], got [2, 1]"
    assert difference(plain({"a": (1, 2)}), plain({"a": [1, 3]}), 0.0) == "a: expected (1, 2), got (1, 3)"


def test_values_that_nobody_has_asked_for_are_no_list():
    for wrong in (lambda *given: (pair for pair in [(0, 1)]), lambda *given: zip([0], [1])):
        out = as_text(judged(find_task("ex02_1"), wrong))
        assert out.count("whose values nobody has asked for: return a list") == 1
        assert "3 properties: the same as under" in out


def test_the_mistake_that_explains_the_most_is_named_and_shown_where_no_other_is_alike():
    """2 squared is 2 doubled. One answer is wrong in another way, so that no mistake explains them all."""
    report = judged(POWERS, lambda n: 7 if n == 50 else n * n)
    assert [line.diagnosis for line in report.lines[:3]] == ["squares", "squares", None]
    assert report.diagnosis == "squares"
    assert report.lines[0].text == "squares it; for n = 3: expected 27, got 9"


@pytest.mark.parametrize("shrinks", [True, False])
def test_what_an_answer_keeps_from_call_to_call_is_told_from_what_it_does_wrong(shrinks):
    """As a list that is a default argument does; whoever is asked anew has a new one."""

    def judged_anew(make):
        return judge(POWERS, lambda specs: list(answers(POWERS, make(), specs)), 1, set(), shrinks=shrinks)

    def summing(kept):
        return lambda n: kept.append(n**3) or sum(kept)

    report = judged_anew(lambda: summing([]))
    assert report.diagnosis == KEPT.name
    assert "default argument" in report.lines[0].text
    assert report.lines[0].text.endswith("for n = 3: expected 27, got 35")
    assert {line.text for line in report.lines[1:3]} == {'the same as under "small"'}
    assert judged_anew(lambda: lambda n: 7 if n == 50 else n * n).diagnosis == "squares"
    assert judged_anew(lambda: lambda n: n**3 + (n > 2)).diagnosis is None


def test_a_smaller_input_shows_no_other_mistake():
    """Of an unknown mistake, too: 2 and 2 is 2 doubled."""
    report = judged(dataclasses.replace(POWERS, properties=POWERS.properties[::2]), lambda n: n + 2)
    assert report.diagnosis is None
    assert report.lines[0].text == "for n = 3: expected 27, got 5"


@every_task
def test_words_of_inputs_that_no_statement_has_are_explained(task):
    for _, spec in task.specs(SEEDS[0]):
        for word, value in spec.items():
            if needs_words(task, word):
                key, means = meaning_of(task, word, value)
                assert means, (word, value)
                assert not isinstance(value, str) or key.endswith(repr(value)) or word in ("junk", "outside", "trace")


def test_no_word_is_explained_that_no_input_has():
    for place, words in WORDS.items():
        specs = [spec for task in TASKS if task.id.startswith(place) for _, spec in task.specs(SEEDS[0])]
        used = {word for spec in specs for word in spec} | {
            f"{word} = {x!r}" for spec in specs for word, x in spec.items()
        }
        assert set(words) <= used, place


def test_the_words_of_an_input_stand_below_it_and_in_graders_reports():
    report = judged(find_task("ex01_2"), lambda outs, lses: (outs[0] * 0 - 7, lses[0]))
    words = "empty = 'some': each state has no tokens for some heads, those where state + head is a multiple of 3"
    (line,) = (line for line in report.lines if "changes nothing" in line.name)
    assert ("empty = 'some'" in line.text) == (words in failure(report, line))
    text = as_text(report)
    assert text.count("\n    size: lses are random numbers of about 2;") == 1
    assert text.index("empty = 'none': all states have tokens") > text.index(report.lines[0].text)
    assert "head_dim:" not in text
    assert "    group: query heads to a KV head\n" in as_text(judged(find_task("ex00_4"), lambda *given: 1 // 0))


SPEAKS_OF = {  # a property, and what its sentence says of a spec
    ("ex00_1", "a part-filled last page counts"): lambda spec: spec["length"] % spec["page_size"],
    ("ex00_1", "a full page counts once"): lambda spec: spec["length"] % spec["page_size"] == 0,
    ("ex00_3", "a part-filled last page"): lambda spec: spec["length"] % spec["page_size"],
    ("ex00_4", "query head i reads KV head i // G"): lambda spec: spec["group"] > 1,
    ("ex01_2", "a state of no tokens changes nothing, whatever it holds"): lambda spec: spec["n_states"] > 1,
    ("ex01_3", "as far as a shorter row reaches: later splits have no token"):
        lambda spec: 0 < spec["length"] < spec["longest"],
    ("ex02_1", "a row of more tiles than splits is cut at n * s // n_splits"):
        lambda spec: spec["length"] > spec["tile"] * spec["n_splits"],
    ("ex02_1", "a row of fewer tiles than splits: a tile for each split, then the empty ones"):
        lambda spec: 0 < spec["length"] <= spec["tile"] * (spec["n_splits"] - 1),
    ("ex02_4", "empty states are neutral, whatever their memory holds"):
        lambda spec: spec["empty"] == "heads" or max(spec["n_items"]) > 1,
    ("ex03_2", "rows without items have an empty range, wherever they stand"): lambda spec: 0 in spec["items_per_row"],
    ("ex05_2", "more programs than tiles"): lambda spec: spec["n_programs"] > spec["n_tiles"],
    ("ex05_3", "a run crosses rows"): lambda spec: len(spec["lengths"]) > 1 and spec["end"] > spec["begin"],
    ("ex05_4", "more programs than tiles"):
        lambda spec: spec["n_programs"] > sum(-(-n // spec["tile"]) for n in spec["lengths"]),
}  # fmt: skip


@pytest.mark.parametrize(("task_id", "name"), SPEAKS_OF)
def test_the_input_that_is_shown_is_one_that_the_property_speaks_of(task_id, name):
    task = find_task(task_id)
    (prop,) = (prop for prop in task.properties if prop.name == name)
    alone = dataclasses.replace(task, properties=(prop,), mistakes=())
    for seed in range(4):
        spec = judge(alone, lambda specs: [Answer(-77)] * len(specs), seed, set()).shown
        assert SPEAKS_OF[task_id, name](spec), spec


def test_an_input_is_made_as_small_as_it_can_be(monkeypatch):
    monkeypatch.setattr(telling, "SECONDS", 60.0)  # what a slow machine needs

    def wrong(length, page_size):
        return 99 if length > 40 else -(-length // page_size)

    report = judged(find_task("ex00_1"), wrong)
    assert report.shown["length"] == 41
    assert judged(find_task("ex00_1"), wrong, shrinks=False).shown["length"] > 41
