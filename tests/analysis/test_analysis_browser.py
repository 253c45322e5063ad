"""The page in a real browser: it draws, switches, finds and unfolds."""

import json
import time

import branching
import browser
import pytest

from gyre.analysis import branches, training, tree_html
from gyre.trajectory import select

pytestmark = [
  pytest.mark.net,
  pytest.mark.skipif(
    browser.find() is None,
    reason="no Chromium: apt install chromium, or GYRE_CHROMIUM=PATH",
  ),
]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
  found = browser.Browser(browser.find(), tmp_path_factory.mktemp("profile"))
  yield found
  found.close()


def _write(path, execution):
  """A page whose first sample was trained; returns its address."""
  history = branches.history(execution, branching.pieces())
  found = select.select(
    history.tree, execution_id="train-0/0", group_id="train-0", max_samples=1
  )
  trained = training.of_samples(
    history.tree, 4, [(s, -0.5) for s in found.samples]
  )
  page = tree_html.render(history, branching.pieces(), trained=trained)
  path.write_text(page, "utf-8")
  return history, path.as_uri()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  path = tmp_path_factory.mktemp("page") / "small.html"
  return _write(path, branching.everything())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
  path = tmp_path_factory.mktemp("page") / "large.html"
  return _write(path, branching.long())


SIZES = pytest.mark.parametrize("width,height", [(1280, 800), (390, 844)])
ALL_OPEN = (
  "document.getElementById('unfold').click();"
  "document.querySelectorAll('.chunk').forEach(c => c.fill());"
  "document.querySelectorAll('.foldable').forEach(f => f.fill());"
)


@SIZES
def test_every_token_is_shown_and_nothing_else_is_asked_for(
  chromium, small, width, height
):
  history, address = small
  chromium.open(address, width, height)
  assert chromium.errors == [] and chromium.requests == [address]
  # Nothing lies beside the window.
  assert chromium.get("document.documentElement.scrollWidth") <= width
  chromium.get(ALL_OPEN)
  for i, b in enumerate(history.branches):
    shown = chromium.get(
      f"[...document.querySelectorAll('section.branch')[{i}]"
      ".querySelectorAll('.t')].map(t => t.textContent)"
    )
    ids = history.tree.ids[b.tokens]
    assert shown == branching.pieces().of(ids)
  times = chromium.get(
    "[...document.querySelectorAll('main .t.m')].map(t => t.dataset.m)"
  )
  assert times == ["2"] * int((history.multiplicity == 2).sum())
  assert chromium.get("document.documentElement.scrollWidth") <= width
  marks = chromium.get(
    "[...document.querySelectorAll('.split')].map(s => s.textContent)"
  )
  assert sorted(marks) == [f"↳ {b.name}" for b in history.branches if b.parent]


def test_the_switch_changes_colours(chromium, small):
  chromium.open(small[1], 1280, 800)
  chromium.get(ALL_OPEN)
  ground = (
    "[...document.querySelectorAll('main .t.s')]"
    ".map(t => getComputedStyle(t).backgroundColor)"
  )
  seen = {}
  for name in ("logprob", "advantage", "version"):
    chromium.get(f"document.querySelector('[value={name}]').click()")
    seen[name] = chromium.get(ground)
    shown = "getComputedStyle(document.querySelector('.legend[data-for={}]'))"
    for other in ("logprob", "advantage", "version"):
      visible = chromium.get(shown.format(other) + ".display") != "none"
      assert visible == (other == name)
  assert len(set(seen["logprob"])) > 3
  # Versions 3 and 4; trained with one advantage, or not at all.
  assert len(set(seen["version"])) == len(set(seen["advantage"])) == 2
  address = chromium.get("location.hash")
  assert address == "#colour=version"


def test_both_themes(chromium, small):
  chromium.open(small[1], 1280, 800)
  ground = "getComputedStyle(document.body).backgroundColor"
  for theme, colour in (("dark", "rgb(20, 23, 26)"), ("light", "rgb(255, 255")):
    chromium.get(
      "(() => { const s = document.getElementById('theme');"
      f"s.value = '{theme}'; s.dispatchEvent(new Event('change')); }})()"
    )
    assert chromium.get(ground).startswith(colour)


def test_a_token_tells_its_numbers(chromium, small):
  chromium.open(small[1], 390, 844)
  chromium.get(ALL_OPEN)
  assert chromium.get("document.getElementById('token').hidden")
  chromium.get("document.querySelector('main .t.m').click()")
  told = chromium.get("document.getElementById('token').innerText")
  # Sampled by the call and by its retry.
  assert "call 0001: -" in told and "call 0002: -" in told
  chromium.get("document.querySelector('main .t.n1').click()")
  told = chromium.get("document.getElementById('token').innerText")
  assert "trained in step 4, advantage -0.5000" in told
  chromium.get("document.getElementById('close').click()")
  assert chromium.get("document.getElementById('token').hidden")


def _search(chromium, words):
  chromium.get(
    "(() => { const q = document.getElementById('query');"
    f"q.value = {json.dumps(words)}; q.dispatchEvent(new Event('input'));"
    "document.getElementById('search').requestSubmit(); })()"
  )
  return chromium.get("document.getElementById('hits').textContent")


def test_search_opens_what_it_finds(chromium, small):
  chromium.open(small[1], 1280, 800)
  chromium.get("document.getElementById('fold').click()")
  assert _search(chromium, '"COMMAND": "ls') == "1 / 1"
  now = "[...document.querySelectorAll('.now')].map(t => t.textContent)"
  assert '"command": "ls' in "".join(chromium.get(now)).replace("\n", "")
  # It lay in a folded tool call of a closed block.
  assert chromium.get(
    "document.querySelector('.now').closest('.foldable').open"
  )
  assert _search(chromium, "no such words") == "none"
  assert chromium.get(now) == []


@SIZES
def test_a_hundred_thousand_tokens_stay_usable(chromium, large, width, height):
  history, address = large
  assert len(history.tree.ids) > 95_000
  chromium.open(address, width, height)
  drawn = "document.querySelectorAll('main .t').length"
  chromium.wait(f"{drawn} > 0")
  assert chromium.get(drawn) < 5_000
  assert _search(chromium, "the needle is") == "1 / 1"
  chromium.wait("document.querySelector('.now')")
  time.sleep(0.5)  # for what is drawn late, and would move it away
  place = "document.querySelector('.now').getBoundingClientRect()"
  assert 0 <= chromium.get(f"{place}.top") < height
  assert chromium.get(drawn) < 10_000
  chromium.get("document.getElementById('unfold').click()")
  assert chromium.get(drawn) < 60_000
  chromium.get(ALL_OPEN)
  assert chromium.get(drawn) == len(history.tree.ids)
  assert chromium.errors == []


@SIZES
def test_an_address_keeps_a_view(chromium, small, width, height):
  address = small[1] + "#colour=advantage&q=notes.md"
  chromium.open(address, width, height)
  assert chromium.get("document.body.dataset.colour") == "advantage"
  hits = chromium.get("document.getElementById('hits').textContent")
  assert hits.startswith("1 / ") and hits != "1 / 0"
