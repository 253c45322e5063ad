"""The dispatch law against the scheduler itself, and against counting."""

import collections
import random
import statistics

import dispatch_law
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gyre.elastic import cells
from gyre.elastic import scheduler as sched
from gyre.elastic.dispatch import Group, Law, Queue

PHI = (0, 0.25, 0.5, 1, 1.5, 2.3)
MU = (1, 2, 3, 5)
B = 20
GRID = [(phi, mu) for phi in PHI for mu in MU]


def dispatched(
  law, steps, seed, *, endless=True, keep=0.0, policy="waterlevel"
):
  """Drives the scheduler alone; the staleness of every group, in order.

  Executions end in a random order, or (`keep` > 0) mostly the newest first,
  which holds old groups back.
  """
  rng = random.Random(seed)
  layout = cells.fixed_partition(1, 1, 10_000)
  state = sched.begin(layout, law, steps=steps, endless=endless, policy=policy)
  running, version, staleness = [], {}, []
  event, answers = sched.Begin(0.0), collections.deque()
  while not state.stopped:
    state, actions = sched.decide(state, event)
    for action in actions:
      match action:
        case sched.Start(execution=execution):
          running.append(execution)
        case sched.Admit(group=group, version=v):
          version[group] = v
        case sched.Consume(group=group, update=update):
          staleness.append((update, update - 1 - version.pop(group)))
          if len(staleness) == update * law.batch:
            answers.append(sched.Drained(0.0, update))
        case sched.Apply(update=update):
          answers.append(sched.Applied(0.0, update))
        case sched.Publish(version=v):
          answers.append(sched.Published(0.0, v))
    if answers:
      event = answers.popleft()
    elif running:
      i = rng.randrange(len(running))
      if rng.random() < keep:
        i = len(running) - 1
      running[i], running[-1] = running[-1], running[i]
      event = sched.Finished(0.0, running.pop())
  ages = [steps - v for v in version.values()]
  return [d for _, d in staleness], ages


