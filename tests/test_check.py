"""`check` passes a good bundle, and says what is wrong with a bad one: damaged, lossy, or of other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from outrider.cli.check import describe
from outrider.cli.root import cli
from outrider.contracts import Graph, Output, Reading
from outrider.errors import BundleError
from outrider.manifest import describe_file, read_manifest, write_manifest
from outrider.power.telemetry import TelemetryWriter
from outrider.runtime import check as module
from outrider.runtime import load as loading
from outrider.runtime.check import TextCheck, check_bundle, first_difference
from outrider.runtime.proof import agreement, probe_rows, row_independence
from outrider.targets.fake import FakeGraph, random_logits

Wrap = Callable[[Any, str], Any]


@pytest.fixture
def bundle(quantized_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(quantized_bundle, tmp_path / "bundle"))


class Wrapped:
    """A graph whose logits go through `change(logits [R, V], tokens [S])`; everything else is the inner's."""

    def __init__(self, inner: Any, change: Callable[[np.ndarray, Any], np.ndarray]) -> None:
        self.__dict__.update(_inner=inner, _change=change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    @property
    def length(self) -> int:
        return int(self._inner.length)

    def forward(self, tokens: Any, *arguments: Any, **options: Any) -> Output:
        output = self._inner.forward(tokens, *arguments, **options)
        if not isinstance(output.logits, np.ndarray):
            return output
        return Output(self._change(output.logits, tokens), output.hidden)


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[..., np.ndarray]], None]:
    """Put a role's graph, once opened, into a `Wrapped`."""

    def install(role: str, change: Callable[..., np.ndarray]) -> None:
        original = loading.BACKENDS["onnxruntime"]

        def opener(directory: Any, graph: Any, options: Any) -> Any:
            opened = original(directory, graph, options)
            return Wrapped(opened, change) if graph.path.startswith(role) else opened

        monkeypatch.setitem(loading.BACKENDS, "onnxruntime", opener)

    return install


def check(bundle: Path) -> module.Check:
    return check_bundle(bundle, max_tokens=24, threads=1)


def by_role(result: module.Check) -> Mapping[str, module.GraphCheck]:
    return {graph.role: graph for graph in result.graphs}


def rehash(bundle: Path, name: str) -> None:
    """Make the manifest agree with a file that was changed, as a careful forger would."""
    manifest = read_manifest(bundle)
    roles = {}
    for role, entry in manifest.roles.items():
        graph = entry.graphs[0]
        files = {file: describe_file(bundle / file) for file in graph.files}
        roles[role] = replace(entry, graphs=(replace(graph, files=files),))
    assert any(name in entry.graphs[0].files for entry in roles.values())
    write_manifest(bundle, replace(manifest, roles=roles))


def test_a_good_bundle_is_ok(float_bundle: Path) -> None:
    result = check(float_bundle)
    assert (result.ok, result.problems) == (True, ())
    for role, graph in by_role(result).items():
        assert (graph.via, graph.executed_artifact) == ("artifact", True), role
        assert graph.kl == pytest.approx(0, abs=1e-5)
        assert graph.top1_agreement == 1.0
        assert graph.max_abs_error is not None
        assert graph.max_abs_error < 1e-3
    assert by_role(result)["draft"].acceptance == 1.0
    assert {(text.drafter, text.k) for text in result.texts} == {
        (drafter, k) for drafter in ("lookup", "model") for k in ("2", "5")
    }
    assert all(text.tokens == 24 and text.first_difference is None for text in result.texts)


def test_a_quantized_bundle_is_ok_and_shows_its_error(quantized_bundle: Path) -> None:
    result = check(quantized_bundle)
    assert result.ok
    target, draft = by_role(result)["target"], by_role(result)["draft"]
    assert target.kl is not None
    assert draft.kl is not None
    assert 0.7 > target.kl > draft.kl > 1e-4
    assert draft.acceptance is not None
    assert draft.acceptance < 0.2
    assert target.acceptance is None


def edit_byte(bundle: Path) -> None:
    path = bundle / "target" / "graph.onnx.data"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def edit_tokenizer(bundle: Path) -> None:
    path = bundle / "tokenizer.json"
    path.write_text(path.read_text().replace('"the"', '"hte"', 1))


def truncate_file(bundle: Path) -> None:
    path = bundle / "draft" / "graph.onnx.data"
    path.write_bytes(path.read_bytes()[:-1])


def edit_manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(bundle: Path) -> None:
        path = bundle / "manifest.json"
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return damage


