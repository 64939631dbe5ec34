"""`python -m tools.house_figures`: private words in prose but not in code blocks, the walks, the last suite."""

from __future__ import annotations

import re
from pathlib import Path

from tools.architecture_links import PAGE as ARCHITECTURE
from tools.house_figures import page_figures, suite_figures, walk_figures

PAGE = """\
# One
A run goes
on, whatever happens. `tells` counts, too.

```python
print("nobody")     # tells nobody
```
1. In a list:
   ```
   whoever
   ```
"""


def test_words_in_prose_count_and_those_in_code_blocks_do_not(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages" / "page.md").write_text(PAGE)
    (tmp_path / "plain.md").write_text("A run continues.\n")
    found = page_figures(tmp_path)
    assert found["pages"] == 2 and found["lines"] == 12
    assert found["private words"] == {"goes on": 1, "whatever": 1, "tells": 1}
    assert list(found["private words per page"]) == [str(tmp_path / "pages" / "page.md")]
    assert page_figures(tmp_path / "plain.md")["private words"] == {}


def test_the_figures_have_the_walks_and_the_last_suite(tmp_path: Path) -> None:
    walks = walk_figures(ARCHITECTURE.read_text())
    assert list(walks) == ["a batch", "a launch", "a lost worker", "an asynchronous push", "a batch, traced"]
    assert re.fullmatch(r"\d+ files, \d+ changes of folder, \d+ of package", walks["a batch"])
    record = tmp_path / "suite"
    assert "make test" in suite_figures(record)
    record.write_text('{"seconds": 300}')
    assert suite_figures(record) == {"seconds": 300}