def counted(law, bursts):
  """d of every group under FIFO, by counting: group i trains at ⌊i/B⌋."""
  d = []
  for i in range(bursts * law.mu * law.batch):
    version = max(0, (i - law.extra) // (law.mu * law.batch)) * law.mu
    d.append(i // law.batch - version)
  return d


@pytest.mark.parametrize("phi,mu", GRID)
def test_law_agrees_with_counting(phi, mu):
  law = Law(phi, mu, B, 1, window=1)
  cold = -(-law.extra // (mu * B))
  d = counted(law, cold + 7)[cold * mu * B :]
  assert statistics.fmean(d) == pytest.approx(dispatch_law.mean(law), abs=1e-12)
  assert statistics.pvariance(d) == pytest.approx(
    dispatch_law.variance(law), abs=1e-12
  )
  pmf = {k: n / len(d) for k, n in collections.Counter(d).items()}
  assert pmf == pytest.approx(dispatch_law.pmf(law))
  assert max(d) == law.maximum()


@pytest.mark.parametrize("phi,mu", GRID)
def test_cold_start_agrees_with_counting(phi, mu):
  law = Law(phi, mu, B, 1, window=1)
  first = int(phi // mu) + 1
  for bursts in range(first, first + 6):
    mean = statistics.fmean(counted(law, bursts))
    assert dispatch_law.cold_start_mean(law, bursts) == pytest.approx(
      mean, abs=1e-12
    )


@pytest.mark.parametrize("phi,mu", GRID)
def test_fifo_over_240_updates(phi, mu):
  """Mean exact, distribution within 1%, maximum never exceeded."""
  law = Law(phi, mu, B, 1, window=1)
  d, _ = dispatched(law, 240, seed=0)
  assert max(d) <= law.maximum()
  assert statistics.fmean(d) == pytest.approx(
    dispatch_law.cold_start_mean(law, 240 // mu)
  )
  cold = -(-law.extra // (mu * B))
  steady = d[cold * mu * B :]
  assert statistics.fmean(steady) == pytest.approx(
    dispatch_law.mean(law), abs=1e-12
  )
  pmf, count = dispatch_law.pmf(law), collections.Counter(steady)
  for value in pmf.keys() | count.keys():
    share = count[value] / len(steady)
    assert share == pytest.approx(pmf.get(value, 0.0), abs=0.01)


@pytest.mark.parametrize("phi,mu", GRID)
def test_a_window_over_240_updates(phi, mu):
  """Mean exact in whatever order, maximum never exceeded."""
  _any_order(phi, mu, 240, B + 1, [0], 0.0)


def _any_order(phi, mu, steps, window, seeds, keep):
  law = Law(phi, mu, B, 1, window=window)
  for seed in seeds:
    # To the end of the run every group is consumed: exact in any order.
    d, ages = dispatched(law, steps, seed, endless=False, keep=keep)
    assert not ages
    assert statistics.fmean(d) == pytest.approx(
      dispatch_law.cold_start_mean(law, steps // mu), abs=1e-12
    )
    if window is not None:
      assert max(d) <= law.maximum()


@pytest.mark.parametrize("window", [2, B, 3 * B, None])
@pytest.mark.parametrize("keep", [0.0, 0.9])
def test_any_order_starves_no_group(window, keep):
  for phi, mu in [(0, 2), (0.25, 5), (1.5, 1), (2.3, 2), (0.5, 3)]:
    _any_order(phi, mu, 6 * mu, window, [1], keep)


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 2, B, 3 * B, None])
@pytest.mark.parametrize("phi,mu", GRID)
def test_any_order_over_240_updates(phi, mu, window):
  _any_order(phi, mu, 240, window, [1, 2, 3], 0.0)
  _any_order(phi, mu, 240, window, [4], 0.9)


def test_steady_state_in_any_order():
  """What waits at the end has staleness yet to come; with it the mean is
  exact from boundary to boundary, whatever was consumed."""
  law = Law(1.5, 2, B, 1)
  sums = {}
  for bursts in (10, 30):
    d, ages = dispatched(law, bursts * law.mu, 7, keep=0.5)
    # The queue's groups just admitted at the last boundary have age 0.
    assert len(ages) == law.extra
    sums[bursts] = sum(d) + sum(ages), len(d)
  (a, n), (b, m) = sums[10], sums[30]
  steady = (b - a) / (m - n)
  assert steady == pytest.approx(dispatch_law.mean(law), abs=1e-12)


def _all_in_time(due, update, room, batch):
  """Earliest deadline first: whether each finds a place by its deadline."""
  for deadline in sorted(due):
    while not room:
      update, room = update + 1, batch
    if update > deadline:
      return False
    room -= 1
  return True


@given(
  versions=st.lists(st.integers(0, 4), min_size=1, max_size=14),
  whole=st.integers(0, 2**14 - 1),
  batch=st.integers(1, 4),
  bound=st.integers(0, 4),
  late=st.integers(1, 3),
  used=st.integers(0, 3),
  most=st.integers(1, 14),
)
def test_in_time_is_earliest_deadline_first(
  versions, whole, batch, bound, late, used, most
):
  """A group is taken iff all others can then still be trained in time."""
  versions = sorted(versions)
  update, room = versions[-1] + late, max(1, batch - used)
  due = {n: v + bound + 1 for n, v in enumerate(versions)}
  assume(_all_in_time(due.values(), update, room, batch))
  law = Law(0, 1, batch, 1, max_staleness=bound)
  queue = Queue()
  for number, version in enumerate(versions):
    queue = queue.admit(Group(number, version, 1))
  for number in due:
    if whole >> number & 1:
      queue = queue.ended(number, True)
  expected, u, left = [], update, room
  for number in queue.whole:
    if len(expected) == most:
      break
    if not left:
      u, left = u + 1, batch
    rest = [d for n, d in due.items() if n not in {*expected, number}]
    if u <= due[number] and _all_in_time(rest, u, left - 1, batch):
      expected.append(number)
      left -= 1
  assert queue.in_time(law, update, room, most) == tuple(expected)


@pytest.mark.parametrize("keep", [0.0, 0.9, 0.99])
def test_deadlines_keep_the_maximum_and_drop_nothing(keep):
  for phi, mu in [(0, 2), (0.25, 5), (1.5, 1), (2.3, 2), (0.5, 3)]:
    fifo = Law(phi, mu, B, 1).fifo_max
    for over in (0, 1, 2):
      law = Law(phi, mu, B, 1, max_staleness=fifo + over)
      steps = 8 * mu
      d, ages = dispatched(
        law, steps, 1, keep=keep, endless=False, policy="deadline"
      )
      assert len(d) == steps * B and not ages
      assert max(d) <= fifo + over
      assert statistics.fmean(d) == pytest.approx(
        dispatch_law.cold_start_mean(law, 8), abs=1e-12
      )


def test_deadlines_hold_back_less_than_a_window():
  """One group is late: at the same maximum a window stops behind it, and
  deadlines do not until its place is at stake."""
  windowed = Law(0.5, 3, 16, 1, window=1)
  bounded = Law(0.5, 3, 16, 1, max_staleness=3)
  assert windowed.maximum() == bounded.maximum() == 3
  queue = Queue()
  for number in range(56):
    queue = queue.admit(Group(number, 0, 1))
  for number in range(1, 40):
    queue = queue.ended(number, True)
  assert queue.ready(1, 16) == ()
  assert queue.in_time(bounded, 1, 16, 16) == tuple(range(1, 17))
  # All are due by update 4: nobody else may take their last places.
  late = Queue()
  for number in range(16):
    late = late.admit(Group(number, 0, 1))
  for number in range(16, 56):
    late = late.admit(Group(number, 3, 1))
  for number in range(1, 50):
    late = late.ended(number, True)
  assert late.in_time(bounded, 4, 16, 16) == tuple(range(1, 16))
  assert late.in_time(bounded, 3, 16, 32) == tuple(range(1, 32))


def test_windows_bound_is_reached():
  """The bound is no larger than need be: an adversary comes up to it."""
  law = Law(0.5, 2, 4, 1, window=9)
  worst = 0
  for seed in range(20):
    d, _ = dispatched(law, 40, seed, keep=0.97)
    worst = max(worst, *d)
  assert worst == law.maximum() == 4


def test_without_a_window_there_is_no_maximum():
  law = Law(0.5, 2, 4, 1)
  assert law.maximum() is None
  d, _ = dispatched(law, 60, 0, keep=0.99)
  bounded = Law(0.5, 2, 4, 1, window=1)
  assert max(d) > 2 * bounded.maximum()


def test_phi_in_whole_groups():
  with pytest.raises(
    ValueError, match=r"phi 0\.53 times batch 20 .* nearest phi is 0\.55"
  ):
    Law(0.53, 2, 20, 8)
  assert Law(2.3, 1, 20, 8).extra == 46


@pytest.mark.parametrize(
  "changes,words",
  [
    ({"mu": 0}, "mu must be >= 1, got 0"),
    ({"batch": 0}, "batch must be >= 1, got 0"),
    ({"group_size": -1}, "group_size must be >= 1, got -1"),
    ({"phi": -0.5}, "phi must be >= 0, got -0.5"),
    ({"window": 0}, "window must be >= 1 or None, got 0"),
    ({"max_staleness": 1}, "max_staleness 1 is below 2"),
  ],
)
def test_refused(changes, words):
  fields = {"phi": 0.5, "mu": 2, "batch": 20, "group_size": 8} | changes
  with pytest.raises(ValueError, match=words):
    Law(**fields)


def test_window_for_a_maximum():
  law = Law(0.5, 3, 16, 8)
  assert law.fifo_max == 3
  assert law.window_for(3) == 1
  assert law.window_for(5) == 33
  wide = Law(0.5, 3, 16, 8, window=33)
  assert wide.maximum() == 5
  assert Law(0.5, 3, 16, 8, window=34).maximum() == 6
  with pytest.raises(ValueError, match="max_staleness 2 is below 3"):
    law.window_for(2)


@given(
  st.lists(st.booleans(), min_size=1, max_size=30),
  st.integers(1, 12),
  st.integers(1, 30),
)
def test_ready_is_one_after_the_other(whole, window, most):
  queue = Queue()
  for number in range(len(whole)):
    queue = queue.admit(Group(number, 0, 1))
  for number, is_whole in enumerate(whole):
    if is_whole:
      queue = queue.ended(number, True)
  taken, left = [], list(range(len(whole)))
  while len(taken) < most:
    able = [n for n in left if n < left[0] + window and whole[n]]
    if not able:
      break
    taken.append(able[0])
    left.remove(able[0])
  assert queue.ready(window, most) == tuple(taken)
