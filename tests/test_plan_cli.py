"""`outrider plan` prints the choice, its reasons and what was refused, each figure with its origin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.placement_pairs import write_pair

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    return write_pair(tmp_path / "pair")


def test_a_plan_says_where_how_and_by_which_figures(run_main: Run, pair: Path) -> None:
    code, out, err = run_main("plan", str(pair), "--device", "raspberry-pi-5")
    assert (code, err) == (0, "")
    head, *_ = out.splitlines()
    assert "6400 MB that an app may take (assumed: 80% of 8 GB)" in head
    assert "acceptance 0.90 (greedy match, measured at export)" in head
    for words in ("target cpu", "draft  cpu", "together ", "drafting: ", "tokens/s (modelled)", "* "):
        assert words in out


def test_json_has_every_option_and_refusal(run_main: Run, pair: Path) -> None:
    words = ("plan", str(pair), "--device", "raspberry-pi-5", "--json", "--memory-limit", "550")
    code, out, _ = run_main(*words)
    assert code == 0
    plan = json.loads(out)
    assert plan["options"][0] == plan["chosen"]
    assert plan["limit"] == {"mb": 550.0, "how": "of --memory-limit", "reserve_mb": pytest.approx(16.5)}
    assert plan["chosen"]["draft"] is None
    assert any("draft on cpu" in refusal["what"] for refusal in plan["refused"])
    assert {option["basis"] for option in plan["options"]} == {"modelled"}


def test_acceptance_and_objective_are_honoured(run_main: Run, pair: Path) -> None:
    base = ("plan", str(pair), "--device", "raspberry-pi-5", "--json")
    low, high = (json.loads(run_main(*base, "--acceptance", share)[1]) for share in ("0.05", "0.95"))
    assert low["chosen"]["mode"] == "none"
    assert high["chosen"]["k"] > 1
    assert high["acceptance_from"] == "as given"
    cheap = json.loads(run_main(*base, "--objective", "energy")[1])
    assert cheap["chosen"]["token_j"] == min(option["token_j"] for option in cheap["options"])


def test_without_a_measured_pair_the_acceptance_is_assumed(run_main: Run, tmp_path: Path) -> None:
    bundle = write_pair(tmp_path / "pair", quality=False)
    assert "acceptance 0.70 (assumed)" in run_main("plan", str(bundle), "--device", "raspberry-pi-4")[1]
    record = json.loads((bundle / "manifest.json").read_text())
    for pair in (None, 3, {"greedy_match": None}, {"greedy_match": 7.0}):
        record["quality"] = {"pair": pair}
        (bundle / "manifest.json").write_text(json.dumps(record))
        assert "acceptance 0.70 (assumed)" in run_main("plan", str(bundle), "--device", "raspberry-pi-4")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target-unit", "cpu:7"), "unit 'cpu:7': there is no core 7, only cpu:0-3"),
        (
            ("--target-unit", "cpu:0", "--draft-unit", "cpu:0-1"),
            "--target-unit and --draft-unit share core 0",
        ),
        (("--memory-limit", "100"), "nothing fits into the 100 MB of --memory-limit"),
        (("--target-unit", "npu"), "--target-unit is 'npu'; raspberry-pi-5 has cpu"),
        (("--max-context", "5000"), "it holds 1024 tokens, 5000 were asked for"),
    ],
)
def test_mistakes_name_the_smallest_plan_that_would_work(
    run_main: Run, pair: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = run_main("plan", str(pair), "--device", "raspberry-pi-5", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "the smallest plan that would work: the target on cpu by onnxruntime (int4), 256 tokens" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either a bundle or a target model"),
        (("BUNDLE", "--model", "x"), "give either a bundle or a target model"),
        (("BUNDLE", "--precision", "int8"), "--precision concerns models"),
        (("--model", "x", "--draft-precision", "int8"), "--draft-precision was given, but no --draft-model"),
        (("BUNDLE", "--device", "fridge"), "unknown device 'fridge'"),
        (("--model", ""), "the name of a model is empty"),
    ],
)
def test_contradictions_are_refused(run_main: Run, pair: Path, words: tuple[str, ...], message: str) -> None:
    code, _, err = run_main("plan", *(str(pair) if word == "BUNDLE" else word for word in words))
    assert code == 2
    assert message in err


def test_models_are_planned_for_from_their_headers(run_main: Run, tiny_models: dict[str, Path]) -> None:
    target, draft = (tiny_models[role] for role in ("target", "draft"))
    words = (
        "plan",
        "--model",
        str(target),
        "--draft-model",
        str(draft),
        "--device",
        "iphone-16-pro",
        "--json",
    )
    code, out, err = run_main(*words)
    assert (code, err) == (0, "")
    plan = json.loads(out)
    units = {option["target"]["unit"] for option in plan["options"]}
    assert units == {"gpu", "cpu"}
    assert {option["target"]["backend"] for option in plan["options"]} == {"coreml", "onnxruntime"}


@pytest.mark.parametrize("option", ["--model", "--draft-model"])
def test_a_plan_downloads_no_weights(
    run_main: Run, tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setenv("OUTRIDER_HOME", str(tmp_path))
    models = {"--model": str(tiny_models["target"]), option: "qwen2.5-coder-1.5b-q4_k_m"}
    code, out, err = run_main("plan", *(word for pair in models.items() for word in pair))
    assert (code, out) == (2, "")
    assert "`outrider fetch qwen2.5-coder-1.5b-q4_k_m` does (1117 MB)" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["someone/a-model", "smollm2-135m"])
def test_of_the_hub_a_plan_takes_the_configuration_alone(
    run_main: Run, tiny_models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    asked = []

    def hub_file(repo: str, file: str, revision: str | None) -> Path:
        asked.append((repo, file))
        return tiny_models["target"] / file

    monkeypatch.setattr("outrider.export.checkpoint.hub_file", hub_file)
    code, _, err = run_main("plan", "-m", name, "--device", "raspberry-pi-5")
    assert (code, err) == (0, "")
    assert asked == [({"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}.get(name, name), "config.json")]