def first_graph(record: dict[str, Any], role: str = "target") -> dict[str, Any]:
    graph: dict[str, Any] = record["roles"][role]["graphs"][0]
    return graph


DAMAGES = [
    pytest.param(edit_byte, "target/graph.onnx.data' has sha256", id="weight byte"),
    pytest.param(edit_tokenizer, "tokenizer.json' has sha256", id="tokenizer"),
    pytest.param(
        lambda b: (b / "target" / "graph.onnx").unlink(), "is missing from the bundle", id="missing"
    ),
    pytest.param(truncate_file, "draft/graph.onnx.data' has", id="truncated"),
    pytest.param(
        lambda b: (b / "manifest.json").write_text('{"roles": '), "not valid JSON", id="cut manifest"
    ),
    pytest.param(edit_manifest(lambda m: m.update(schema_version=99)), "99", id="version"),
    pytest.param(edit_manifest(lambda m: m["tokenizer"].update(hash="0" * 64)), "token map", id="token map"),
    pytest.param(
        edit_manifest(lambda m: first_graph(m, "draft").update(target_sha256="0" * 64)),
        "was made for the target with sha256 0000",
        id="another target",
    ),
    pytest.param(edit_manifest(lambda m: m["roles"].pop("target")), "no 'target'", id="no target"),
    pytest.param(
        edit_manifest(lambda m: first_graph(m).update(vocab_size=300)),
        "has vocab_size 328, the manifest says 300",
        id="vocabulary",
    ),
    pytest.param(
        edit_manifest(lambda m: first_graph(m)["kv"].update(layers=1)),
        "has layers 2, the manifest says 1",
        id="layers",
    ),
    pytest.param(
        edit_manifest(lambda m: first_graph(m)["kv"].update(head_dim=8)),
        "has head_dim 16, the manifest says 8",
        id="head size",
    ),
    pytest.param(edit_manifest(lambda m: first_graph(m)["options"].clear()), "lacks", id="options"),
    pytest.param(edit_manifest(lambda m: m.update(max_context="many")), "max_context", id="type"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_damaged_bundle_ends_with_one_line_and_exit_code_1(
    bundle: Path, damage: Callable[[Path], object], message: str, run_main: Callable[..., Any]
) -> None:
    damage(bundle)
    code, out, err = run_main("check", str(bundle), "--threads", "1", "-n", "8")
    assert code == 1
    assert message in err + out
    lines = [line for line in err.splitlines() if line.startswith("outrider: ")]
    assert len(lines) == 1 or "NOT ok" in out
    assert "Traceback" not in err


def test_damage_is_a_bundle_error_in_the_library(bundle: Path) -> None:
    edit_byte(bundle)
    with pytest.raises(BundleError, match="sha256"):
        check(bundle)


def test_other_weights_under_right_hashes_are_found_by_the_probe(bundle: Path) -> None:
    path = bundle / "target" / "graph.onnx.data"
    rng = np.random.default_rng(0)
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    data[: len(data) // 4] = rng.integers(0, 60, len(data) // 4)
    path.write_bytes(data.tobytes())
    rehash(bundle, "target/graph.onnx.data")
    result = check(bundle)
    assert not result.ok
    assert any("target: logits are" in problem for problem in result.problems)


def test_a_target_whose_rows_feel_later_rows_is_refused(
    float_bundle: Path, wrap: Callable[..., None]
) -> None:
    """One scale for the whole forward, as a dynamic activation scale would have."""

    def lossy(logits: np.ndarray, tokens: Any) -> np.ndarray:
        return logits * np.float32(1 + 1e-4 * (int(np.sum(tokens)) % 7))

    wrap("target", lossy)
    result = check(float_bundle)
    assert not result.ok
    assert any("feel later rows" in p and "not lossless" in p for p in result.problems)
    rows = by_role(result)["target"].row_independence
    assert rows is not None
    assert rows.suffix > 0


def test_a_draft_whose_rows_feel_later_rows_is_allowed(float_bundle: Path, wrap: Callable[..., None]) -> None:
    wrap("draft", lambda logits, tokens: logits * np.float32(1 + 1e-4 * (int(np.sum(tokens)) % 7)))
    assert check(float_bundle).ok


def test_a_target_that_depends_on_the_width_is_caught_in_the_text(
    float_bundle: Path, wrap: Callable[..., None]
) -> None:
    """Other logits in a verify than in a plain step: the text is not the target's own, whatever the draft does."""

    def biased(logits: np.ndarray, tokens: Any) -> np.ndarray:
        changed = logits.copy()
        if 1 < len(tokens) < 7:
            changed[:, 40] += 1000
        return changed

    wrap("target", biased)
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr(module, "_width_noise", lambda *_: 0.0)
        result = check(float_bundle)
    assert not result.ok
    assert any("differs from the target's own at token" in problem for problem in result.problems)


def test_noise_of_a_draft_excuses_no_difference_of_the_text(
    float_bundle: Path, wrap: Callable[..., None]
) -> None:
    wrap("draft", lambda logits, tokens: logits * (1 + len(tokens) % 2))
    result = check(float_bundle)
    target, draft = (by_role(result)[role].row_independence for role in ("target", "draft"))
    assert target is not None
    assert draft is not None
    assert draft.width > 1
    pipeline: Any = SimpleNamespace(placement=result.placement)
    assert module._width_noise(result.graphs, pipeline) == target.width < 1e-3


@pytest.mark.parametrize("kind", ["noise", "constant"])
def test_a_draft_of_garbage_leaves_the_text_as_it_is(
    float_bundle: Path, wrap: Callable[..., None], kind: str
) -> None:
    rng = np.random.default_rng(5)

    def garbage(logits: np.ndarray, tokens: Any) -> np.ndarray:
        if kind == "constant":
            return np.eye(1, logits.shape[1], 50, dtype=np.float32).repeat(len(logits), 0) * 99
        return rng.standard_normal(logits.shape).astype(np.float32) * 30

    wrap("draft", garbage)
    result = check(float_bundle)
    assert all(text.first_difference is None for text in result.texts)
    assert by_role(result)["draft"].acceptance < 0.2  # type: ignore[operator]
    assert [problem.split(":")[0] for problem in result.problems] == ["draft"]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_logits_that_are_not_finite_are_a_problem(
    float_bundle: Path, wrap: Callable[..., None], role: str
) -> None:
    wrap(role, lambda logits, tokens: np.full_like(logits, np.nan))
    result = check(float_bundle)
    assert not result.ok
    assert f"{role}: logits are not finite" in result.problems[0]
    assert by_role(result)[role].kl is None


def test_without_evaluation_all_the_rest_is_proven_and_the_verdict_says_what_is_missing(
    tiny_models: dict[str, Path], export_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    pair = (tiny_models["target"], "int8"), (tiny_models["draft"], "int8")
    export_tiny(tmp_path / "bundle", *pair, evaluate=False)
    result = check(tmp_path / "bundle")
    assert (result.ok, result.evaluated) == (True, False)
    for graph in result.graphs:
        assert (graph.executed_artifact, graph.evaluated, graph.kl) == (True, False, None)
        assert graph.row_independence is not None
    assert {text.drafter for text in result.texts} == {"lookup", "model"}
    lines = describe(result).splitlines()
    assert lines[-1].startswith("ok, but not evaluated: it was exported with --no-evaluate")
    assert sum("not evaluated: the bundle holds no logits" in line for line in lines) == 2


def test_without_evaluation_a_leaking_target_is_still_refused(
    tiny_models: dict[str, Path], export_tiny: Callable[..., Any], wrap: Any, tmp_path: Path
) -> None:
    export_tiny(tmp_path / "bundle", (tiny_models["target"], "int8"), max_context=16, evaluate=False)
    wrap("target", lambda logits, tokens: logits + 0.01 * tokens[-1])
    result = check(tmp_path / "bundle")
    assert not result.ok
    assert "verify rows feel later rows" in result.problems[0]


def test_a_small_context_can_be_checked(
    tiny_models: dict[str, Path], export_tiny: Callable[..., Any], tmp_path: Path
) -> None:
    export_tiny(tmp_path / "bundle", (tiny_models["target"], "fp32"), max_context=16)
    assert check(tmp_path / "bundle").ok


def test_json_has_the_promised_fields_and_recorded_heat_leaves_the_text(
    float_bundle: Path, tmp_path: Path
) -> None:
    with TelemetryWriter(tmp_path / "hot.jsonl") as writer:
        writer([Reading("die", "temperature", 84.9, "die", "instant", 0.0)])
    words = ["--json", "-n", "8", "--threads", "1", "--telemetry", str(tmp_path / "hot.jsonl")]
    done = CliRunner().invoke(cli, ["check", str(float_bundle), *words])
    assert done.exit_code == 0
    record = json.loads(done.stdout)
    assert record["ok"] is True
    names = "role backend unit profile via executed_artifact max_abs_error top1_agreement kl acceptance"
    for graph in record["graphs"]:
        assert set(names.split()) <= set(graph)
    assert [graph["role"] for graph in record["graphs"]] == ["target", "draft"]
    chosen = [text["first_difference"] for text in record["texts"] if text["k"] == "auto"]
    assert chosen == [None] * 3  # one of each prompt, governed


def text_check(gap: float | None, noise: float) -> TextCheck:
    top = [] if gap is None else [(1, 5.0), (2, 5.0 - gap)]
    stats = SimpleNamespace(acceptance=None)
    plain = SimpleNamespace(tokens=(4, 1), logprobs=[None, SimpleNamespace(top=top)], stats=stats)
    drafted = SimpleNamespace(tokens=(4, 2), stats=stats)
    found: TextCheck = module._compare("lookup", 2, plain, drafted, noise)  # type: ignore[arg-type]
    return found


def test_a_difference_is_a_near_tie_only_within_the_noise_of_both_logits() -> None:
    assert text_check(0.019, 0.01).near_tie
    assert not text_check(0.021, 0.01).near_tie
    assert not text_check(None, 0.01).near_tie
    assert text_check(0.019, 0.01).first_difference == 1


def test_the_first_difference_of_two_texts() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_agreement_equals_its_definition_on_the_common_vocabulary() -> None:
    rng = np.random.default_rng(0)
    ours, reference = rng.standard_normal((2, 3, 9)).astype(np.float32)
    found = agreement(np.concatenate([ours, np.full((3, 2), 9, np.float32)], 1), reference)
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (reference, ours))
    assert found.kl == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-5)
    assert found.max_abs_error == pytest.approx(np.abs(ours - reference).max())
    assert found.top1_agreement == (ours.argmax(1) == reference.argmax(1)).mean()


@pytest.mark.parametrize("widths", [None, (1, 4), (5,), (64,)])
@pytest.mark.parametrize("length", [5, 24, 60])
def test_rows_that_see_only_their_past_are_independent_at_any_width(
    widths: tuple[int, ...] | None, length: int
) -> None:
    graph: Graph = FakeGraph(17, max_context=64, logits=random_logits(17, 1, order=None), widths=widths)
    found = row_independence(graph, np.arange(length) % 17)
    assert (found.suffix, found.width, graph.length) == (0.0, 0.0, 0)
    assert found.spread > 0.5


def test_a_row_that_sees_the_next_one_is_found_at_every_width() -> None:
    for width in (2, 3, 5, 8):
        inner = FakeGraph(17, max_context=64, logits=random_logits(17, 1, order=None))

        def leak(logits: np.ndarray, tokens: Any, width: int = width) -> np.ndarray:
            changed = logits.copy()
            if len(tokens) == width and len(logits) == width:
                changed[0] += 1e-3 * tokens[-1]
            return changed

        graph: Any = Wrapped(inner, leak)
        assert row_independence(graph, np.arange(40) % 17).suffix > 1e-4


def test_probe_rows_are_the_same_in_narrow_chunks() -> None:
    tokens = np.arange(30) % 17
    logits = random_logits(17, 1, order=None)
    expected = np.stack([logits(tuple(tokens[: row + 1].tolist())) for row in (3, 4, 29)])
    for widths in (None, (1, 4), (7,)):
        graph: Graph = FakeGraph(17, max_context=64, logits=logits, widths=widths)
        np.testing.assert_allclose(probe_rows(graph, tokens, [3, 4, 29]), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("emulated", "quick", "short"),
    [
        (set(), True, set()),
        ({"draft"}, False, set()),
        ({"draft"}, True, {"model"}),
        ({"target"}, True, {"lookup", "model"}),
    ],
)
def test_what_an_emulator_takes_part_in_is_one_short_text_where_it_is_to_be_quick(
    emulated: set[str], quick: bool, short: set[str]
) -> None:
    from types import SimpleNamespace

    from outrider.runtime.check import DRAFTED, PROMPTS, QUICK_TOKENS, _texts

    pipeline: Any = SimpleNamespace(
        engine=SimpleNamespace(target=SimpleNamespace(widths=None), drafters={"lookup": 0, "model": 1}),
        placement=[SimpleNamespace(role=role, emulated=role in emulated) for role in ("target", "draft")],
    )
    whole, part = [], []
    for text in _texts(pipeline, 64, quick):
        (whole if text.max_tokens == 64 else part).append(text)
    assert len(whole) == (0 if short == {"lookup", "model"} else len(PROMPTS))
    for text in whole:
        names = [name for name in ("lookup", "model") if name not in short]
        assert text.drafted == tuple((name, k) for name in names for k in DRAFTED)
    assert [(text.max_tokens, {name for name, _ in text.drafted}) for text in part] == (
        [(QUICK_TOKENS, short)] if short else []
    )
