"""docs/articles and docs/zh/articles: a page for each flow of the articles, with the steps beside one real run of it.

    python -m tools.article_pages                          # runs every flow, a few minutes
    python -m tools.article_pages data_parallel_flow       # only this one

Each flow of examples/articles is run as a user runs it, in an empty directory; its run writes `flow.json` and
`flow.svg`, which become the pages and their figure. Text comes from the script: the head, in both languages, and the
steps. Start reading at `make_pages`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FLOWS = sorted((ROOT / "examples" / "articles").glob("article_*/*_flow.py"))
LIMIT_S = 300
CHINESE = re.compile("[\u4e00-\u9fff]")


class Language(NamedTuple):
    """A language's page: its folder, its place in the head and in a step, and the text around them."""

    folder: str
    index: int
    figures: str
    words: str
    run: str
    about_figure: str
    steps: str
    columns: Sequence[str]
    program: str
    about_program: str


ENGLISH_PAGE = Language(
    folder="docs/articles",
    index=0,
    figures="figures",
    words="The steps are in our words; the article has as many. Which step has which number there, we do not know.",
    run="The run",
    about_figure="Boxes are what the program notes in each worker, each name a few times at most; diamonds are events "
    "of the run's own record. The numbers are those of the steps below. Order and overlap are true, widths are not: "
    "the axis has the times.",
    steps="The steps",
    columns=("step", "what happens", "where", "at", "what the run shows"),
    program="The program",
    about_program="It writes the table and the figure of your run into its run directory. This page is such a run's, "
    "made by `python -m tools.article_pages`.",
)
CHINESE_PAGE = Language(
    folder="docs/zh/articles",
    index=1,
    figures="../../articles/figures",
    words="步骤是我们的表述，步数与文章相同；文章里每个编号具体对应哪一步，我们并不知道。",
    run="运行",
    about_figure="方框是程序在每个 worker 里的标记，同名的最多画几次；菱形是训练自身记录的事件。编号就是下面的步骤。"
    "先后与重叠是真实的，宽度不是，时刻写在轴上。",
    steps="步骤",
    columns=("步骤", "做什么", "位置", "时刻", "训练的记录"),
    program="程序",
    about_program="程序会把你那次训练的对照表和图写进训练目录。"
    "本页就是这样一次训练，由 `python -m tools.article_pages` 生成。",
)


def main(names: Sequence[str]) -> None:
    unknown = set(names) - {flow.stem for flow in FLOWS}
    if unknown:
        sys.exit(f"no flow is called {', '.join(sorted(unknown))}; there are {', '.join(flow.stem for flow in FLOWS)}")
    for flow in FLOWS:
        if not names or flow.stem in names:
            print(flow.stem, flush=True)
            make_pages(flow)


def make_pages(flow: Path) -> None:
    """Run the flow, and write its pages and its figure."""
    with tempfile.TemporaryDirectory(prefix="flow-") as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8"}
        subprocess.run([sys.executable, str(flow)], cwd=folder, env=environment, check=True, timeout=LIMIT_S)
        [record_file] = Path(folder).rglob("flow.json")
        record, figure = json.loads(record_file.read_text()), record_file.with_suffix(".svg").read_text()
    shown = {seen["step"] for seen in record["seen"]}
    if shown != set(range(1, len(record["steps"]) + 1)):
        sys.exit(f"{flow.stem}: of its {len(record['steps'])} steps the run shows only {sorted(shown)}")
    figures = ROOT / "docs" / "articles" / "figures"
    for folder_path in (figures, ROOT / "docs" / "zh" / "articles"):
        folder_path.mkdir(parents=True, exist_ok=True)
    (figures / f"{flow.stem}.svg").write_text(figure)
    for language in (ENGLISH_PAGE, CHINESE_PAGE):
        (ROOT / language.folder / f"{flow.stem}.md").write_text(page(flow, record, language))


def page(flow: Path, record: dict[str, Any], language: Language) -> str:
    title, text = head(flow, language.index)
    script = flow.relative_to(ROOT)
    up = "/".join([".."] * len(Path(language.folder).parts))
    parts = [
        f"# {title}",
        text,
        language.words,
        f"## {language.run}",
        f"```sh\npython {script}\n```",
        f"![{title}]({language.figures}/{flow.stem}.svg)",
        language.about_figure,
        f"## {language.steps}",
        table(record, language),
        f"## {language.program}",
        f"[{script}]({up}/{script})",
        language.about_program,
    ]
    return "\n\n".join(parts) + "\n"


def head(flow: Path, index: int) -> tuple[str, str]:
    """Title and text of a script's head, in one of its two languages."""
    found = re.match(r'"""(.*?)"""', flow.read_text(), re.S)
    assert found is not None
    paragraphs = found[1].strip().split("\n\n")
    mine = [one for one in paragraphs if bool(CHINESE.search(one)) == bool(index)]
    first = re.fullmatch(r"(?:Article (\d+), a flow[^:]*: |文章 (\d+) 的[^：]*流程：)(.*)[.。]", mine[0])
    assert first is not None, mine[0]
    title = f"文章 {first[2]}：{first[3]}" if index else f"Article {first[1]}: {first[3]}"
    return title, "\n\n".join(map(without_breaks, mine[1:]) if index else mine[1:])


def without_breaks(paragraph: str) -> str:
    """A Chinese paragraph in one line: renderers would show a space for each line break.

    Between Chinese and a word of another script there is one, as within a line.
    """
    paragraph = re.sub(r"(?<=[\u4e00-\u9fff])\n(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])\n(?=[\u4e00-\u9fff])", " ", paragraph)
    return re.sub(r"(?<=[^\x00-\x7f])\n|\n(?=[^\x00-\x7f])", "", paragraph).replace("\n", " ")


def table(record: dict[str, Any], language: Language) -> str:
    lines = [f"| {' | '.join(language.columns)} |", "|---|---|---|---|---|"]
    for number, texts in enumerate(record["steps"], 1):
        for count, seen in enumerate(one for one in record["seen"] if one["step"] == number):
            step = f"{number} | {texts[language.index]}" if count == 0 else " | "
            lines.append(f"| {step} | {seen['lane']} | {seen['start']:.3f} s | `{seen['text']}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
