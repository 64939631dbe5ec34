"""The C extension; all else is in pyproject.toml. Optional: without a compiler the package installs without it."""

from setuptools import Extension, setup

native = Extension(
    "manyhands.native._native",
    ["manyhands/native/module.c", "manyhands/native/plane.c", "manyhands/native/sum.c"],
    depends=["manyhands/native/core.h"],
    # Additions must not be fused with anything: every CPU gives the same bits.
    extra_compile_args=["-std=c11", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-Wall", "-Wextra"],
    py_limited_api=True,
    optional=True,
)

setup(ext_modules=[native], options={"bdist_wheel": {"py_limited_api": "cp311"}})
