"""The README's drawings: well-formed, and the eviction's numbers are those of the run they tell of."""

import xml.etree.ElementTree as ElementTree

import pytest

from nanobeacon.measure import drawings


@pytest.fixture(scope="module")
def seen():
    return drawings.watch()


def texts(name: str) -> list[str]:
    root = ElementTree.parse(drawings.PICTURES / name).getroot()
    return [element.text for element in root.iter() if element.tag.endswith("text")]


def test_what_is_drawn_is_one_eviction(seen):
    settings = drawings.SETTINGS
    assert len(seen.positions) == settings["protect"] + settings["budget"]
    assert len(seen.kept) == len(seen.positions) - settings["budget"] // 8
    assert len(seen.queries) == settings["beacons"] + settings["recents"]
    lost = [slot for slot, position in enumerate(seen.positions) if position not in seen.kept]
    stayed = [slot for slot in seen.scores if slot not in lost]
    assert max(seen.scores[slot] for slot in lost) <= min(seen.scores[slot] for slot in stayed)


def test_the_file_shows_this_run(seen):
    shown = texts("eviction.svg")
    before = [str(position) for position in seen.positions]
    after = [str(position) for position in seen.kept]
    numbers = [text for text in shown if text.isdigit()]
    assert [n for n in numbers if n in before + after] and all(shown.count(n) >= 2 for n in after)
    assert sum(text.startswith("beacon ") for text in shown) == seen.num_beacons
    for _, position in seen.queries:
        assert any(text in (f"beacon {position}", f"recent {position}") for text in shown)


@pytest.mark.parametrize("name", ["step.svg", "eviction.svg"])
def test_drawings_have_a_dark_side_and_say_what_they_are(name):
    source = (drawings.PICTURES / name).read_text(encoding="utf-8")
    assert "prefers-color-scheme: dark" in source and 'aria-label="One' in source


def test_the_first_drawing_is_what_its_script_makes():
    assert (drawings.PICTURES / "step.svg").read_text(encoding="utf-8") == drawings.step()
