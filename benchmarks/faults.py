"""Faults: every way to fail, at every point, on every kind of rank: how long until the job is over, and why.

    python benchmarks/faults.py --out runs/faults                 all of them, an hour on two cores
    python benchmarks/faults.py --only kill --only "2-1 1f1b"     those whose names contain all of these
    python benchmarks/faults.py --sample 20 --seed 1              some of them
    python benchmarks/faults.py --cut                             three hosts, one of them cut off (as root)

Each is a job of its own under mpirun, with HYBRIDPIPE_FAULT; tests/mpi/faulting.py runs it and says what must
hold: over within 5 s of the fault (10 s for KILL and SEGV), exit code other than 0, the right rank and cause
reported and no other, no process left a second later. Writes DIR/faults.json and a table in DIR/faults.md;
exit code 1 if anything did not hold.
"""

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from networks import ROOT
from tabulate import tabulate

from hybridpipe.files import write_json

sys.path.insert(0, str(ROOT))

from tests.mpi import cutting
from tests.mpi.faulting import Case

KINDS = ("raise", "exit", "thread", "kill", "segv")
HANG_SECONDS = 5.0
# plan, schedule, rank: what it is
RANKS = {
    ("1-1-1", "1f1b", 0): "first stage",
    ("1-1-1", "1f1b", 1): "middle stage",
    ("1-1-1", "gpipe", 2): "last stage",
    ("2-1", "1f1b", 1): "replica of the first stage",
    ("1-2", "1f1b", 2): "replica of the last stage",
    ("2", "1f1b", 1): "replica of the only stage",
    ("1-2", "pipedream", 0): "first stage, asynchronous",
    ("2-1", "pipedream-2bw", 0): "replica of the first stage, asynchronous",
}


def points(plan: str, schedule: str, rank: int) -> Iterator[str]:
    """The points that the rank passes."""
    replicas = [int(count) for count in plan.split("-")]
    stage = next(s for s in range(len(replicas)) if rank < sum(replicas[: s + 1]))
    first, last = stage == 0, stage == len(replicas) - 1
    yield from ("forward", "backward", "step", "evaluate")
    if first or last:
        yield "load"
    if not first:
        yield from ("receive-activation", "send-gradient")
    if not last:
        yield from ("send-activation", "receive-gradient")
    if replicas[stage] > 1 or schedule != "pipedream":
        yield "all-reduce"


def cases() -> list[Case]:
    """The whole matrix."""
    return [
        Case(plan, schedule, rank, point, kind)
        for plan, schedule, rank in RANKS
        for point in points(plan, schedule, rank)
        for kind in KINDS
    ]


def table(found: Sequence[dict]) -> str:
    """For each kind of rank and fault the longest time until the end, and how many did not hold."""
    groups: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for each in found:
        groups[each["rank"]][each["kind"]].append(each)
    rows = [
        {"seconds until the end, at most": rank}
        | {
            kind: f"{max(each['seconds'] for each in of_kind):.1f} ({len(of_kind)})"
            + (f" {wrong} WRONG" if (wrong := sum(bool(each["mistakes"]) for each in of_kind)) else "")
            for kind, of_kind in kinds.items()
        }
        for rank, kinds in groups.items()
    ]
    return tabulate(rows, headers="keys", tablefmt="github")


def run(chosen: Sequence[Case], out: Path) -> list[dict]:
    """One after the other; what did not hold is told at once, with its output in DIR."""
    found = []
    for i, case in enumerate(chosen, start=1):
        ended, mistakes = case.run()
        print(f"{i}/{len(chosen)} {case}: {ended.seconds:.1f} s", *mistakes, sep="; ", flush=True)
        if mistakes:
            (out / f"{str(case).replace(' ', '-')}.txt").write_text(ended.output)
        rank = f"{RANKS[case.plan, case.schedule, case.rank]} ({case.plan} {case.schedule})"
        found.append(
            {
                "case": str(case),
                "rank": rank,
                "kind": case.kind,
                "seconds": ended.seconds,
                "mistakes": mistakes,
            }
        )
        write_json(out / "faults.json", {"cases": found})
    return found


def cut() -> int:
    """A link that is cut, on each side of it."""
    if not cutting.is_possible():
        print("--cut needs root, netcluster and no cluster that is up")
        return 2
    limit = HANG_SECONDS + 10
    for host in ("h2", "h1"):  # h1 is where mpirun runs
        ended = cutting.train_and_cut(host, "1-1-1", HANG_SECONDS)
        print(f"{host} cut off: over after {ended.seconds:.1f} s, at most {limit:g}; exit code {ended.code}")
        print(*ended.reports, sep="\n")
        if ended.code == 0 or ended.seconds > limit:
            return 1
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/faults"))
    parser.add_argument("--only", action="append", default=[], metavar="TEXT")
    parser.add_argument("--sample", type=int, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut", action="store_true")
    options = parser.parse_args()
    if options.cut:
        return cut()
    chosen = [case for case in cases() if all(text in str(case) for text in options.only)]
    if options.sample is not None:
        chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
    options.out.mkdir(parents=True, exist_ok=True)
    found = run(chosen, options.out)
    text = table(found)
    (options.out / "faults.md").write_text(text + "\n")
    print(f"\n{text}\n\nseconds, and in how many jobs; written to {options.out}")
    return int(any(each["mistakes"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
