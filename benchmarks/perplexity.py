"""Perplexity of the peers' models on their own graphs, beside the float weights of the GGUF file they were made from.

    python -m benchmarks.perplexity --gguf MODEL.gguf [--genai DIR ...] [--json FILE]

The text, its tokens and its segments are those on which `outrider export` measures a target: 2,048 tokens of
WikiText-2, 1,024 at a time, teacher-forced. onnxruntime-genai returns the logits of its `Generator`; llama.cpp
reads the GGUF file itself and says what each token, forced by a bias, cost it without the bias. The reference is
the float32 decoder over the dequantized weights. What is found is kept beside the model (in a genai folder),
where `benchmarks.speed` shows it with the times: a speed at another quality is not a comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines import Worker
from benchmarks.options import at_least, genai_folder, gguf_file, named, new_file, told
from benchmarks.peers import PEERS, installed_python
from benchmarks.summary import markdown_table
from benchmarks.worker import negative_log_likelihood
from outrider.errors import UsageError
from outrider.records import decode, parsed, replaced

__all__ = ["WITHIN", "Perplexity", "keep", "known", "measure_models", "perplexity", "with_targets"]

WITHIN = 0.03  # how much more than the float weights still counts as their quality
Costs = NDArray[np.float64]  # [T], nats


@dataclass(frozen=True)
class Perplexity:
    """Of a model and of its float reference on the same tokens; `error` is the standard error of the increase."""

    perplexity: float
    reference: float
    error: float | None
    tokens: int

    def __post_init__(self) -> None:
        """Refuse what no model has."""
        if not (self.perplexity > 0 and self.reference > 0):
            raise UsageError(f"{self.perplexity} beside {self.reference} are no perplexities")

    @property
    def increase(self) -> float:
        """0.03 is 3 % worse than the float weights."""
        return self.perplexity / self.reference - 1

    def __str__(self) -> str:
        return (
            f"{self.perplexity:.2f} ({self.increase:+.1%}{'' if self.increase <= WITHIN else ', too much'})"
        )


def perplexity(costs: Costs, reference: Costs) -> Perplexity:
    """From what the same tokens cost both; the error is that of a mean of paired differences.

    Raises ValueError when they are not of the same tokens.
    """
    if len(costs) != len(reference) or len(costs) < 2:
        raise ValueError(f"{len(costs)} and {len(reference)} tokens cannot be compared")
    ratio = np.exp(costs.mean() - reference.mean())
    spread = (costs - reference).std(ddof=1) / np.sqrt(len(costs))
    exact = float(np.exp(reference.mean()))
    return Perplexity(float(np.exp(costs.mean())), exact, float(ratio * spread), len(costs))


def keep(model: Path, found: Perplexity) -> None:
    """Write it beside the model, with what tells its weights from others; where that fails, a line says so."""
    record = {"weights": _weights(model), "found": asdict(found)}
    with _or_a_line(), replaced(_place(model)) as stream:
        stream.write(json.dumps(record).encode() + b"\n")


def known(model: Path) -> Perplexity | None:
    """What was kept beside these weights of a peer, or what the export of a bundle measured; else None.

    A line on stderr says what is there but unreadable, or of other weights.
    """
    place = model / "manifest.json"
    read = _of_export if place.exists() else _of_peer
    place = place if place.exists() else _place(model)
    try:
        return read(model, parsed(json.loads, place.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        print(f"{place} is ignored: {error}", file=sys.stderr)
        return None


def _of_peer(model: Path, record: Any) -> Perplexity:
    if record.get("weights") != _weights(model):
        raise ValueError("it is not of the weights that lie there now")
    found: Perplexity = decode(Perplexity, record["found"], "found", ValueError)
    return found


def _of_export(_: Path, manifest: Any) -> Perplexity | None:
    quality = manifest["quality"].get("target")
    if not quality:
        return None
    ours, exact = float(quality["perplexity"]), float(quality["perplexity_reference"])
    return Perplexity(ours, exact, error=None, tokens=int(quality["tokens"]))


def _weights(model: Path) -> dict[str, list[int]]:
    """Size and time of the files that hold the weights: another model in their place has others."""
    files = sorted(model.glob("*.onnx*")) if model.is_dir() else [model]
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


@contextmanager
def _or_a_line() -> Iterator[None]:
    """What was measured is worth more than the file that keeps it."""
    try:
        yield
    except OSError as error:
        print(f"{error.filename} is not kept: {error.strerror or error}", file=sys.stderr)


def _place(model: Path) -> Path:
    return model / "perplexity.json" if model.is_dir() else model.with_name(model.name + ".perplexity.json")


def with_targets(segments: Iterable[NDArray[np.int64]]) -> list[dict[str, list[int]]]:
    """A request for each segment. The last row of one predicts the first token of the next, that of all nothing."""
    parts = [[int(token) for token in segment] for segment in segments]
    following = [part[0] for part in parts[1:]]
    ends = [[token] for token in following] + [[]]
    return [{"tokens": part, "targets": part[1:] + end} for part, end in zip(parts, ends, strict=True)]


def _segments(gguf: Path) -> list[NDArray[np.int64]]:
    from tokenizers import Tokenizer as Backend

    from outrider.export.checkpoint import open_checkpoint
    from outrider.export.evaluate import SEGMENT
    from outrider.export.options import WHOLE
    from outrider.quantize.quality import evaluation_text
    from outrider.runtime.text import Tokenizer

    with open_checkpoint(gguf) as checkpoint:
        files = checkpoint.tokenizer
    backend = Backend.from_str(files.tokenizer_json)
    tokenizer = Tokenizer(backend, bos_id=files.bos_id, add_bos=files.add_bos)
    ids = np.asarray(tokenizer.encode(evaluation_text())[: WHOLE.wikitext], np.int64)
    return [ids[start : start + SEGMENT] for start in range(0, len(ids), SEGMENT)]


def _float_costs(gguf: Path, segments: Sequence[NDArray[np.int64]]) -> Costs:
    """What the tokens cost the dequantized weights; computed once, and then read from beside the GGUF file."""
    place, tokens = gguf.with_name(gguf.name + ".float-costs.npz"), np.concatenate(segments)
    of = json.dumps(_weights(gguf))
    with suppress(OSError, ValueError, LookupError, EOFError, BadZipFile), place.open("rb") as stream:
        held = np.load(stream)
        if held["of"] == of and np.array_equal(held["tokens"], tokens):
            return np.asarray(held["costs"], np.float64)
    costs = _computed(gguf, segments)
    with _or_a_line(), replaced(place) as new:
        np.savez(new, of=of, tokens=tokens, costs=costs)
    return costs


def _computed(gguf: Path, segments: Sequence[NDArray[np.int64]]) -> Costs:
    from outrider.export.checkpoint import open_checkpoint
    from outrider.export.reference import FloatReference
    from outrider.export.slots import SlotWeights

    targets, costs = np.concatenate(segments)[1:], list[float]()
    with open_checkpoint(gguf) as checkpoint:
        reference = FloatReference(SlotWeights(checkpoint))
        for rows in reference.rows(reference.final_states(segments)):
            costs += negative_log_likelihood(rows, targets[len(costs) : len(costs) + len(rows)].tolist())
    return np.asarray(costs)


def measure_models(gguf: Path, models: Sequence[Path], python: Path, threads: int) -> dict[str, Perplexity]:
    """Measure genai folders, and the GGUF file itself by llama.cpp, and keep what is found; by name of the model."""
    segments = _segments(gguf)
    requests, reference = with_targets(segments), _float_costs(gguf, segments)
    table: dict[str, Perplexity] = {}
    for name, model in named(models).items():
        engine = "genai" if model.is_dir() else "llama.cpp"
        worker = Worker(engine, python, model, threads, score=True)
        try:
            costs = np.concatenate([worker.ask(request)["nll"] for request in requests])
        finally:
            worker.close()
        found = table[f"{engine} {name}"] = perplexity(costs, reference)
        keep(model, found)
        print(f"{engine} {name}: {found}", file=sys.stderr)
    return table


@told
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, keep and print."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.perplexity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gguf", type=gguf_file, required=True)
    parser.add_argument(
        "--genai", type=genai_folder, nargs="*", default=[], help="made by `benchmarks.peers build`"
    )
    parser.add_argument("--skip", nargs="*", default=[], choices=["llama.cpp"])
    parser.add_argument("--peers", type=Path, default=PEERS, help="the peers' virtual environment")
    parser.add_argument("--threads", type=at_least(1), default=2)
    parser.add_argument("--json", type=new_file, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    models = [*([] if options.skip else [options.gguf]), *options.genai]
    if not models:
        parser.error("nothing is left to measure; skip less, or give --genai")
    table = measure_models(options.gguf, models, installed_python(options.peers), options.threads)
    print(_table(table))
    if options.json:
        figures = {name: {**asdict(found), "increase": found.increase} for name, found in table.items()}
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


def _table(table: Mapping[str, Perplexity]) -> str:
    body = [
        [name, f"{found.perplexity:.3f}", f"{found.reference:.3f}", *_increase(found), str(found.tokens)]
        for name, found in table.items()
    ]
    return markdown_table(
        ["model", "perplexity", "float weights", "increase", f"<= {WITHIN:.0%}", "tokens"], body
    )


def _increase(found: Perplexity) -> list[str]:
    error = "" if found.error is None else f" ± {found.error:.2%}"
    return [f"{found.increase:+.2%}{error}", "yes" if found.increase <= WITHIN else "no"]


if __name__ == "__main__":
    sys.exit(main())
