"""The governor against an oracle, plain decoding and every fixed k, over the scenarios of `scenarios.py`.

    python -m benchmarks.power                    # a table, and what was asked for against what was reached
    python -m benchmarks.power --json             # {"scenarios": [...]}, one record each
    python -m benchmarks.power --only tensor-g4   # scenarios whose name holds this
    python -m benchmarks.power --specimen 1       # the same scenarios on other specimens, which nobody tuned for
    python -m benchmarks.power -o kept.jsonl      # each record is kept as it comes, and not run again next time
    python -m benchmarks.power --phone            # twenty minutes on a phone against every fixed k

Everything is simulated: no device was measured. Acceptance is real: `data/acceptance.jsonl` was recorded with
`outrider acceptance` from the Qwen2.5-Coder pair. Ratios are of the scenario's goal: tokens for `latency`, tokens
a joule for `energy`, the geometric mean of both for `balanced`; above 1 the governed run is better.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.power.oracle import oracle
from benchmarks.power.scenarios import days, phone_twenty_minutes, suite
from benchmarks.summary import markdown_table
from outrider.contracts import as_json
from outrider.runtime.profiling.simulate import compare, run_policy
from outrider.targets.scenario import Scenario
from outrider.targets.trace_model import TraceText, read_acceptance

__all__ = ["Score", "judge", "main"]

ACCEPTANCE = Path(__file__).with_name("data") / "acceptance.jsonl"


@dataclass(frozen=True)
class Score:
    """One scenario. `over_limit_c` and `over_cap` are the worst excess of the governed run (°C, share of the cap).

    `blind_over_oracle` is what an oracle reaches that knows all but the text to come, `governed_over_blind` the
    governed run beside that. `limits_can_be_held` is False where even an oracle that rests breaks a limit.
    """

    name: str
    device: str
    ambient_c: float
    acceptance: str
    objective: str
    goal: str
    minutes: float
    governed_over_oracle: float
    blind_over_oracle: float
    governed_over_blind: float
    governed_over_plain: float
    tokens_per_s: float
    j_per_token: float
    mean_k: float
    over_limit_c: float
    oracle_over_limit_c: float
    over_cap: float
    level_changes_per_minute: float
    limits_can_be_held: bool
    seed: int = 0  # of the specimen
    simulated: bool = True


def goal(objective: str, tokens: float, seconds: float, joules: float) -> float:
    """What a scenario wants much of: tokens/s, tokens/J, or the geometric mean of the two."""
    rate, thrift = tokens / seconds, tokens / joules
    return {"latency": rate, "energy": thrift, "balanced": math.sqrt(rate * thrift)}[objective]


def judge(scenario: Scenario, texts: Sequence[TraceText]) -> Score:
    """Run a scenario governed and plain, and ask the oracle."""
    governed, plain = (run_policy(scenario, name, texts) for name in ("governed", "plain"))
    best, blind = oracle(scenario, texts), oracle(scenario, texts, foresight=False)
    mine = goal(scenario.objective, governed.tokens, governed.seconds, governed.energy_j)
    others = goal(scenario.objective, plain.tokens, plain.seconds, plain.energy_j)
    bound = goal(scenario.objective, best.tokens, scenario.duration_s, best.energy_j)
    without = goal(scenario.objective, blind.tokens, scenario.duration_s, blind.energy_j)
    parts = [*scenario.name.split("/"), "", "", ""]
    return Score(
        name=scenario.name,
        device=scenario.device,
        ambient_c=scenario.ambient_c,
        acceptance=parts[2] or "switching",
        objective=scenario.objective,
        goal=parts[3] or scenario.objective,
        minutes=scenario.duration_s / 60.0,
        governed_over_oracle=mine / bound,
        blind_over_oracle=without / bound,
        governed_over_blind=mine / without,
        governed_over_plain=mine / others,
        tokens_per_s=governed.tokens_per_s,
        j_per_token=governed.energy_j / governed.tokens,
        mean_k=governed.mean_k or 0.0,
        over_limit_c=governed.peak_over_c,
        oracle_over_limit_c=_over(scenario, best.peak_die_c, best.peak_skin_c),
        over_cap=governed.cap_violation,
        level_changes_per_minute=60.0 * governed.level_changes / scenario.duration_s,
        limits_can_be_held=best.feasible,
        seed=scenario.seed,
    )


def judge_all(
    scenarios: Sequence[Scenario], texts: Sequence[TraceText], jobs: int, kept: Path | None
) -> list[Score]:
    """Every scenario's score, in order; those that the file holds are not run, and new ones go there as they come."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept is not None and kept.exists() else []
    known = {(score.name, score.seed): score for score in (Score(**json.loads(line)) for line in lines)}
    left = [scenario for scenario in scenarios if (scenario.name, scenario.seed) not in known]
    with ProcessPoolExecutor(jobs) as pool:
        for done in as_completed(pool.submit(judge, scenario, texts) for scenario in left):
            score = done.result()
            known[score.name, score.seed] = score
            if kept is not None:
                with kept.open("a", encoding="utf-8") as file:
                    print(json.dumps(as_json(score)), file=file)
    return [known[scenario.name, scenario.seed] for scenario in scenarios]


