"""The clock: what it plays as one, or handles together, comes out as if each copy had been played by itself."""

import cases
import numpy as np
import pytest
from plainclock import play_plainly

import pkv
from pkv.cards import clock, simulation
from pkv.cards.clock import EvenPrograms, EvenSms, Rules, Work, play
from pkv.cards.known import load_gpu
from pkv.cards.shares import n_alike

STAGES = [stage for stage in pkv.STAGES if stage not in ("reference", "adaptive")]
CARDS = ["rtx3060", "h200", "h200-28sm"]  # of the first, programs share the memory; of the others, SMs do
MODELS = [(32, 8), (32, 32), (28, 4), (12, 2), (33, 3), (8, 1)]
FORTY_ROWS = np.random.default_rng(7).integers(100, 4000, size=40).tolist()


def launches_of(seed: int) -> list[tuple]:
    """The launches of a random plan, as simulate() has them played: play()'s arguments."""
    rng = np.random.default_rng(seed)
    card, stage = load_gpu(CARDS[seed % 3]), STAGES[seed // 3 % len(STAGES)]
    n_rows, longest = int(rng.integers(1, 20)), int(rng.choice([60, 900, 20_000]))
    lengths = rng.integers(0, longest, size=n_rows) if seed % 4 else np.full(n_rows, longest)  # ragged, or alike
    options = cases.known(stage, {"splits": int(rng.integers(1, 20))} if seed % 5 == 0 else {})
    heads = MODELS[int(rng.integers(len(MODELS)))] if seed % 2 else MODELS[0]
    plan = pkv.plan(lengths, pkv.Shape(*heads, 128, 16, "float16"), stage, gpu=card, **options)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "play", lambda *arguments: found.append(arguments) or play(*arguments))
        pkv.simulate(plan, card)
    return found


@pytest.mark.parametrize("seed", range(36))
def test_every_span_runs_when_and_where_the_plain_clock_says(seed):
    for work, *arguments in launches_of(seed):
        begin, end, place, last = play_plainly(work, *arguments)
        played = play(work, *arguments)
        program, copy, item = work.spans()
        of = played.of_copies(copy, program, item, work)
        n_sms = arguments[1]
        assert (played.slot[of] * n_sms + played.alike * played.sm[of] + copy % played.alike == place).all()
        for found, plain in ((played.begin_us[of], begin), (played.end_us[of], end), (played.last_us, last)):
            assert found == pytest.approx(plain, rel=1e-12)


def test_where_programs_wait_each_copy_is_played():
    """Who waits takes the place of who ends first, and on SMs that share the memory that is decided SM by SM."""
    card = load_gpu("h200")
    shape = pkv.Shape(32, 8, 128, 16, "float16")
    waiting = pkv.plan([4000] * 16, shape, "row_local", splits=20, gpu=card)
    at_once = pkv.plan([4000] * 4, shape, "row_local", splits=20, gpu=card)
    n_slots = card.n_sms * waiting.programs_per_sm
    assert at_once.n_programs * 8 <= n_slots < waiting.n_programs * 8
    assert [pkv.simulate(plan, card).played[0].alike for plan in (waiting, at_once)] == [1, 4]


@pytest.mark.parametrize("card", CARDS)
def test_heads_that_do_the_same_are_played_once(card, monkeypatch):
    """Events, not spans, are what the clock takes time for."""
    looks = []
    for reader in (EvenPrograms, EvenSms):
        outlook = reader.outlook
        monkeypatch.setattr(
            reader, "outlook", lambda self, room, outlook=outlook: looks.append(1) or outlook(self, room)
        )
    plan = pkv.plan(FORTY_ROWS, pkv.Shape(32, 8, 128, 16, "float16"), "stream_k", gpu=card)
    timeline = pkv.simulate(plan, card)
    assert sum(len(played.begin_us) for played in timeline.played) == len(timeline.spans) / 4
    assert len(looks) < len(timeline.spans) / 3, "one by one, each starts and each ends"


def test_nobody_is_played_twice_for_a_drawing():
    """What a drawing shows is made when it is asked for."""
    timeline = pkv.simulate(pkv.plan(FORTY_ROWS, pkv.Shape(32, 8, 128, 16, "float16"), "stream_k", gpu="rtx3060"))
    assert timeline.gpu_ms > 0
    assert 0 < timeline.tail_idle < 1
    assert "spans" not in vars(timeline)
    assert len(timeline.spans) == timeline.spans["item"].size
    assert "spans" in vars(timeline)


@pytest.mark.parametrize(("copies", "n_sms", "alike"), [(8, 132, 4), (32, 28, 4), (6, 9, 1), (1, 8, 1), (12, 8, 4)])
def test_as_many_are_alike_as_divide_copies_and_sms(copies, n_sms, alike):
    assert n_alike(copies, n_sms) == alike


def test_a_launch_without_items_ends_as_it_begins():
    played = play(Work(np.zeros(0), np.zeros(4, dtype=np.int64), 2), 4, 2, Rules(1.0, 1.0, None, 1.0), 5.0)
    assert (played.last_us, len(played.begin_us)) == (5.0, 0)
    assert (
        clock.play(Work(np.zeros(0), np.zeros(1, dtype=np.int64)), 4, 2, Rules(1.0, 1.0, 2.0, 1.0), 5.0).last_us == 5.0
    )
