"""The README's picture is what its script draws."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from manyhands.data.sample_order import slices_of
from tools.slices_picture import HEIGHT, NUM_SLICES, NUM_WORKERS, TARGET, WIDTH, picture, shares


def test_drawing_it_again_gives_the_same_file() -> None:
    assert TARGET.read_text() == picture(), "python -m tools.slices_picture"


def test_workers_have_the_slices_that_a_run_gives_them() -> None:
    assert shares() == [list(slices_of(rank, NUM_WORKERS, NUM_SLICES)) for rank in range(NUM_WORKERS)]
    assert sorted(number for share in shares() for number in share) == list(range(NUM_SLICES))


def test_every_element_is_inside_the_picture() -> None:
    root = ElementTree.fromstring(picture())
    boxes = [one.attrib for one in root.iter() if one.tag.endswith("rect")]
    assert len(boxes) > 30
    for one in boxes:
        assert 0 <= float(one.get("x", 0)) <= WIDTH - float(one["width"])
        assert 0 <= float(one.get("y", 0)) <= HEIGHT - float(one["height"])
