"""What `arm64-smoke` runs twice, here and in the arm64 userland: it needs the core of Outrider only, no torch.

`generate BUNDLE OUT [TOKENS]` writes tokens, times and logits; `kernels FOLDER OUT` runs single operators.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

PROMPT = "The lighthouse at the end of the harbour"


def generate(bundle: str, out: str, tokens_file: str | None = None, count: str = "24") -> dict[str, Any]:
    """Decode greedily, and then run one text, that of `tokens_file` if there is one, for its logits."""
    import outrider

    with outrider.load(bundle, draft=False, threads=1, governor=False) as pipeline:
        prompt = pipeline.tokenizer.encode(PROMPT)
        begin = time.monotonic()
        result = pipeline.generate(PROMPT, max_tokens=int(count), k=0)
        seconds = time.monotonic() - begin
        drafted = pipeline.generate(PROMPT, max_tokens=int(count), k=4)
        own = list(result.tokens)
        text = json.loads(Path(tokens_file).read_text()) if tokens_file else [*prompt, *own]
        target = pipeline.engine.target
        target.truncate(0)
        logits = np.array(target.forward(text).logits)
    np.save(f"{out}.npy", logits)
    steps = max(1, result.stats.rounds - 1)
    return {
        "tokens": own,
        "text_tokens": text,
        "drafting_changed_nothing": list(drafted.tokens) == own,
        "seconds_per_token": result.stats.decode_s / steps,
        "seconds": seconds,
        "peak_rss_mb": peak_rss_mb(),
    }


def kernels(folder: str, out: str) -> dict[str, Any]:
    """Run every operator of a folder on its input, and on each row alone; also with Arm's KleidiAI kernels off."""
    found, same = {}, {}
    for path in sorted(Path(folder).glob("*.onnx")):
        x = np.load(path.with_suffix(".npy"))
        for kleidi in (True, False):
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            if not kleidi:
                options.add_session_config_entry("mlas.disable_kleidiai", "1")
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            name = path.stem + ("" if kleidi else ", no KleidiAI")
            found[name] = session.run(None, {"x": x})[0]
            alone = [session.run(None, {"x": x[row : row + 1]})[0][0] for row in range(len(x))]
            same[name] = bool(np.array_equal(found[name], np.stack(alone)))
    np.savez(f"{out}.npz", **found)
    return {"same_alone": same}


def peak_rss_mb() -> float:
    """Most memory that was resident, in MB; under an emulator the emulator's is in it."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def main(task: str, *arguments: str) -> None:
    """Run a task and write what it found beside its arrays."""
    result = {"generate": generate, "kernels": kernels}[task](*arguments)
    result |= {"machine": platform.machine(), "onnxruntime": ort.__version__, "numpy": np.__version__}
    Path(f"{arguments[1]}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
