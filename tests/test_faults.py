"""The one-line faults of tests/faults.py: each kind is found, and nothing that is only said or annotated."""

import faults

TEXT = '''
def cut(lengths, tile: int = 1, *, fast: bool = True) -> "list[1]":
    """At most 3 < 4."""
    if not fast and len(lengths) < tile:
        raise ValueError(f"tile = {tile + 1} is larger than {2}")
    wide = tl.load(lengths + 7, mask=lengths < 5)
    return min(lengths // tile, wide)
'''
CHANGED = {
    ("off by one", 'def cut(lengths, tile: int = 2, *, fast: bool = True) -> "list[1]":'),
    ("boolean", 'def cut(lengths, tile: int = 1, *, fast: bool = False) -> "list[1]":'),
    ("and or", "if not fast or len(lengths) < tile:"),
    ("no not", "if fast and len(lengths) < tile:"),
    ("comparison", "if not fast and len(lengths) <= tile:"),
    ("sign", "wide = tl.load(lengths - 7, mask=lengths < 5)"),
    ("off by one", "wide = tl.load(lengths + 8, mask=lengths < 5)"),
    ("no mask", "wide = tl.load(lengths + 7, mask=(lengths < 5) | True)"),
    ("comparison", "wide = tl.load(lengths + 7, mask=lengths <= 5)"),
    ("off by one", "wide = tl.load(lengths + 7, mask=lengths < 6)"),
    ("min max", "return max(lengths // tile, wide)"),
    ("rounding", "return min(-(-lengths // tile), wide)"),
}


def test_each_kind_of_fault_is_found_and_only_in_code(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "ROOT", tmp_path)
    (tmp_path / "cutting.py").write_text(TEXT)
    found = list(faults.faults_in(tmp_path / "cutting.py"))
    assert {(fault.kind, fault.after.strip()) for fault in found} == CHANGED
    assert len(found) == len(CHANGED)
    assert {fault.function for fault in found} == {"cut"}
    assert all(TEXT.split("\n")[fault.line - 1] == fault.before for fault in found)


def test_the_first_tests_are_those_that_name_the_function():
    fault = faults.Fault("sign", "pkv/kernels/tile.py", 1, "find_pages", "", "")
    files = faults.likely_first(fault)
    assert files[0] == "tests/test_interpreter.py"
    assert len(set(files)) == len(list((faults.ROOT / "tests").glob("test_*.py")))
