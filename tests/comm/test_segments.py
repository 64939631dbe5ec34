"""Numbers in shared memory are the old or the new one, never anything else."""

from __future__ import annotations

import subprocess
import sys

from manyhands.comm.segments import HostMemory, Segment

WRITER = """
import sys
from manyhands.comm.segments import Segment
words = Segment(int(sys.argv[1]), 4096).words()
for _ in range(500_000):
    words[3] = 2**32
    words[3] = 2**32 - 1
"""


def test_whoever_reads_a_word_while_another_process_writes_it_sees_no_third_number():
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
