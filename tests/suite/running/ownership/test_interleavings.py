"""The real protocol, in real processes, one step on the file system at a time, in every order that dice find.

Each contender stops before each of its steps (Python's audit hooks tell of them), so the order is chosen
here, and a contender is killed exactly between two steps.
"""

import os
import tempfile
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from tests.suite.running.ownership import contending
from tests.suite.running.ownership.conftest import processes

Move = tuple[int, bool]  # which contender, and whether it is killed instead of making its step

CONTENDERS = 3
ENOUGH = 3000  # steps: all have come in, or never will


class Stepped:
    """A contender that makes a step when it is told to."""

    def __init__(self, stranger: bool):
        self.pipe, far = processes.Pipe()
        self.process = processes.Process(target=contending.step_by_step, args=[far, stranger], daemon=True)
        self.process.start()
        self.at = "outside"

    def begin(self, place: Path, wait: bool) -> None:
        self.pipe.send((place, wait))
        self._arrive()

    def step(self) -> None:
        self.pipe.send("go")
        self._arrive()

    def _arrive(self) -> None:
        assert self.pipe.poll(60), f"nothing came after {self.at}"
        self.at = self.pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.at = "killed"

    @property
    def moving(self) -> bool:
        return self.at not in ("outside", "killed")


class Company:
    """Contenders that go from one example to the next; the killed are replaced."""

    def __init__(self, strangers: bool):
        self.there: list[Stepped] = []
        self.strangers = strangers

    def some(self, count: int) -> list[Stepped]:
        self.there = [c for c in self.there if c.at == "outside"]
        self.there += [Stepped(self.strangers) for _ in range(count - len(self.there))]
        return self.there[:count]

    def dismiss(self) -> None:
        for one in self.there:
            one.kill()


@pytest.fixture(scope="module")
def company():
    some = Company(strangers=False)
    yield some
    some.dismiss()


@pytest.fixture(scope="module")
def strangers():
    """None of them can tell whether another lives."""
    if os.geteuid():
        pytest.skip("only root can give a process another host name")
    some = Company(strangers=True)
    yield some
    some.dismiss()


def play(contenders: list[Stepped], runs: list[tuple[int, int, bool]]) -> int:
    """Who makes how many steps, and whether it is killed then; at last let all come to an end."""
    entered = 0
    moves = ((who, step == steps and killed) for who, steps, killed in runs for step in range(1, steps + 1))
    to_the_end = ((who, False) for _ in range(ENOUGH) for who in range(len(contenders)))
    for who, killed in chain(moves, to_the_end):
        one = contenders[who]
        if not one.moving:
            continue
        one.kill() if killed else one.step()
        entered += one.at == "inside"
        assert [c.at for c in contenders].count("inside") <= 1
    assert not any(c.moving for c in contenders), "somebody waits for ever"
    return entered


def assert_usable_and_clean(place: Path, last: Stepped) -> None:
    """Whoever died where: the next that comes gets in at once, and takes what they left away."""
    last.begin(place, wait=False)
    for _ in range(ENOUGH):
        if not last.moving:
            break
        assert last.at != "none", "it is owned by the dead"
        last.step()
    assert last.at == "outside"
    assert list(place.parent.iterdir()) == []


def kill_an_owner(place: Path) -> None:
    owner = Stepped(stranger=False)
    owner.begin(place, wait=True)
    while owner.at != "inside":
        owner.step()
    owner.kill()


@contextmanager
def begun(contenders: list[Stepped], waits: list[bool], earlier: bool):
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / ".seed=3.owner"
        if earlier:
            place.touch()  # the lock file of an earlier version
        try:
            for one, wait in zip(contenders, waits, strict=True):
                one.begin(place, wait)
            yield place
        finally:
            for one in contenders:  # a failed example must not go on in the next
                if one.moving:
                    one.kill()


def follow(contenders: list[Stepped], moves: list[Move]) -> list[tuple[Move, list[int]]]:
    """Make the moves, then let each go on until it waits or ends; return them, each with who could move."""
    made, turn, polled = [], 0, False
    while any(c.moving for c in contenders):
        movable = [n for n, c in enumerate(contenders) if c.moving]
        if len(made) < len(moves):
            turn, killed = moves[len(made)]
        else:
            killed = False
            if turn not in movable or polled:
                turn = next(n for n in [*movable, *movable] if n > turn or turn >= movable[-1])
        one, was_at = contenders[turn], contenders[turn].at
        one.kill() if killed else one.step()
        polled = (was_at, one.at) == ("os.listdir", "os.rmdir")  # it looked who is there, and looks again
        made.append(((turn, killed), movable))
        assert [c.at for c in contenders].count("inside") <= 1, made
        assert len(made) < ENOUGH, f"somebody waits for ever: {moves}"
    return made


def every_order(play_out, changes: int, deaths: int) -> int:
    """Play out all orders with at most so many changes of turn that nobody asked for; return how many."""
    count, open_ends = 0, [([], changes, deaths)]
    while open_ends:
        moves, changes, deaths = open_ends.pop()
        made = play_out(moves)
        count += 1
        before = [move for move, _ in made]
        for n in range(len(moves), len(made)):
            (turn, _), movable = made[n]
            for other in movable:
                left = changes - (other != turn)
                if left >= 0 and other != turn:
                    open_ends.append(([*before[:n], (other, False)], left, deaths))
                if left >= 0 and deaths:
                    open_ends.append(([*before[:n], (other, True)], left, deaths - 1))
    return count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner_died", "changes", "deaths"),
    [(False, 2, 0), (False, 0, 1), (True, 2, 0)],
    ids=["free", "one dies", "an owner died"],
)
def test_nor_in_any_order_with_few_changes_of_turn(company, owner_died, changes, deaths):
    def play_out(moves: list[Move]) -> list:
        contenders = company.some(2)
        with begun(contenders, [True, True], False) as place:
            if owner_died:
                kill_an_owner(place)
            made = follow(contenders, moves)
            assert_usable_and_clean(place, company.some(1)[0])
            return made

    assert every_order(play_out, changes, deaths) > 10


def runs_of(killed: st.SearchStrategy) -> st.SearchStrategy:
    """Few changes between long runs: what goes wrong needs one overtaken at a bad moment, seldom more."""
    run = st.tuples(st.integers(0, CONTENDERS - 1), st.integers(1, 16), killed)
    return st.lists(run, min_size=3, max_size=10)


WAITS = st.lists(st.booleans(), min_size=CONTENDERS, max_size=CONTENDERS)
BRIEF = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@BRIEF
@given(runs=runs_of(st.sampled_from([False, False, True])), waits=WAITS, earlier=st.booleans())
def test_in_no_order_of_steps_and_deaths_are_there_two_owners(company, runs, waits, earlier):
    contenders = company.some(CONTENDERS)
    with begun(contenders, waits, earlier) as place:
        entered = play(contenders, runs)
        died = [c.at for c in contenders].count("killed")
        event(f"{died} died, {entered} came in")
        assert entered + died >= sum(waits), "one that waited never came in"
        assert_usable_and_clean(place, company.some(1)[0])


@pytest.mark.slow
@BRIEF
@given(runs=runs_of(st.just(False)), waits=WAITS, earlier=st.booleans())
def test_nor_among_strangers(strangers, runs, waits, earlier):
    contenders = strangers.some(CONTENDERS)
    with begun(contenders, waits, earlier) as place:
        entered = play(contenders, runs)
        assert entered >= sum(waits), "one that waited never came in"
        assert_usable_and_clean(place, strangers.some(1)[0])
