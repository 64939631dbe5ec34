"""Numbers in shared memory are the old or the new one, never anything else."""

from __future__ import annotations

import ctypes
import subprocess
import sys

from manyhands.comm.host_memory import HostMemory, Segment

WRITER = """
import sys
from manyhands.comm.host_memory import Segment
words = Segment(int(sys.argv[1]), 4096).words()
for _ in range(500_000):
    words[3] = 2**32
    words[3] = 2**32 - 1
"""


def test_reading_a_word_while_another_process_writes_it_gives_no_third_number():
    memory = HostMemory()
    words = Segment(memory.fd, 4096, memory.allot("words", 4096)).words()
    words[3] = 2**32
    with subprocess.Popen([sys.executable, "-c", WRITER, str(memory.fd)], pass_fds=[memory.fd]) as writer:
        seen = set()
        while writer.poll() is None:
            seen.update(words[3] for _ in range(1000))
    assert writer.returncode == 0
    assert seen == {2**32, 2**32 - 1}
    memory.close()


def test_large_pages_map_the_same_memory_in_every_process():
    memory, num_bytes = HostMemory(), 3 * 2**21 + 4096
    memory.allot("small", 4096)
    offset = memory.allot("large", num_bytes)
    here, there = Segment(memory.fd, num_bytes, offset), Segment(memory.fd, num_bytes, offset)
    before = here.address
    here.use_large_pages()
    assert here.address != before and here.address % 2**21 == 0
    for place in (0, num_bytes // 2, num_bytes - 1):
        assert ctypes.c_char.from_address(here.address + place).value == b"\0"
        there.buffer[place] = 7
        assert ctypes.c_char.from_address(here.address + place).value == b"\7"
    here.close()
    assert there.buffer[num_bytes - 1] == 7
    there.close()
    memory.close()
