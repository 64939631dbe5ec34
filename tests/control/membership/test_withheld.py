"""What a worker prints of its failure is kept back to the letter, and nothing else is."""

import pytest

from manyhands.control.processes.withheld_output import WithheldOutput

TEXT = "Traceback:\n  a line, ümläut\nValueError: no\n"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_output_before_and_after_passes_in_order_in_pieces_of_any_size(size):
    whole = b"before\n" + TEXT.encode() + b"after\n"
    withheld = WithheldOutput(TEXT)
    passed = b"".join(withheld.passes(whole[at : at + size]) for at in range(0, len(whole), size))
    assert passed + withheld.rest() == b"before\nafter\n"


def test_only_the_first_time_is_kept_back_and_something_else_is_not():
    withheld = WithheldOutput(TEXT)
    assert withheld.passes(TEXT.encode()) == b""
    assert withheld.passes(TEXT.encode()) == TEXT.encode()
    other = WithheldOutput(TEXT)
    assert other.passes(b"another end\n") == b""
    assert other.rest() == b"another end\n" and other.rest() == b""


def test_without_a_text_everything_passes_at_once():
    assert WithheldOutput("").passes(b"x") == b"x"
