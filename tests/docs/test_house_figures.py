"""`python -m tools.house_figures` counts private words in the prose of Markdown pages, not in their code blocks."""

from __future__ import annotations

from pathlib import Path

from tools.house_figures import page_figures

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
