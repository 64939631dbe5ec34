"""The C extension and the text for package indexes; all else is in pyproject.toml.

The extension is optional: without a compiler the package installs without it, and `mh doctor` says so.
"""

import re
from pathlib import Path

from setuptools import Extension, setup

# The public address of the sources, such as "https://example.org/manyhands"; empty as long as there is none.
REPOSITORY = ""
PAGES = f"{REPOSITORY}/blob/main/" if REPOSITORY else ""


def long_description() -> str:
    """The README as a package index can show it: links to files lead to `PAGES`, or are no links where it is empty."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    to = rf"[\1]({PAGES}\2)" if PAGES else r"\1"
    mark = "" if PAGES else "!?"  # of a picture, which is its description then
    text = re.sub(mark + r"\[([^\]]*)\]\((?![a-z]+:|#)([^)\s]+)\)", to, text)
    return text if PAGES else f"{text}\nThe pages named here (docs/...) are in the source distribution.\n"


native = Extension(
    "manyhands.native._native",
    [
        f"manyhands/native/{name}.c"
        for name in (
            *(
                "codec",
                "copy",
                "digest",
                "ids",
                "module",
                "pages",
                "plane",
                "row_past",
                "row_rules",
                "rows",
                "rows_module",
                "sum",
                "sweep",
                "update",
            ),
        )
    ],
    depends=[f"manyhands/native/{name}.h" for name in ("core", "row_table", "rows", "vector_ops")],
    libraries=["m"],
    # Nothing is fused but what says so: every CPU gives the same bits. Nobody reads errno after a square root.
    extra_compile_args=[
        *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-Wall", "-Wextra"),
    ],
    py_limited_api=True,
    optional=True,
)

setup(
    ext_modules=[native],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY, "Documentation": f"{PAGES}docs/guide.md"} if REPOSITORY else {},
)