def _over(scenario: Scenario, die_c: float, case_c: float) -> float:
    pairs = ((die_c, scenario.temp_limit_c), (case_c, scenario.skin_limit_c))
    return max((c - limit for c, limit in pairs if limit is not None), default=-math.inf)


def format_scores(scores: Sequence[Score]) -> str:
    """A table, worst against the oracle first, and the promises."""
    head = [
        "scenario",
        "goal",
        "/ oracle",
        "blind / oracle",
        "/ plain",
        "tok/s",
        "J/tok",
        "k",
        "°C over",
        "over cap",
        "changes/min",
    ]
    body = [
        [
            score.name,
            score.goal,
            f"{score.governed_over_oracle:.3f}",
            f"{score.blind_over_oracle:.3f}",
            f"{score.governed_over_plain:.3f}",
            f"{score.tokens_per_s:.2f}",
            f"{score.j_per_token:.3f}",
            f"{score.mean_k:.1f}",
            f"{score.over_limit_c:+.1f}" + ("" if score.limits_can_be_held else " (no plan holds it)"),
            f"{score.over_cap:.1%}",
            f"{score.level_changes_per_minute:.1f}",
        ]
        for score in sorted(scores, key=lambda score: score.governed_over_oracle)
    ]
    return "\n".join(
        [markdown_table(head, body), "", *promises(scores), "", "Simulated; no device was measured."]
    )


def promises(scores: Sequence[Score]) -> list[str]:
    """What is promised and what was reached."""
    shares = [score.governed_over_oracle for score in scores]
    plain = [score.governed_over_plain for score in scores]
    held = [score for score in scores if score.limits_can_be_held]
    lines = [
        (
            "of the oracle, median",
            f"{statistics.median(shares):.3f}",
            "0.98",
            statistics.median(shares) >= 0.98,
        ),
        ("of the oracle, worst", f"{min(shares):.3f}", "0.95", min(shares) >= 0.95),
        ("of plain decoding, worst", f"{min(plain):.3f}", "0.97", min(plain) >= 0.97),
    ]
    most_c = max((score.over_limit_c for score in held), default=-math.inf)
    most_w = max(score.over_cap for score in scores)
    changes = max(score.level_changes_per_minute for score in scores)
    lines += [
        ("°C over a limit that can be held, worst", f"{most_c:+.2f}", "+1", most_c <= 1.0),
        ("10 s mean power over the cap, worst", f"{most_w:.1%}", "3 %", most_w <= 0.03),
        ("level changes a minute, worst", f"{changes:.1f}", "4", changes <= 4.0),
    ]
    return [
        f"{name}: {found} (promised {wanted}: {'yes' if ok else 'NO'})" for name, found, wanted, ok in lines
    ]


def phone(texts: Sequence[TraceText]) -> str:
    """Twenty minutes on a phone: governed against every fixed k under the same limits, paced and not."""
    scenario = phone_twenty_minutes(texts)
    best = oracle(scenario, texts)
    runs = compare(scenario, ["plain", "plain unpaced", "best-fixed", "governed"], texts)
    ungoverned = [run_policy(scenario, f"k={k} unpaced", texts) for k in (1, 2, 3, 4, 6, 8)]
    body = [
        [run.policy, str(run.tokens), f"{run.j_per_token:.3f}", f"{run.peak_c:.1f}", f"{run.peak_case_c:.1f}",
         f"{run.over_limit_s:.0f}", f"{run.tokens / best.tokens:.3f}"]
        for run in [*runs, *ungoverned]
    ]  # fmt: skip
    head = ["policy", "tokens", "J/token", "peak die °C", "peak case °C", "s over limit", "/ oracle"]
    return (
        f"{scenario.name}, limits {scenario.temp_limit_c} and {scenario.skin_limit_c} °C (simulated)\n\n"
        + (markdown_table(head, body))
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge the governor; exit code 1 when a promise is not kept."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.power", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="scenarios whose name holds this")
    parser.add_argument("--days", action="store_true", help="the scripted days as well")
    parser.add_argument("--phone", action="store_true", help="only the twenty minutes on a phone")
    parser.add_argument("--acceptance", type=Path, default=ACCEPTANCE)
    parser.add_argument("--specimen", type=int, default=0, help="added to every seed")
    parser.add_argument(
        "-o", "--output", type=Path, help="JSON lines: what it holds is not run, what comes is added"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args(arguments)
    texts = read_acceptance(options.acceptance)
    if options.phone:
        print(phone(texts))
        return 0
    chosen = [s for s in [*suite(texts), *(days(texts) if options.days else [])] if options.only in s.name]
    if not chosen:
        parser.error(f"no scenario's name holds {options.only!r}")
    chosen = [replace(scenario, seed=scenario.seed + options.specimen) for scenario in chosen]
    scores = judge_all(chosen, texts, options.jobs, options.output)
    print(
        json.dumps({"scenarios": [as_json(score) for score in scores]}, indent=1)
        if options.json
        else format_scores(scores)
    )
    return 0 if all(line.endswith("yes)") for line in promises(scores)) else 1


if __name__ == "__main__":
    sys.exit(main())
