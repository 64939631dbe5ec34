"""Values in shared memory that outlive the process that writes them."""

from __future__ import annotations

from manyhands.comm.host_memory import HostMemory, Segment
from manyhands.comm.shared_register import JOURNAL_ENTRY_BYTES, Journal, Register


def test_a_register_has_the_old_or_the_new_value_whenever_its_writer_ends() -> None:
    memory = HostMemory()
    segment = Segment(memory.fd, 4096, memory.allot("register", 4096))
    writer = Register(segment)
    assert writer.value == b""
    for value in (b"one", b"two", b"three"):
        writer.write(value)
        assert Register(segment).value == value
    # Killed while it wrote the next value over the last but one, before the header.
    segment.buffer[16:19] = b"fo\0"
    assert Register(segment).value == b"three"
    writer.write(b"four")
    assert Register(segment).value == b"four"
    memory.close()


def test_a_journal_has_as_many_of_the_last_entries_as_fit() -> None:
    memory = HostMemory()
    num_bytes = 16 * JOURNAL_ENTRY_BYTES
    journal = Journal(Segment(memory.fd, num_bytes, memory.allot("journal", num_bytes)))
    for number in range(1, 21):
        journal.write(number, b"%d" % number)
    assert [journal.read(number) for number in (4, 5, 20, 21)] == [None, b"5", b"20", None]
    memory.close()
