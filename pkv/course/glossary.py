"""What the words of an input mean that stand in no statement: enough to make such an input by hand.

    for lengths = [5], ..., size = 300, scores = 'rising': expected ...
      size: q is so many times random numbers of about 1
      scores = 'rising': all q and k are positive, and K grows from tile to tile, and scores with it

A word means what stands under its task, else under its exercise, else under "". "word = value" goes before the word.
"""

from pkv.course.answering import Question
from pkv.course.tasks import Spec, Task

# Words of the course, and what is not the input's but where it comes from.
PLAIN = {
    "bytes_per_number", "dtype", "head_dim", "length", "lengths", "n_heads", "n_kv_heads", "n_programs", "n_q_heads",
    "n_rows", "n_sms", "n_splits", "n_states", "n_tiles", "page_size", "programs_per_sm", "seed", "splits", "tile",
}  # fmt: skip
STATES_OF_01 = {
    "size": "lses are random numbers of about 2; a size of several hundred is added to those of heads 0, 2, ..., and "
    "taken from those of heads 1, 3, ...",
    "not_below": "nothing is taken from the lses of heads 1, 3, ...: they are about 0",
    "rise": "each state's lse is about so much above that of the state before it",
    "empty = 0": "state 0 has no tokens: its lse is -inf, and its out holds NaN, 7 and inf",
    "empty = 1": "state 1 has no tokens: its lse is -inf, and its out holds NaN, 7 and inf",
    "empty = 'none'": "all states have tokens",
    "empty = 'all'": "no state has tokens: each lse is -inf, each out holds NaN, 7 and inf",
    "empty = 'some'": "each state has no tokens for some heads, those where state + head is a multiple of 3: lse is "
    "-inf there, and out holds NaN, 7 and inf",
    "empty = 'heads'": "for heads 0, 2, ... no state has tokens: lse is -inf there, and out holds NaN, 7 and inf",
    "empty = 'front'": "the first 16 states have no tokens: lse is -inf there, and out holds NaN, 7 and inf",
}
WORDS: dict[str, dict[str, str]] = {
    "": {
        "alone": "the memory of an argument ends with its last number",
        "group": "query heads to a KV head",
        "size": "q is so many times random numbers of about 1, so that scores grow as large",
    },
    "ex00_3": {
        "n_rows": "the last row is asked for; each row before it has page_size + 1 tokens. Rows take pages one after "
        "the other, in a random order of all pages, and two pages are nobody's. The table has an entry more than the "
        "row with the most pages needs; what a row does not need is 2147483647. Token t of row r is a random number "
        "of about 1, plus t + 100 * r",
        "turned": "in memory the pool lies as [page, head, slot, dim]: look at its strides",
    },
    "ex00_4": {"below": "every q is negative and every k positive, so that all scores are far below 0"},
    "ex01": STATES_OF_01,
    "ex01_4": {
        "size": "q is so many times random numbers of about 1, so that scores grow as large",
        "values": "V is so many times random numbers of about 1",
        "scores": "what scores are like from tile to tile",
        "scores = 'any'": "q and K are random numbers",
        "scores = 'below 0'": "every q is negative and every k positive",
        "scores = 'rising'": "all q and k are positive, and K grows from tile to tile, and scores with it",
        "scores = 'falling'": "all q and k are positive, and K shrinks from tile to tile, and scores with it",
    },
    "ex01_5": {
        "counts": "states of each row; offsets are their sums, from 0 on. Before the call a row of one state holds "
        "100 + row in out and 100 - row in lse, and all other rows hold -77",
        "turned": "in memory out lies as [row, dim, head]: look at its strides",
    },
    "ex02_3": {
        "below": "every q is negative and every k positive, so that all scores are far below 0",
        "outside": "k and v hold this before begin and from end on",
    },
    "ex02_4": {
        "n_items": "items of each row, each of them a state; offsets are their sums, from 0 on",
        "size": "so much is added to the lses of rows 0, 2, ..., and taken from those of rows 1, 3, ...",
        "empty = 'some'": "every third item of a row has no tokens, from its second one on in rows 0, 2, ..., from its "
        "first one on in the others: lse is -inf there",
        "empty = 'whole rows'": "all items of rows 0, 2, ... have no tokens: lse is -inf there",
        "empty = 'heads'": "an item has no tokens for some of its heads, those where item + head is even: lse is -inf "
        "there",
        "junk": "what out holds where there are no tokens",
        "junk = 'numbers'": "out holds 100 where there are no tokens",
    },
    "ex03_2": {"items_per_row": "how many items each row has"},
    "ex03_4": {
        "order": "in which order programs take items",
        "order = 'longest first'": "programs take the longest item first",
        "order = 'from behind'": "programs take the last item first",
        "order = 'every second'": "programs take the last item, the third last, and so on: the others are not done",
    },
    "ex03_5": {
        "stage": "whose items they are",
        "stage = 'row_local'": "items are cut as row_local does: n_splits for each row, empty ones too",
        "stage = 'workqueue'": "items are cut as workqueue does: none is empty",
        "trace": "means over the 48 steps of the paper's trace of that name, each of 8 rows",
    },
    "ex04_4": {"costs": "times are just what these costs give"},
    "ex05_5": {"later": "the launch is recorded with lengths; then these lie in their place, and it is replayed"},
    "ex05_6": {"steps": "the lengths of the rows at each replay; lengths: those while it is captured"},
}  # fmt: skip


def needs_words(task: Task, word: str) -> bool:
    """Is a word of an input neither one of the course's nor an argument's name? Or has its task more to say of it?"""
    is_plain = word in PLAIN or word in Question.of(task).names
    return not is_plain or word in WORDS.get(task.id, {})


def words_of(task: Task, spec: Spec) -> tuple[str, ...]:
    """What the words of an input mean, in lines; those that need it."""
    found = {word: meaning_of(task, word, value) for word, value in spec.items() if needs_words(task, word)}
    return tuple(f"{key}: {means}" for key, means in found.values() if means)


def meaning_of(task: Task, word: str, value: object) -> tuple[str, str]:
    """A word, with its value where that has a meaning of its own, and what it means; "" where nothing says so."""
    for known in (WORDS.get(place, {}) for place in (task.id, task.exercise, "")):
        for key in (f"{word} = {value!r}", word):
            if key in known:
                return key, known[key]
    return word, ""
