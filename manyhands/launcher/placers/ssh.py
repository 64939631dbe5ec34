"""ssh: one command per host. The first host runs `mh run`, the others `mh agent`; the key goes through standard input.

What ssh hands to a host is a line for its shell: it is quoted here, from argument vectors. Pure: address, port and key
are passed in. Start reading at `plan`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from manyhands.errors import EnvironmentProblem, ManyhandsError
from manyhands.launcher.placers.spec import LaunchPlan, PlacedRun, PlanCommand
from manyhands.spec.addresses import Address
from manyhands.spec.cluster_section import ClusterSection, NamedHost

__all__ = ["CODE_DIR", "failure_of", "plan"]

OPTIONS = ("-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3")
"""Nothing is asked for: several hosts could ask at once. A host that is silent for 15 s is lost."""
CODE_DIR = ".manyhands/code"
JOBS_DIR = ".manyhands/jobs"
"""Below the home directory of each host."""
UNREACHABLE = 255
LOST_LATER = ("client_loop:", "closed by remote host", "not responding")
"""What ssh says of a connection that it had."""
NO_PROGRAM = 127


def plan(cluster: ClusterSection, run: PlacedRun, listen: Address, key: str, *, detach: bool = False) -> LaunchPlan:
    """`listen`: where the first host is reached by the others. `key`: 64 hexadecimal digits."""
    first, *others = cluster.named_hosts
    host, port = listen
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    ticket = json.dumps({"address": address, "run": "", "key": key})
    start = _Start(cluster, run, detach)
    commands = [start.copy(one) for one in cluster.named_hosts if cluster.code == "ship"]
    commands.append(start.first(first, address, len(others) + 1, key))
    commands += [start.agent(one, ticket) for one in others]
    return LaunchPlan(placer="ssh", commands=tuple(commands), notes=tuple(_notes(cluster)))


def _notes(cluster: ClusterSection) -> list[str]:
    defaults = ClusterSection()
    names = ("time", "queue", "more_queue", "account", "array", "image", "namespace", "memory", "cpus")
    return [f"{name} has no meaning for ssh." for name in names if getattr(cluster, name) != getattr(defaults, name)]


class _Start:
    def __init__(self, cluster: ClusterSection, run: PlacedRun, detach: bool) -> None:
        self._cluster, self._run, self._detach = cluster, run, detach
        ships = cluster.code == "ship"
        self._folder = f"~/{CODE_DIR}/{run.name}" if ships else run.folder
        self._typed_folder = f'"$HOME"/{shlex.quote(f"{CODE_DIR}/{run.name}")}' if ships else shlex.quote(run.folder)

    def copy(self, host: NamedHost) -> PlanCommand:
        line = f"mkdir -p {self._typed_folder} && tar -x -C {self._typed_folder}"
        return PlanCommand(argv=self._ssh(host, line), host=host.name, code=True)

    def first(self, host: NamedHost, address: str, num_hosts: int, key: str) -> PlanCommand:
        words = ["run", "--on=here", *self._run.settings, *self._workers(host)]
        words += [f"--hosts-wanted={num_hosts}", f"--listen={address}"] if num_hosts > 1 else []
        environment = {"MANYHANDS_RUN_DIR": self._run.run_dir, **self._run.environment}
        if num_hosts > 1:
            environment["MANYHANDS_KEY_FILE"] = "-"
        return self._command(host, environment, words, list(self._run.script), key if num_hosts > 1 else "", first=True)

    def agent(self, host: NamedHost, ticket: str) -> PlanCommand:
        return self._command(host, {}, ["agent", "--join=-", "--ui=none", *self._workers(host)], [], ticket)

    def _workers(self, host: NamedHost) -> list[str]:
        workers = host.workers or self._run.workers or self._cluster.gpus
        return [f"--workers={workers}"] if workers else []

    def _command(
        self,
        host: NamedHost,
        environment: Mapping[str, str],
        words: list[str],
        script: list[str],
        secret: str,
        *,
        first: bool = False,
    ) -> PlanCommand:
        lines = [self._enter(host)]
        if self._cluster.setup:  # it must not read the key
            lines.append("{ " + "\n".join(self._cluster.setup) + "\n} < /dev/null")
        program = [*_environment(environment), *self._run.program, *words]
        lines.append(self._detached(host, program + script, secret) if self._detach else _attached(program, script))
        argv = self._ssh(host, "exec bash -c " + shlex.quote("\n".join(lines)))
        stdin = f"{secret}\n" if secret else ""
        return PlanCommand(
            argv=argv, stdin=stdin, secret=bool(secret), host=host.name, first=first, lifeline=not self._detach
        )

    def _enter(self, host: NamedHost) -> str:
        what = shlex.quote(
            f"{host.name} has no directory {self._folder}. try: --code ship, or a directory of all hosts"
        )
        return f"cd {self._typed_folder} || {{ echo {what} >&2; exit 3; }}"

    def _detached(self, host: NamedHost, program: list[str], secret: str) -> str:
        """The secret into a private file, and the program into a session of its own, with its output beside it."""
        base = f"{JOBS_DIR}/ssh-{self._run.name}-{host.name.strip('[]')}"  # hosts may share a home directory
        path = f'"$HOME"/{shlex.quote(base)}.key'
        words = [one.replace("=-", "=@", 1) if one in ("--join=-", "MANYHANDS_KEY_FILE=-") else one for one in program]
        typed = " ".join(f"{one[:-1]}{path}" if one.endswith("=@") else shlex.quote(one) for one in words)
        lines = ["umask 077", f'mkdir -p "$HOME"/{JOBS_DIR}', *([f"cat > {path}"] if secret else [])]
        log = f'"$HOME"/{shlex.quote(base)}.out'
        return "\n".join([*lines, f"setsid nohup {typed} > {log} 2>&1 < /dev/null &"])

    def _ssh(self, host: NamedHost, line: str) -> tuple[str, ...]:
        # The first value of an option counts for ssh: those of the user are before ours.
        return ("ssh", *self._cluster.extra, *OPTIONS, "--", host.name.strip("[]"), line)


def _attached(program: list[str], script: list[str]) -> str:
    return shlex.join(["exec", *program, "--lifeline", *script])


def _environment(variables: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []


def failure_of(host: str, code: int, said: str) -> ManyhandsError | None:
    """The error of a host that did not start its agent, by what ssh printed; None if its agent did start."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    if code == NO_PROGRAM:
        fix = [f"install manyhands on {host}", "--setup 'source env/bin/activate', if it is in an environment"]
        return EnvironmentProblem(f"{host} could not start mh: {last}.", where="--hosts", fix=fix)
    if code != UNREACHABLE or any(words in said for words in LOST_LATER):
        return None  # the run notices the loss of a host by itself, and an elastic one continues
    if "Host key verification failed" in said or "REMOTE HOST IDENTIFICATION HAS CHANGED" in said:
        changed = "HAS CHANGED" in said
        why = "has another key than the one that ssh knows" if changed else "is not known to ssh by its key"
        fix = [f"ssh {host}, which shows the key; accept it if it is the right one"]
        return EnvironmentProblem(f"{host} {why}: {last}", where="--hosts", fix=fix)
    if "Permission denied" in said:
        fix = [f"ssh-copy-id {host}", f"ssh {host} true, which must not ask for anything"]
        return EnvironmentProblem(f"{host} did not accept this user: {last}", where="--hosts", fix=fix)
    what = f"{host} cannot be reached: {last or 'ssh ended with 255'}"
    return EnvironmentProblem(what, where="--hosts", fix=[f"ssh {host} true", f"--hosts without {host}"])
