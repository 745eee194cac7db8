"""One engine in one process, driven by JSON lines; runs as a file in the environment of its engine.

    python worker.py {outrider|llama.cpp|genai} MODEL --threads 2 [--score]

A request is `{"tokens": [...], "max_tokens": n}`; every engine gets the same token ids and writes on past its
stop tokens. The answer is `{"tokens": n, "prompt_tokens": n, "prompt_s": ..., "decode_s": ..., ...}` where
`decode_s` runs from the first token to the last, so that a token costs decode_s / (tokens - 1).
With `--score` a request is `{"tokens": [S], "targets": [S or fewer]}`, and the answer `{"nll": [...]}`: what each
target costs in nats after the tokens up to its place, by the engine's own logits.
Nothing here imports what another engine needs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Request = dict[str, Any]
Engine = Callable[[Request], dict[str, Any]]
CHUNK = 64  # tokens at a time when scoring: 40 MB of logits at a vocabulary of 152k


def outrider_engine(model: str, threads: int) -> Engine:
    """Plain greedy decoding through the public API."""
    import outrider

    pipeline = outrider.load(model, threads=threads)

    def run(request: Request) -> dict[str, Any]:
        pipeline.reset()
        options = {"max_tokens": request["max_tokens"], "k": 0, "ignore_eos": True}
        start = time.perf_counter()
        result = pipeline.generate(request["tokens"], **options)
        whole = time.perf_counter() - start
        stats = result.stats
        return {
            "tokens": len(result.tokens),
            "prompt_tokens": stats.prompt_tokens,
            "prompt_s": stats.ttft_s,
            "decode_s": whole - stats.ttft_s,  # streaming and text included, as the user waits for it
            "ids": list(result.tokens),
        }

    return run


def llama_cpp_engine(model: str, threads: int) -> Engine:
    """llama.cpp's own server, in process, through xllamacpp; times are the server's."""
    server = _llama_cpp_server(model, threads)

    def run(request: Request) -> dict[str, Any]:
        answer = server.handle_completions(
            {
                "prompt": request["tokens"],
                "n_predict": request["max_tokens"],
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        times = answer["timings"]
        return {
            "tokens": times["predicted_n"],
            "prompt_tokens": times["prompt_n"],
            "prompt_s": times["prompt_ms"] / 1e3,
            "decode_s": times["predicted_ms"] / 1e3,
            "text": answer["choices"][0]["text"],
        }

    return run


def llama_cpp_scorer(model: str, threads: int) -> Engine:
    """One token of decoding for each target, which a logit bias forces; its log-probability is without the bias."""
    server = _llama_cpp_server(model, threads)

    def log_probability(context: list[int], target: int) -> float:
        answer = server.handle_completions(
            {
                "prompt": context,
                "n_predict": 1,
                "temperature": 0.0,
                "samplers": ["top_k"],
                "top_k": 1,
                "logit_bias": [[target, 1e4]],
                "n_probs": 1,
                "post_sampling_probs": False,
                "cache_prompt": True,
            }
        )
        [written] = answer["choices"][0]["logprobs"]["content"]
        if written["id"] != target:
            raise RuntimeError(f"llama.cpp wrote token {written['id']} where {target} was forced")
        return float(written["logprob"])

    def run(request: Request) -> dict[str, Any]:
        tokens = request["tokens"]
        pairs = enumerate(request["targets"], start=1)
        return {"nll": [-log_probability(tokens[:end], target) for end, target in pairs]}

    return run


def _llama_cpp_server(model: str, threads: int) -> Any:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.verbosity = 2048, 1, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    return xllamacpp.Server(params)


def genai_engine(model: str, threads: int) -> Engine:
    """onnxruntime-genai's Generator, greedy, with its shared past/present buffer."""
    import onnxruntime_genai

    loaded = _genai_model(_without_eos(Path(model)), threads)

    def run(request: Request) -> dict[str, Any]:
        params = onnxruntime_genai.GeneratorParams(loaded)
        prompt, wanted = request["tokens"], request["max_tokens"]
        params.set_search_options(do_sample=False, max_length=len(prompt) + wanted)
        generator = onnxruntime_genai.Generator(loaded, params)
        start = time.perf_counter()
        generator.append_tokens(prompt)
        generator.generate_next_token()
        first = time.perf_counter()
        while generator.token_count() < len(prompt) + wanted:
            generator.generate_next_token()
        last = time.perf_counter()
        ids = [int(token) for token in generator.get_sequence(0)[len(prompt) :]]
        return {
            "tokens": len(ids),
            "prompt_tokens": len(prompt),
            "prompt_s": first - start,
            "decode_s": last - first,
            "ids": ids,
        }

    return run


