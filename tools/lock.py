"""Write requirements.lock: every version in constraints.txt with the SHA-256 of each file that may be installed as it.

    python tools/lock.py INDEX_URL > requirements.lock

The hashes are those that the package index states for all platforms. Where pip chooses a file here that the index does
not have, only that one is allowed: the CPU build of torch, whose CUDA builds need forty further packages. Nothing is
installed.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
_LINK = re.compile(r'href="[^"]*#sha256=([0-9a-f]{64})"[^>]*>([^<]+)<')


def pinned() -> dict[str, str]:
    return dict(line.split("==") for line in CONSTRAINTS.read_text().split())


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def hashes_in_index(index: str, name: str, version: str) -> set[str]:
    with urllib.request.urlopen(f"{index.rstrip('/')}/{normal(name)}/", timeout=60) as page:
        links = _LINK.findall(page.read().decode())
    return {digest for digest, file in links if _version_of(file, name) == version}


def _version_of(file: str, name: str) -> str:
    """A wheel's or a source archive's version; empty for what is neither."""
    stem = re.sub(r"(\.tar\.gz|\.zip|-[^-]+-[^-]+-[^-]+\.whl)$", "", file)
    head, _, version = stem.rpartition("-")
    return version if normal(head) == normal(name) else ""


def hashes_chosen_here() -> dict[str, str]:
    options = ["--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-", "-r", str(CONSTRAINTS)]
    said = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options], check=True, capture_output=True, text=True, timeout=600
    )
    chosen = json.loads(said.stdout)["install"]
    return {normal(one["metadata"]["name"]): one["download_info"]["archive_info"]["hashes"]["sha256"] for one in chosen}


def main(index: str) -> None:
    here = hashes_chosen_here()
    print("# Made by `make lock` from constraints.txt. Use: pip install --require-hashes -r requirements.lock")
    for name, version in pinned().items():
        listed, chosen = hashes_in_index(index, name, version), here[normal(name)]
        allowed = sorted(listed) if chosen in listed else [chosen]
        print(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in allowed)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
