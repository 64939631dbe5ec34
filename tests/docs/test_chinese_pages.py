"""Every page in Chinese has the sections, the code and the links of its English twin."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.chinese_pages import ROOT, code, differences, levels, pages, same, targets, twin, with_code_of


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_a_chinese_page_has_what_its_english_twin_has(page: Path) -> None:
    assert twin(page) != page
    assert list(differences(page)) == [], "python -m tools.chinese_pages renews the code"


def test_headings_in_code_and_comments_are_left_out() -> None:
    text = "# One\n```sh\n# two\nmh run   # 训练\n```\n## Three\n"
    assert levels(text) == [1, 2]
    assert code(text) == code(text.replace("训练", "trains").replace("# two", "# 二"))
    assert code(text) != code(text.replace("mh run", "mh demo"))


def test_what_the_demo_prints_may_be_in_chinese_with_the_same_figures() -> None:
    english = (
        "```\ncentral storage the batch; 1 weight copy   4,059    25    4,955        0  95.6%\nrank 1, 0.04 s\n```"
    )
    chinese = (
        "```\n集中存储        批次；权重只存一份         4,059    25    4,955        0  95.6%\nrank 1，0.04 秒\n```"
    )
    assert same(chinese, english)
    assert not same(chinese.replace("4,059", "4,058"), english) and not same(chinese.replace("0.04", "0.05"), english)
    assert not same(chinese.replace("```\n集", "```sh\n集"), english), "code is not translated"


def test_a_link_to_a_twin_is_the_same_link() -> None:
    ours, theirs = ROOT / "README.zh.md", ROOT / "README.md"
    here = "[a](docs/zh/guide.md#混合精度) [b](docs/data.md)"
    assert targets(ours, here) == targets(theirs, "[a](docs/guide.md#mixed-precision) [b](docs/data.md)")
    assert targets(ours, here) != targets(theirs, "[a](docs/guide.md#ftrl) [b](docs/data.md)")


def test_code_is_renewed_where_more_than_a_comment_differs() -> None:
    ours = "一\n```sh\nmh run   # 训练\n```\n二\n```sh\nmh demo\n```\n"
    theirs = "one\n```sh\nmh run   # trains\n```\ntwo\n```sh\nmh demo --json\n```\n"
    assert with_code_of(ours, theirs) == ours.replace("mh demo", "mh demo --json")
    assert with_code_of(ours, "one\n```sh\nmh run\n```\n") == ours


def test_a_page_that_has_not_followed_its_twin_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs" / "zh").mkdir(parents=True)
    english, chinese = tmp_path / "docs" / "a.md", tmp_path / "docs" / "zh" / "a.md"
    english.write_text("# One\n## Two\n[b](a.md)\n```sh\nmh run\n```\n")
    chinese.write_text("# 一\n```sh\nmh demo\n```\n")
    monkeypatch.setattr("tools.chinese_pages.ROOT", tmp_path)
    monkeypatch.setattr("tools.chinese_pages.CHINESE", tmp_path / "docs" / "zh")
    found = "\n".join(differences(chinese))
    assert "headings" in found and "code block 1" in found and "only in English: a link to docs/a.md#" in found
