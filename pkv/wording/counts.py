"""Numbers in sentences: 1 row, 2 rows; one row crosses, two rows cross."""

SIBILANTS = ("s", "x", "ch", "sh")


def count_of(n: int, word: str) -> str:
    """Write `n` things in words.

    >>> count_of(1, "row"), count_of(1200, "row"), count_of(2, "launch"), count_of(2, "entry")
    ('1 row', '1,200 rows', '2 launches', '2 entries')
    """
    return f"{n:,} {word if n == 1 else with_s(word)}"


def verb(n: int, plural: str) -> str:
    """Return the verb for `n` things.

    >>> verb(1, "become"), verb(2, "become"), verb(1, "cross"), verb(1, "are"), verb(1, "have"), verb(1, "were")
    ('becomes', 'become', 'crosses', 'is', 'has', 'was')
    """
    odd = {"are": "is", "have": "has", "were": "was"}
    return plural if n != 1 else odd.get(plural) or with_s(plural)


def with_s(word: str) -> str:
    """Add an s to a word: a noun's plural, or a verb's third person.

    >>> with_s("row"), with_s("entry"), with_s("launch"), with_s("stay")
    ('rows', 'entries', 'launches', 'stays')
    """
    if word.endswith("y") and word[-2] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(SIBILANTS) else f"{word}s"
