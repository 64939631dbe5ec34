"""The C extension; all else is in pyproject.toml. Optional: without a compiler the package installs without it."""

from setuptools import Extension, setup

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

setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp311"}})