def genai_scorer(model: str, threads: int) -> Engine:
    """The logits of the model's own graph, from onnxruntime-genai's Generator, a chunk of tokens at a time."""
    import onnxruntime_genai

    loaded = _genai_model(model, threads)

    def run(request: Request) -> dict[str, Any]:
        tokens, targets = request["tokens"], request["targets"]
        params = onnxruntime_genai.GeneratorParams(loaded)
        params.set_search_options(do_sample=False, max_length=len(tokens))
        generator = onnxruntime_genai.Generator(loaded, params)
        costs: list[float] = []
        for start in range(0, len(targets), CHUNK):
            part = tokens[start : start + CHUNK]
            generator.append_tokens(part)
            [logits] = generator.get_output("logits")
            if len(logits) != len(part):
                raise RuntimeError(f"the graph returns {len(logits)} rows of logits for {len(part)} tokens")
            costs += negative_log_likelihood(logits, targets[start : start + CHUNK])
        return {"nll": costs}

    return run


def negative_log_likelihood(logits: Any, targets: list[int]) -> list[float]:
    """What the targets cost in nats, row by row; rows [R, V] beyond the last target are left out."""
    import numpy as np

    rows = np.asarray(logits, np.float64)[: len(targets)]
    peak = rows.max(axis=1)
    total = peak + np.log(np.exp(rows - peak[:, None]).sum(axis=1))
    costs: list[float] = (total - rows[np.arange(len(targets)), targets]).tolist()
    return costs


def _genai_model(folder: str, threads: int) -> Any:
    import onnxruntime_genai

    config = onnxruntime_genai.Config(folder)
    config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
    return onnxruntime_genai.Model(config)


def _without_eos(folder: Path) -> str:
    """A sibling folder of links whose config ends at no usual token: genai has no switch to ignore EOS."""
    twin = folder.with_name(folder.name + ".no-eos")
    twin.mkdir(exist_ok=True)
    for file in folder.iterdir():
        link = twin / file.name
        if file.name != "genai_config.json" and not link.exists():
            link.symlink_to(file.absolute())
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["eos_token_id"] = [config["model"]["vocab_size"] - 1]
    (twin / "genai_config.json").write_text(json.dumps(config))
    return str(twin)


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "outrider": outrider_engine,
    "llama.cpp": llama_cpp_engine,
    "genai": genai_engine,
}
SCORERS: dict[str, Callable[[str, int], Engine]] = {"llama.cpp": llama_cpp_scorer, "genai": genai_scorer}


def main() -> None:
    """Load the engine, say so, then answer one request a line until the input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--score", action="store_true")
    options = parser.parse_args()
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    start = time.perf_counter()
    engine = (SCORERS if options.score else ENGINES)[options.engine](options.model, options.threads)
    channel.write(json.dumps({"load_s": time.perf_counter() - start}) + "\n")
    for line in sys.stdin:
        answer = engine(json.loads(line))
        channel.write(json.dumps({**answer, "resident_mb": resident_mb()}) + "\n")


def resident_mb() -> float | None:
    """Resident memory of this process, or None where /proc is not there."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:")), None)


if __name__ == "__main__":
    main()
