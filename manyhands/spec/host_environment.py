"""Which environment variables every host of a run has to share, and which belong to each host. Pure.

A variable that a script reads, such as EPOCHS, has to be the same for all workers, or they train different things until
a collective fails. So hosts that join take the first host's environment, but for what describes a host and its session,
and for secrets: those are never sent. Start reading at `merged`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from manyhands.errors import UsageError

__all__ = ["belongs_to_host", "merged", "shipped"]

MAX_BYTES = 512 * 1024
MAX_NAMED = 5

# What placers, shells and sessions set for one host, device or process.
_PREFIXES = (
    *("SLURM_", "SLURMD_", "SRUN_", "SBATCH_", "SALLOC_", "RAY_", "OMPI_", "OPAL_", "ORTE_", "PRTE_", "PMIX_", "PMI_"),
    *("MPI_", "MV2_", "HYDRA_", "HYDI_", "HWLOC_", "FLUX_", "JSM_", "PALS_", "PBS_", "LSB_", "PET_", "KUBERNETES_"),
    *(
        "SSH_",
        "XDG_",
        "DBUS_",
        "SYSTEMD_",
        "VSCODE_",
        "CONDA_",
        "LC_",
        "NVIDIA_",
        "CUDA_VISIBLE",
        "ROCR_",
        "HIP_VISIBLE",
    ),
    "_",
)
_NAMES = frozenset(
    (
        *(
            "PATH",
            "LD_LIBRARY_PATH",
            "LD_PRELOAD",
            "PYTHONHOME",
            "VIRTUAL_ENV",
            "HOME",
            "USER",
            "LOGNAME",
            "MAIL",
            "PWD",
        ),
        *("OLDPWD", "SHELL", "SHLVL", "TERM", "TERMCAP", "COLUMNS", "LINES", "DISPLAY", "WAYLAND_DISPLAY", "EDITOR"),
        *("PAGER", "LANG", "LANGUAGE", "TZ", "LS_COLORS", "COLORTERM", "TERM_PROGRAM", "TMUX", "TMUX_PANE", "HOST"),
        *("HOSTNAME", "HOSTTYPE", "TMPDIR", "TMP", "TEMP", "PS1", "DEBIAN_FRONTEND", "INVOCATION_ID", "JOURNAL_STREAM"),
        *("TF_CONFIG", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"),
        *("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "GLOO_SOCKET_IFNAME"),
        *("TP_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_PROVIDER", "MANYHANDS_KEY_FILE", "MANYHANDS_STATE_DIR"),
        *("MANYHANDS_PLACER", "MANYHANDS_WORKERS", "MANYHANDS_THREADS", "MANYHANDS_LISTEN", "MANYHANDS_UI"),
    )
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|PRIVATE|_KEY$|_KEY_|^KEY|APIKEY|_PAT$|_AUTH$|COOKIE")


def belongs_to_host(name: str) -> bool:
    """Whether each host keeps its own value, or has none: facts of that host, and names that look like secrets."""
    return name in _NAMES or name.startswith(_PREFIXES) or _SECRET.search(name.upper()) is not None


def shipped(environment: Mapping[str, str]) -> dict[str, str]:
    """What the first host sends to the others, over the encrypted control plane."""
    found = {name: text for name, text in environment.items() if not belongs_to_host(name)}
    sizes = {name: len(name) + len(text) for name, text in found.items()}
    if sum(sizes.values()) > MAX_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise UsageError(
            f"The environment that other hosts need has {sum(sizes.values()) // 1024} KiB, the limit is "
            f"{MAX_BYTES // 1024} KiB.",
            where=f"{largest} has {sizes[largest] // 1024} KiB",
            fix=[f"unset {largest}", "a file that all hosts read"],
        )
    return found


def merged(own: Mapping[str, str], first: Mapping[str, str], *, here: str, there: str) -> tuple[dict[str, str], str]:
    """The environment of a joining host's workers, and a line about what the first host's replaces, or ""."""
    kept = {name: text for name, text in own.items() if belongs_to_host(name)}
    different = sorted(
        name for name in own.keys() | first.keys() if not belongs_to_host(name) and own.get(name) != first.get(name)
    )
    both = [name for name in different if name in own and name in first]
    named = [*both, *(name for name in different if name not in both)][:MAX_NAMED]
    parts = [f"{name} is {_shown(own.get(name))} on {here} and {_shown(first.get(name))} on {there}" for name in named]
    more = f"; and {len(different) - len(named)} more" if len(different) > len(named) else ""
    note = f"workers here use the environment of {there}: {'; '.join(parts)}{more}" if parts else ""
    return kept | dict(first), note


def _shown(text: str | None) -> str:
    if text is None:
        return "not set"
    readable = "".join(character if character.isprintable() else "?" for character in text[:41])
    return readable if len(readable) <= 40 else readable[:40] + "…"
